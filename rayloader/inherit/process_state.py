"""The settings that a worker's process takes over from the driver, and how they are restored.

Promise: a forked worker would inherit these things from the process and thread that called `iter()`; an actor's
process adopts them for as long as it works for that iterator, and afterwards is as Ray started it, or says why not.
"""

from __future__ import annotations

import contextlib
import decimal
import multiprocessing
import os
import sys
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rayloader._compat import default_collate_fn_map, print_options
from rayloader.inherit.left_behind import LeftBehind, Setting, read_all
from rayloader.inherit.logging_state import LoggingState
from rayloader.inherit.module_globals import File, ModuleGlobals, adopt_files, loaded_files


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a forked worker would inherit from the driver, as it was at `iter()`."""

    node_id: str  # the driver's: some settings are meaningful only there
    cwd: str
    environ: dict[str, str]
    argv: list[str]
    sys_path: list[str]
    affinity: set[int]  # cores of the thread that called iter()
    inference_mode: bool
    settings: dict[str, Any]  # values of _SETTINGS
    module_globals: ModuleGlobals
    files: dict[str, File]  # of the program's modules
    logging: LoggingState
    authkey: bytes = field(repr=False)  # of multiprocessing: a secret that only workers of this node need

    @classmethod
    def capture(cls, node_id: str) -> ProcessState:
        """The state of this process and thread, on that node."""
        try:
            cwd = os.getcwd()
        except FileNotFoundError:  # it was removed: there is none to pass on
            cwd = ""
        return cls(
            node_id=node_id,
            cwd=cwd,
            environ=dict(os.environ),
            argv=list(sys.argv),
            sys_path=[os.path.join(cwd, entry) for entry in map(os.fspath, sys.path)],
            affinity=os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(),
            inference_mode=torch.is_inference_mode_enabled(),
            settings=read_all(_SETTINGS),
            module_globals=ModuleGlobals.capture(),
            files=loaded_files(),
            logging=LoggingState.capture(),
            authkey=bytes(multiprocessing.current_process().authkey),
        )

    def without_secrets(self) -> ProcessState:
        """The state for a worker on another node."""
        return replace(self, authkey=b"")


class Baseline:
    """The process as Ray started it: the driver's state is adopted for an epoch and removed after it."""

    def __init__(self, node_id: str, own_variables: set[str]) -> None:
        self._node_id = node_id
        self._own_variables = own_variables
        self._cwd = os.getcwd()
        self._environ = dict(os.environ)
        self._argv = list(sys.argv)
        self._sys_path = list(sys.path)
        self._affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._settings = read_all(_SETTINGS)
        self._left_behind = LeftBehind()
        self._key = multiprocessing.current_process().authkey
        self._modes = contextlib.ExitStack()  # restored by leaving it
        self._collate_fn_map = dict(default_collate_fn_map)

    def adopt(self, state: ProcessState, *, alone: bool = True) -> None:
        """Adopts what a forked worker would have; on another node than the driver's, only what is meaningful there.

        The globals of modules only if `alone`: otherwise a worker that is here already may have changed them.
        """
        here = state.node_id == self._node_id
        if state.cwd and os.path.isdir(state.cwd):
            os.chdir(state.cwd)
        _set_environ(self._merged_environ(state.environ, here=here))
        sys.argv[:] = state.argv
        sys.path[:] = [*state.sys_path, *(entry for entry in self._sys_path if entry not in state.sys_path)]
        if here and state.affinity:
            os.sched_setaffinity(0, state.affinity)
        if here and state.authkey:
            multiprocessing.current_process().authkey = state.authkey
        adopt_files(state.files)
        if alone:
            state.module_globals.adopt()
        self._modes.enter_context(warnings.catch_warnings())
        self._modes.enter_context(torch.inference_mode(state.inference_mode))
        _write_settings(state.settings)  # last, because a change of inference mode also changes grad mode

    def _merged_environ(self, driver: dict[str, str], *, here: bool) -> dict[str, str]:
        """The driver's variables; Ray's own and what `runtime_env` or Ray set for this actor stay.

        On another node than the driver's, the machine's own values win: PATH and HOME mean other things there.
        """
        own = {key: value for key, value in self._environ.items() if not here or key in self._own_variables}
        return {**{key: value for key, value in driver.items() if not key.startswith("RAY_")}, **own}

    def importing(self) -> contextlib.AbstractContextManager[None]:
        """To be entered around code that imports the program's modules."""
        return self._left_behind.importing()

    def restore(self) -> str:
        """Restores what can be restored exactly, whatever user code has changed.

        Returns:
            What else it has changed or left behind, in words: this process must not be used again. Empty: nothing.
        """
        left_behind = self._left_behind.undo()
        os.chdir(self._cwd)
        _set_environ(self._environ)
        sys.argv[:] = self._argv
        sys.path[:] = self._sys_path
        if self._affinity:
            os.sched_setaffinity(0, self._affinity)
        torch.set_default_device(None)
        self._modes.close()
        _write_settings(self._settings)
        torch.clear_autocast_cache()
        multiprocessing.current_process().authkey = self._key
        adopt_files({})
        default_collate_fn_map.clear()
        default_collate_fn_map.update(self._collate_fn_map)
        return left_behind


def _set_environ(environ: dict[str, str]) -> None:
    zone = os.environ.get("TZ")
    for key in os.environ.keys() - environ.keys():
        del os.environ[key]
    for key, value in environ.items():
        if os.environ.get(key) != value:
            os.environ[key] = value
    if os.environ.get("TZ") != zone:
        time.tzset()


# ---- settings


def _write_settings(values: dict[str, Any]) -> None:
    for name, value in values.items():
        _SETTINGS[name].write(value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _use_deterministic(mode: tuple[bool, bool]) -> None:
    if mode != _deterministic():
        torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])


def _autocast() -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


def _use_autocast(mode: tuple[bool, torch.dtype, bool]) -> None:
    enabled, dtype, cache = mode
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(cache)


def _flushes_denormal() -> bool:
    """Whether the processor treats denormal numbers as zero in this thread; torch can only set that."""
    return sys.float_info.min / 2 == 0


def _matmul_precision() -> str | None:
    """None if the program has set it by `torch.backends`, because torch then does not reveal it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision not in (None, _matmul_precision()):
        torch.set_float32_matmul_precision(precision)


def _numpy_printing() -> dict[str, Any]:
    """Without functions, which need not be picklable."""
    functions = "formatter", "override_repr"
    return {name: option for name, option in np.get_printoptions().items() if name not in functions}


_likely_umask = 0o077


def _umask() -> int:
    """Only setting it reveals it: sets the last known value, so that files that threads create meanwhile get that."""
    global _likely_umask
    umask = os.umask(_likely_umask)
    if umask != _likely_umask:
        os.umask(umask)
        _likely_umask = umask
    return umask


# Their values are picklable.
_SETTINGS = {
    "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": Setting(_deterministic, _use_deterministic),
    "sharing strategy": Setting(torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    "autocast": Setting(_autocast, _use_autocast),
    "flush denormal": Setting(_flushes_denormal, torch.set_flush_denormal),
    "matmul precision": Setting(_matmul_precision, _set_matmul_precision),
    "torch's printing": Setting(lambda: dict(vars(print_options)), lambda options: torch.set_printoptions(**options)),
    "NumPy's errors": Setting(np.geterr, lambda modes: np.seterr(**modes)),
    "NumPy's printing": Setting(_numpy_printing, lambda options: np.set_printoptions(**options)),
    "decimal context": Setting(lambda: decimal.getcontext().copy(), lambda context: decimal.setcontext(context.copy())),
    "recursion limit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "umask": Setting(_umask, os.umask),
}
