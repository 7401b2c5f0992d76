"""Raises what a signal handler might raise, at each moment at which Python runs one."""

import sys


class Interrupt(Exception):
    """Of a signal handler."""


def interrupted(files, number, function):
    """Calls it, with an exception at the given one of the moments at which a handler may run in code of these files.

    Returns whether there were so many.
    """
    left = [number]

    def profile(frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            left[0] -= 1
            if left[0] < 0:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(profile)
    try:
        function()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False
