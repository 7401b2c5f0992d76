"""The process of one implementation: calls what the driver asks for, line by line.

A request is a line of JSON on standard input: a function, as `module:name`, and its keyword arguments. It is called
with the implementation's name first. The answer is a line of JSON: its value, or `missing` (the implementation cannot
do this; why), or `error` (a traceback). Whatever libraries print goes to standard error. The end of standard input ends
the process. Not meant to be started by hand; see `processes.Peer`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any


def answer(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    import peers

    module, function = request["function"].split(":")
    try:
        value = getattr(importlib.import_module(module), function)(name, **request["arguments"])
    except peers.Unavailable as why:
        return {"missing": str(why)}
    except Exception as error:  # whatever a peer raises, the driver hears of it
        if name in peers.REQUIRED:
            return {"error": traceback.format_exc()}
        traceback.print_exc()
        return {"missing": _reason(error)}
    if "ray" in sys.modules and name not in peers.RAY_ALLOWED:
        return {"error": f"{name} ran in a process that has Ray in it"}
    return {"value": value}


def _reason(error: Exception) -> str:
    """Why a peer is left out, on one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    return f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


def main() -> None:
    """Serves until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: on purpose
    try:
        for line in sys.stdin:
            print(json.dumps(answer(sys.argv[1], json.loads(line))), file=answers, flush=True)
    except KeyboardInterrupt:
        pass  # how the driver ends a process that is busy


if __name__ == "__main__":
    main()
