"""Runs the README's programs as they are printed, each in a process of its own, and tells how many passed.

    python tests/versions/readme.py [WAY ...]

Each WAY, one of `taken_away.WAYS` or "all", is a system or a build of Python without what rayloader's workers need.
There the programs must run as well, but for those that use what only rayloader's workers have: they must end with the
error that says so.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from documents import BLOCKS
from taken_away import WAYS

PROGRAMS = [block for block in BLOCKS if block.document == "README.md" and block.command is not None]
REFUSED = {
    "rayloader.init(": "ValueError: rayloader.init() needs rayloader's own workers",
    "        break\n    file": "StateError: the middle of an epoch can't be saved with torch's own workers",
}
HANG_LIMIT = 600  # seconds; on expiry subprocess.run kills the program and raises


def passes(code: str, way: str | None) -> bool:
    """Whether a program ends as it should."""
    first = "" if way is None else f"import taken_away; taken_away.take_away({way!r})"
    errors = [error for part, error in REFUSED.items() if way is not None and part in code]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(first + code)  # the code begins with empty lines
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        command = [sys.executable, str(program)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_LIMIT)
    passed = all(error in done.stderr for error in errors) and (done.returncode != 0) == bool(errors)
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
