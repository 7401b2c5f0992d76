"""Runs the README's programs as they are printed, each in a process of its own, and tells how many passed.

    python tests/versions/readme.py [WAY ...]

Each WAY, one of `taken_away.WAYS` or "all", is a system or a build of Python without what rayloader's workers need.
There the programs must run as well; only those that start Ray actors must end with the error that says what is missing.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from documents import BLOCKS
from taken_away import WAYS

PROGRAMS = [block for block in BLOCKS if block.document == "README.md" and block.command is not None]
HANG_LIMIT = 600  # seconds; on expiry subprocess.run kills the program and raises


def passes(code: str, way: str | None) -> bool:
    """Whether a program ends as it should."""
    first = "" if way is None else f"import taken_away; taken_away.take_away({way!r})"
    refusal = "ValueError: rayloader.init() needs" if way is not None and "rayloader.init(" in code else None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(first + code)  # the code begins with empty lines
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        command = [sys.executable, str(program)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_LIMIT)
    passed = done.returncode == 0 if refusal is None else refusal in done.stderr
    if not passed:
        print(done.stdout, done.stderr, sep="\n")
    return passed


if __name__ == "__main__":
    ways = list(WAYS) if sys.argv[1:] == ["all"] else sys.argv[1:] or [None]
    passed = []
    for way in ways:
        for program in PROGRAMS:
            passed.append(passes(program.code, way))
            print(program, way or "", "passed" if passed[-1] else "failed", flush=True)
    print(f"{sum(passed)} passed, {passed.count(False)} failed" if False in passed else f"{sum(passed)} passed")
    sys.exit(False in passed)
