"""What a worker's process takes over from the driver, and what it is put back to.

Promise: a forked worker would inherit these things from the process and thread that called `iter()`; an actor's
process adopts them for as long as it works for that iterator, and is then as Ray started it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import warnings
from dataclasses import dataclass

import numpy as np
import torch

from rayloader._compat import default_collate_fn_map
from rayloader.state.logging_state import LoggingState
from rayloader.state.module_globals import ModuleGlobals


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a forked worker would inherit from the driver, as it was at `iter()`."""

    node_id: str  # of the driver: some of it means something there only
    cwd: str
    environ: dict[str, str]
    argv: list[str]
    sys_path: list[str]
    affinity: set[int]  # cores of the thread that called iter()
    default_dtype: torch.dtype
    grad_enabled: bool
    inference_mode: bool
    deterministic: tuple[bool, bool]  # torch.use_deterministic_algorithms: on, and warn only
    sharing_strategy: str  # of torch.multiprocessing
    module_globals: ModuleGlobals
    logging: LoggingState

    @classmethod
    def capture(cls, node_id: str) -> ProcessState:
        """The state of this process and thread, on that node."""
        try:
            cwd = os.getcwd()
        except FileNotFoundError:  # removed under our feet: there is none to pass on
            cwd = ""
        return cls(
            node_id=node_id,
            cwd=cwd,
            environ=dict(os.environ),
            argv=list(sys.argv),
            sys_path=[os.path.join(cwd, entry) for entry in map(os.fspath, sys.path)],
            affinity=os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(),
            default_dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            deterministic=_deterministic(),
            sharing_strategy=torch.multiprocessing.get_sharing_strategy(),
            module_globals=ModuleGlobals.capture(),
            logging=LoggingState.capture(),
        )


class Baseline:
    """The process as Ray started it: the driver's state is put on for an epoch and taken off after it."""

    def __init__(self, node_id: str, own_variables: set[str]) -> None:
        self._node_id = node_id
        self._own_variables = own_variables
        self._cwd = os.getcwd()
        self._environ = dict(os.environ)
        self._argv = list(sys.argv)
        self._sys_path = list(sys.path)
        self._affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._default_dtype = torch.get_default_dtype()
        self._deterministic = _deterministic()
        self._sharing_strategy = torch.multiprocessing.get_sharing_strategy()
        self._num_threads = torch.get_num_threads()
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._gc = gc.isenabled(), gc.get_threshold()
        self._recursion_limit = sys.getrecursionlimit()
        self._socket_timeout = socket.getdefaulttimeout()
        self._umask = os.umask(0o022)
        os.umask(self._umask)
        self._modes = contextlib.ExitStack()  # what is put back by leaving it
        self._collate_fn_map = dict(default_collate_fn_map)

    def adopt(self, state: ProcessState, *, alone: bool = True) -> None:
        """Takes over what a forked worker would have; on another node than the driver's, what means something there.

        The globals of modules only `alone`: else a worker that is here already may have changed them.
        """
        here = state.node_id == self._node_id
        if state.cwd and os.path.isdir(state.cwd):
            os.chdir(state.cwd)
        _set_environ(self._merged_environ(state.environ, here=here))
        sys.argv[:] = state.argv
        sys.path[:] = [*state.sys_path, *(entry for entry in self._sys_path if entry not in state.sys_path)]
        if here and state.affinity:
            os.sched_setaffinity(0, state.affinity)
        torch.set_default_dtype(state.default_dtype)
        _use_deterministic(state.deterministic)
        torch.multiprocessing.set_sharing_strategy(state.sharing_strategy)
        if alone:
            state.module_globals.adopt()
        self._modes.enter_context(warnings.catch_warnings())
        self._modes.enter_context(np.errstate())
        self._modes.enter_context(torch.inference_mode(state.inference_mode))
        self._modes.enter_context(torch.set_grad_enabled(state.grad_enabled))

    def _merged_environ(self, driver: dict[str, str], *, here: bool) -> dict[str, str]:
        """The driver's variables; Ray's own and what `runtime_env` or Ray set for this actor stay.

        Elsewhere than on the driver's node the machine's own values win: PATH and HOME mean other things there.
        """
        own = {key: value for key, value in self._environ.items() if not here or key in self._own_variables}
        return {**{key: value for key, value in driver.items() if not key.startswith("RAY_")}, **own}

    def restore(self) -> None:
        """Puts everything back, whatever user code did to it."""
        os.chdir(self._cwd)
        _set_environ(self._environ)
        sys.argv[:] = self._argv
        sys.path[:] = self._sys_path
        if self._affinity:
            os.sched_setaffinity(0, self._affinity)
        torch.set_default_dtype(self._default_dtype)
        _use_deterministic(self._deterministic)
        torch.multiprocessing.set_sharing_strategy(self._sharing_strategy)
        torch.set_num_threads(self._num_threads)
        torch.set_default_device(None)
        torch.autograd.set_detect_anomaly(False)
        self._modes.close()
        (gc.enable if self._gc[0] else gc.disable)()
        gc.set_threshold(*self._gc[1])
        sys.setrecursionlimit(self._recursion_limit)
        socket.setdefaulttimeout(self._socket_timeout)
        os.umask(self._umask)
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        default_collate_fn_map.clear()
        default_collate_fn_map.update(self._collate_fn_map)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _use_deterministic(mode: tuple[bool, bool]) -> None:
    if mode != _deterministic():
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _set_environ(environ: dict[str, str]) -> None:
    for key in os.environ.keys() - environ.keys():
        del os.environ[key]
    for key, value in environ.items():
        if os.environ.get(key) != value:
            os.environ[key] = value
