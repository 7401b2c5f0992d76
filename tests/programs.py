"""Programs of the tests as forks of one process that has imported torch: its import takes longer than what most do.

A fork is as Python's own process for a program would be: the program is `__main__`, has the arguments, the environment
and the folder that it is given, and ends as the interpreter does. What only the start of an interpreter sees needs one
that starts: options of Python, `PYTHONHASHSEED`, `PYTHONPATH`.

Run as a program, this file is the process that forks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

LIMIT_S = 500.0  # for a program; on expiry it is killed and the test fails
FOLDER = str(Path(__file__).parent)


class Program:
    """A program that runs, as `subprocess.Popen` has it.

    Args:
        program: its path, or else its text.
        arguments: of its command line.
        env: its environment; that of this process by default.
        cwd: the folder that it begins in; that of this process by default.
    """

    def __init__(self, program, *arguments, env=None, cwd=None):
        path = os.fspath(program) if isinstance(program, Path) else None
        self._folder = Path(tempfile.mkdtemp(prefix="program-"))
        request = {
            "path": path,
            "source": program if path is None else None,
            "arguments": [os.fspath(argument) for argument in arguments],
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or os.getcwd()),
            **{name: str(self._folder / name) for name in ("output", "errors", "status")},
        }
        forking = _forking()
        forking.stdin.write(json.dumps(request) + "\n")
        forking.stdin.flush()
        waiter, self.pid = map(int, forking.stdout.readline().split())
        self._waiter = os.pidfd_open(waiter)
        self.returncode = None

    def communicate(self, timeout=LIMIT_S):
        """What it has printed, and its errors, once it has ended."""
        try:
            if self.returncode is None and not select.select([self._waiter], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout)
        finally:
            self.kill()
        return self._printed

    def kill(self):
        """Kills it unless it has ended, and takes notice of its end."""
        if self.returncode is None:
            if not select.select([self._waiter], [], [], 0)[0]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                select.select([self._waiter], [], [])
            os.close(self._waiter)
            self.returncode = int((self._folder / "status").read_text())
            self._printed = (self._folder / "output").read_text(), (self._folder / "errors").read_text()
            shutil.rmtree(self._folder)

    def __del__(self):
        with contextlib.suppress(AttributeError, OSError):
            self.kill()


def run(program, *arguments, timeout=LIMIT_S, **options):
    """Runs a program to its end: its `returncode`, `stdout` and `stderr`; see `Program`."""
    process = Program(program, *arguments, **options)
    output, errors = process.communicate(timeout)
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@functools.cache
def _forking():
    """The process that forks, which ends when this one does."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    atexit.register(_end, process)
    return process


def _end(process):
    process.stdin.close()
    process.stdout.close()
    process.wait()


# --- the process that forks


def _serve():
    """Forks for each request, beside each other; gives the request in the fork, and ends with those who ask."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the waiters
    for line in sys.stdin:
        if os.fork() == 0:
            return _fork(json.loads(line))
    return None


def _fork(request):
    """Gives the request in the program's process; the one here tells who both are, and waits for its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        return request
    os.write(1, f"{os.getpid()} {program}\n".encode())
    for descriptor in (0, 1):
        os.close(descriptor)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    Path(request["status"]).write_text(str(status))
    os._exit(0)


def _become(request):
    """Makes this process that of the program; gives its code, and the names of its `__main__`."""
    os.setsid()
    for number, name in enumerate((os.devnull, request["output"], request["errors"])):
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    path, source = request["path"], request["source"]
    sys.argv[:] = [path or "-c", *request["arguments"]]
    sys.path[0] = str(Path(path).resolve().parent) if path else ""
    main = types.ModuleType("__main__")
    if path:
        main.__file__, source = path, Path(path).read_text()
    sys.modules["__main__"] = main
    return compile(source, path or "<string>", "exec"), vars(main)


if __name__ == "__main__":
    import torch
    import torch.utils.data  # noqa: F401

    if (request := _serve()) is not None:
        code, names = _become(request)
        exec(code, names)
