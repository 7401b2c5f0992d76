"""Pickles objects that no import finds, as cloudpickle does, but code keeps the name of its file.

Since cloudpickle 3.1.3 code arrives without that name: tracebacks and warnings from functions of `__main__` would show
`<dynamic-code>`, and no lines. No state.
"""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import cloudpickle

_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _reduce(code: types.CodeType) -> Any:
    make, arguments = _reduce_code(code)
    if code.co_filename in arguments:
        return make, arguments
    return _code_of_file, (make, arguments, code.co_filename)


def _code_of_file(make: Any, arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=filename)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes by value if an import does not find them."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: _reduce})


def dumps(obj: Any) -> bytes:
    """The pickle of an object."""
    file = io.BytesIO()
    Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getvalue()
