"""A module that configures its logger where it is imported, as many do; of script_output.py."""

import logging
import sys
import warnings

log = logging.getLogger("module")
log.setLevel(logging.INFO)
log.propagate = False
_handler = logging.StreamHandler(sys.stdout)
_handler.setFormatter(logging.Formatter("module's own: %(message)s"))
log.addHandler(_handler)


def prefixed(record):
    record.msg = f"[prefixed] {record.msg}"
    return True


log.addFilter(prefixed)
warnings.warn("this module is old", DeprecationWarning, stacklevel=1)
