"""A module that configures its logger where it is imported, as many do; of script_output.py."""

import logging
import sys

log = logging.getLogger("module")
log.setLevel(logging.INFO)
log.propagate = False
_handler = logging.StreamHandler(sys.stdout)
_handler.setFormatter(logging.Formatter("module's own: %(message)s"))
log.addHandler(_handler)
