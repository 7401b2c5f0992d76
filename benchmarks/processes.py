"""The processes of the implementations, as the driver of a benchmark sees them.

Promise: every implementation runs in a process of its own, which is idle while another measures. A process that dies,
or does not answer in time, is an error that names it; none outlives the benchmark, also after Ctrl-C or a SIGTERM.
Standard library only. Run as a program, this file is the other end: it calls what the driver asks for, line by line. A
request is a line of JSON: a function, as `module:name`, which is called with the implementation's name first, and its
keyword arguments. The answer is a line of JSON: its value, or `missing` (the implementation cannot do this; why), or
`error` (a traceback). Whatever libraries print goes to standard error. The end of standard input ends the process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

ANSWER_LIMIT_S = 600.0  # the longest request, an epoch or a fill of 8 workers' memory, takes well under a minute
END_LIMIT_S = 20.0  # Ray takes a few seconds to shut down


class PeerError(RuntimeError):
    """The process of an implementation failed."""


@dataclass(frozen=True)
class Missing:
    """An implementation cannot do what was asked."""

    reason: str


class Peer:
    """One implementation of `peers.MAKERS`, in a process of its own; a context manager that ends it.

    It computes on one thread, as torch's workers do anyway; SPDL's and Grain's are slower on a thread for every core.
    """

    def __init__(self, name: str, env: dict[str, str] | None = None) -> None:
        self.name = name
        self._unread = b""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        inherited = {
            key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"
        }  # no cluster: this machine
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**inherited, "OMP_NUM_THREADS": "1", **(env or {})},
            start_new_session=True,  # Ctrl-C reaches the driver only, which ends the others
        )

    def call(self, function: str, **arguments: Any) -> Any:
        """Calls `module:function` over there and waits for what it returns, or for `Missing`.

        Raises:
            PeerError: the process died, the call raised, or no answer came within `ANSWER_LIMIT_S`.
        """
        assert self._process.stdin is not None
        request = json.dumps({"function": function, "arguments": arguments})
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died(request) from None
        answer = json.loads(self._read_line(request))
        if "missing" in answer:
            return Missing(answer["missing"])
        if "error" in answer:
            raise PeerError(f"{self.name} failed at {request}:\n{answer['error']}")
        return answer["value"]

    def _read_line(self, request: str) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while b"\n" not in self._unread:
            # In slices: workers may hold the pipe open after their parent's death.
            readable, _, _ = select.select([self._process.stdout], [], [], 1.0)
            chunk = os.read(self._process.stdout.fileno(), 1 << 16) if readable else b""
            self._unread += chunk
            if not chunk and (readable or self._process.poll() is not None):
                raise self._died(request)
            if time.monotonic() > deadline:
                raise PeerError(f"{self.name} has not answered {request} within {ANSWER_LIMIT_S:.0f} s")
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self, request: str) -> PeerError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._errors.seek(0)
        said = self._errors.read()[-2000:]
        return PeerError(f"the process of {self.name} died (status {self._process.returncode}) at {request}:\n{said}")

    def close(self, *, interrupt: bool = False) -> None:
        """Ends the process and what it started; callable more than once.

        Args:
            interrupt: it may be busy: interrupt it rather than wait.
        """
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            if interrupt and self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            pass  # killed now
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # workers that it left
            self._process.wait()
            self._process.stdout.close()  # type: ignore[union-attr]
            self._errors.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(interrupt=kind is not None)


def ask(name: str, function: str, **arguments: Any) -> Any:
    """One call in a new process."""
    with Peer(name) as peer:
        return peer.call(function, **arguments)


# ---- the other end


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
        if isinstance(error, ModuleNotFoundError):
            return {"missing": f"{error.name} is not installed"}
        return {"missing": f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]}
    if "ray" in sys.modules and name not in peers.RAY_ALLOWED:
        return {"error": f"{name} ran in a process that has Ray in it"}
    return {"value": value}


def serve() -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # more workers than cores: on purpose
    try:
        for line in sys.stdin:
            print(json.dumps(answer(sys.argv[1], json.loads(line))), file=answers, flush=True)
    except KeyboardInterrupt:
        pass  # how the driver ends a process that is busy


if __name__ == "__main__":
    serve()
