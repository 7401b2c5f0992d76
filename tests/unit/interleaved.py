"""Threads of which one runs at a time, and which take turns at the lines of some files: the same turns in each run."""

import random
import sys
import threading

HANG_LIMIT = 60  # seconds until a thread that never gets its turn fails the test


def interleaved(functions, within, seed):
    """What each function returns, or the error that it raises, called in a thread of its own.

    Args:
        functions: without arguments.
        within: a part of the paths of the files at whose lines the threads take turns.
        seed: of the turns.
    """
    turn = threading.Condition()
    running, rng, results = [*range(len(functions))], random.Random(seed), [None] * len(functions)
    now = running[0]

    def hand_on():
        nonlocal now
        now = rng.choice(running) if running else None
        turn.notify_all()

    def run(mine):
        def trace(frame, event, _):
            if within not in frame.f_code.co_filename:
                return None
            if event == "line":
                with turn:
                    hand_on()
                    assert turn.wait_for(lambda: now == mine, HANG_LIMIT)
            return trace

        with turn:
            assert turn.wait_for(lambda: now == mine, HANG_LIMIT)
        sys.settrace(trace)
        try:
            results[mine] = functions[mine]()
        except Exception as error:
            results[mine] = error
        finally:
            sys.settrace(None)
            with turn:
                running.remove(mine)
                hand_on()

    threads = [threading.Thread(target=run, args=(number,)) for number in running[:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
