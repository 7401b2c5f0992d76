"""Objects over memory of others: memory views, and the shared objects of ctypes. Promise: none arrives as another type.

No state; any thread may call.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from rayloader.transport.raw import address
from rayloader.transport.rebuilding import make_view
from rayloader.transport.reopening import Reduction, refusal

if TYPE_CHECKING:
    from rayloader.transport.mapped import Mappings

_CData: Any = ctypes.Array.__base__  # what all objects of ctypes are


def reduce(view: memoryview, mapped: Mappings | None) -> Reduction:
    """How a pickler recreates a memory view, with its format, its shape and the permission to write.

    It becomes the view of an array, whose memory travels as that of arrays does. But in a replica (`mapped`) whatever
    else the program can write to, such as a bytearray, travels itself: what is written there must appear in the view.

    Raises:
        TypeError: no array has such a format.
    """
    owner: Any = view.obj
    code = view.format if len(view.format) == 1 else None  # NumPy's pickling makes one type of "l" and "q"
    if code is None and isinstance(owner, _CData):  # whose formats NumPy guesses at
        raise _refused(view)
    array = np.asarray(view)
    dtype = np.dtype(code) if code else array.dtype
    if memoryview(array.view(dtype)).format != view.format or not dtype.isnative:  # type: ignore[arg-type]
        raise _refused(view)
    apart = mapped is None or not view.nbytes or address(array) in mapped or isinstance(owner, np.ndarray)
    if apart or memoryview(owner).readonly:
        return make_view, (array, code, view.readonly)
    start = address(array) - address(np.frombuffer(owner, np.uint8))
    return make_view, ((owner, array.shape, dtype, array.strides, start), code, view.readonly)


def _refused(view: memoryview) -> TypeError:
    return refusal(view, f"no array has its format, {view.format!r}; keep the object that it is a view of")


def is_shared_ctype(obj: Any, mapped: Mappings) -> bool:
    """Whether it is a `multiprocessing.RawArray` or `RawValue`, or another object of ctypes over a file's memory."""
    return isinstance(obj, _CData) and ctypes.addressof(obj) in mapped
