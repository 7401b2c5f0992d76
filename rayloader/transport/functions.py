"""The program's functions that travel by value to a worker: there they are over the globals of their own modules.

Cloudpickle gives lambdas, nested functions and the methods of local classes a copy of the globals that they name. In a
forked worker they share them with the rest of their module: what one sets the others see, and all draw from one random
generator. So their namespace travels by the module's name. What they name comes along, and is bound in the module where
that has something else: see `module_globals.bind`.

A module that a worker cannot import has no code there that could share anything. Its functions share a copy, as do
those of `__main__`, of modules that were made at run time, and of those that are registered with cloudpickle.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

from cloudpickle import cloudpickle as by_value

from rayloader.state import module_globals

_OF_MODULES = "__name__", "__package__", "__path__", "__file__"


class Namespace:
    """Stands for a module's globals."""

    def __init__(self, globals_: dict[str, Any]) -> None:
        self.basics = {name: globals_[name] for name in _OF_MODULES if name in globals_}

    def __reduce__(self) -> Any:
        return _namespace, (self.basics,)


def of_module(function: types.FunctionType) -> bool:
    """Whether a function's globals are those of a module that others can import."""
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if name in ("__main__", "__mp_main__") or not isinstance(module, types.ModuleType):
        return False
    globals_ = vars(module)
    spec = globals_.get("__spec__")
    return (
        globals_ is function.__globals__
        and isinstance(spec, importlib.machinery.ModuleSpec)
        and spec.loader is not None
        and spec.name == name
        and not by_value._is_registered_pickle_by_value(module)
    )


def over_namespace(reduced: Any) -> Any:
    """Cloudpickle's reduction of a function over a `Namespace`."""
    if not isinstance(reduced, tuple):
        return reduced  # it travels by name
    *reduction, _ = reduced
    return *reduction, _set_state


def _namespace(basics: dict[str, Any]) -> dict[str, Any]:
    """A module's globals; a namespace of its own if the module is not to be had, or is another one of that name."""
    try:
        globals_ = vars(importlib.import_module(basics["__name__"]))
    except Exception:  # whatever the module raises where it is not the program's
        return basics
    file = basics.get("__file__")
    is_another = globals_.get("__file__") != file and file is not None and os.path.exists(file)
    return basics if is_another else globals_


def _set_state(function: types.FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    module = sys.modules.get(function.__globals__["__name__"])
    if module is not None and vars(module) is function.__globals__:
        attributes, others = state
        module_globals.bind(function.__globals__, others["__globals__"])
        state = attributes, {**others, "__globals__": {}}
    by_value._function_setstate(function, state)
