"""What is finalized in a worker's process, and what is not: the same as in torch's.

NOTE [Finalizers]. Torch's worker is a fork of the trainer, and ends by `os._exit`. When it ends, its iterator is
finalized, because the function that holds it returns, and so is what `multiprocessing` finalizes at the end of a
process. The dataset is not, nor is anything else that it holds by then: no `__del__`, no `weakref.finalize` and no
`atexit` callback runs, and a folder that the dataset would remove remains for the trainer. Our process drops the
dataset and goes on, but it does not run them either. The files, mappings and memory that the objects hold are released
all the same. The process itself is ended by signals, or by Ray, which lets it exit when nobody refers to its actor:
then it exits as torch's worker does.

A process in which finalizers of weak references, or of `multiprocessing`, were left out does not work for another
epoch: they might have removed what that epoch would find, such as an entry that a library keeps by the identity of an
object. A `__del__` concerns the object alone, and many a dataset has one that closes a file: such processes go on,
unless they keep more and more files open.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

from rayloader._compat import (
    call_at_begin_of_exit,
    finalizers_of_processes,
    finalizers_of_weak_references,
    run_exit_finalizers,
)

# Packages whose `__del__` only releases memory and descriptors of this process.
_HARMLESS = {"rayloader", "ray", "torch", "multiprocessing"}


def exit_without_callbacks() -> None:
    """From now on this process exits without `atexit` callbacks and finalizers."""
    call_at_begin_of_exit(functools.partial(_end_process, os.getpid()))


def _end_process(pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of it
        with contextlib.suppress(Exception):  # what user code has put there
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def finalize_at_exit() -> None:
    """What `multiprocessing` does when one of its processes ends."""
    run_exit_finalizers(float("-inf"))


@contextlib.contextmanager
def without_finalizers() -> Iterator[list[str]]:
    """What is dropped in this block, or was garbage before, is not finalized in Python.

    Yields:
        A list to which the kinds of finalizers are added, left out by the end of the block, without which the process
        must not go on.
    """
    left_out: list[str] = []
    for priority, number in list(finalizers_of_processes):
        if priority is None:  # not for the end of the process
            left_out.append("a finalizer of `multiprocessing`")
            finalizers_of_processes.pop((priority, number), None)
    methods = list(_methods())
    of_references = {one: info.func for one, info in list(finalizers_of_weak_references.items())}
    for kind, _ in methods:
        type.__setattr__(kind, "__del__", _nothing)
    for one in of_references:
        finalizers_of_weak_references[one].func = functools.partial(_note, left_out)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # files that are not closed explicitly
            yield left_out
            gc.collect()
    finally:
        for kind, method in methods:
            type.__setattr__(kind, "__del__", method)
        for one, callback in of_references.items():
            if (info := finalizers_of_weak_references.get(one)) is not None:
                info.func = callback


def _methods() -> Iterator[tuple[type, Any]]:
    """The classes of objects that have come since `gc.freeze`, and of their bases, with a `__del__` in Python."""
    kinds = {base for kind in set(map(type, gc.get_objects())) for base in kind.__mro__}
    for kind in kinds:
        method = vars(kind).get("__del__")
        if method is None or isinstance(method, types.WrapperDescriptorType):  # in C
            continue
        if kind.__module__.partition(".")[0] not in _HARMLESS:
            yield kind, method


def _nothing(_: object) -> None:
    pass


def _note(left_out: list[str], *_: object, **__: object) -> None:
    left_out.append("a `weakref.finalize`")


def open_files() -> int:
    """The number of files and folders that this process has open, sockets, pipes and anonymous memory not counted."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # it is that of the list itself
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            count += target.startswith("/") and not target.startswith(("/memfd:", "/dev/"))
    return count
