"""Locks, open files and proxies of a replica, which a fork inherits and pickle refuses: recreated in each worker.

Promise: a file is opened again by its path at the driver's current position, for reading only, with an offset that
no other process moves. Locks arrive unlocked. A handle that cannot be the same there is refused with a TypeError: files
that are closed, open for writing, that have no path any more, or in which another object reads ahead. Nothing is
imported that the program has not imported; any thread may call that may use the handle.
"""

from __future__ import annotations

import contextlib
import copyreg
import errno
import gc
import gzip
import io
import multiprocessing
import os
import stat
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import numpy as np

from rayloader._compat import newline_of
from rayloader.transport.raw import itself

Reduction = tuple[Any, ...]
"""What `object.__reduce__` returns."""


def refusal(obj: Any, why: str) -> TypeError:
    """The error for an object that cannot exist in another process."""
    return TypeError(f"cannot pickle {type(obj).__name__!r} object: {why}")


def reduce(obj: Any, kind: type) -> Reduction | None:
    """How a pickler recreates a lock or an open file; None if `obj` is neither.

    Raises:
        TypeError: it cannot exist in another process.
    """
    if kind in copyreg.dispatch_table:
        return None  # the program's own pickling
    if (reducer := _REDUCERS.get(kind)) is not None:
        return reducer(obj)
    if kind.__module__ == "sqlite3":
        return _sqlite(obj, sys.modules["sqlite3"])
    if kind.__module__.startswith("h5py."):
        return _h5py(obj, sys.modules["h5py"])
    if kind is getattr(sys.modules.get("lmdb"), "Environment", None):
        return _lmdb(obj)
    if kind in weakref.ProxyTypes:
        # Its own pickling would copy what it stands for, without end if that refers to the proxy.
        return itself, (obj.__reduce_ex__.__self__,)
    managers: Any = sys.modules.get("multiprocessing.managers")
    if managers is not None and kind.__reduce__ is managers.BaseProxy.__reduce__:
        return _proxy(obj)
    if issubclass(kind, threading.Thread):
        raise refusal(obj, "a thread of this process")
    if kind.__module__ == "tarfile" and kind.__name__ == "_LowLevelFile":  # of `tarfile.open(path, "r|")`
        raise refusal(obj, "a descriptor of this process")
    if kind.__module__ == tempfile.__name__ and hasattr(obj, "delete"):
        raise refusal(obj, "a file that is deleted with this object")
    return None


# ---- locks


def _lock(_: Any) -> Reduction:
    return threading.Lock, ()


def _rlock(_: Any) -> Reduction:
    return threading.RLock, ()


def _local(local: threading.local) -> Reduction:
    return _new_local, (dict(vars(local)),)


def _new_local(values: dict[str, Any]) -> threading.local:
    local = threading.local()
    vars(local).update(values)
    return local


# ---- proxies


def _proxy(proxy: Any) -> Reduction:
    """One of a manager's; with the manager's key, unless that is the process's, which workers on this machine have."""
    rebuild, (make, token, serializer, options), *state = proxy.__reduce__()
    if proxy._authkey != multiprocessing.current_process().authkey:
        options = {**options, "authkey": bytes(proxy._authkey)}
    return rebuild, (make, token, serializer, options), *state


# ---- files


def _there(path: str) -> str:
    """The path, if this machine has it."""
    if not os.path.exists(path):
        reason = "a file that the dataset has open in the trainer must be on the node of each worker, at the same path"
        raise FileNotFoundError(errno.ENOENT, reason, path)
    return path


def _path(file: Any) -> str:
    """The path of the regular file that is open there."""
    descriptor = file.fileno()
    here = os.fstat(descriptor)
    if not stat.S_ISREG(here.st_mode):
        raise refusal(file, "not a regular file")
    names = [os.path.abspath(os.fsdecode(file.name))] if isinstance(file.name, (str, bytes)) else []
    with_links = f"/proc/self/fd/{descriptor}"
    names += [os.readlink(with_links)] if os.path.islink(with_links) else []
    for name in names:
        if os.path.exists(name) and os.path.samestat(os.stat(name), here):
            return name
    raise refusal(file, f"{file.name!r} was removed, or is another file by now")


def _raw(file: io.FileIO) -> Reduction:
    return _open_binary, (_readable(file), file.tell(), 0)


def _buffered(file: io.BufferedReader) -> Reduction:
    if type(file.raw) is not io.FileIO:
        raise refusal(file, f"it reads from a {type(file.raw).__name__}")
    return _open_binary, (_readable(file.raw), file.tell(), -1)


def _readable(file: io.FileIO) -> str:
    if file.closed:
        raise refusal(file, "closed")
    if file.mode != "rb":
        raise refusal(file, f"open for writing (mode {file.mode!r})")
    return _path(file)


def _open_binary(path: str, position: int, buffering: int) -> Any:
    file = open(_there(path), "rb", buffering)  # noqa: SIM115 (the dataset closes it)
    file.seek(position)
    return file


def _written(file: Any) -> Reduction:
    raise refusal(file, "closed" if file.closed else "open for writing")


def _text(file: io.TextIOWrapper) -> Reduction | None:
    if file is sys.stdout or file is sys.stderr:
        return None  # the worker has its own
    if file.closed:
        raise refusal(file, "closed")
    if type(file.buffer) in (io.BufferedWriter, io.BufferedRandom):
        raise refusal(file, "open for writing")
    if type(file.buffer) not in (io.BufferedReader, gzip.GzipFile):
        raise refusal(file, f"it reads from a {type(file.buffer).__name__}")
    try:
        position = file.tell()
    except OSError as error:
        raise refusal(file, f"its place is not known within `for line in file` ({error}); use readline()") from error
    file.seek(position)  # discards what it has read ahead
    return _open_text, (file.buffer, file.encoding, file.errors, newline_of(file), vars(file), position)


def _open_text(
    buffer: Any, encoding: str, errors: str | None, newline: str | None, attributes: dict[str, Any], position: int
) -> io.TextIOWrapper:
    file = io.TextIOWrapper(buffer, encoding, errors, newline)
    vars(file).update(attributes)  # `mode`, if `open` created it
    file.seek(position)
    return file


def _gzip(file: gzip.GzipFile) -> Reduction:
    if file.closed or not file.readable():
        raise refusal(file, "closed" if file.closed else "open for writing")
    if file.myfileobj is None:
        raise refusal(file, "it reads from a file object of the program, and where its content begins is not known")
    return _open_gzip, (_path(file.myfileobj), file.tell())


def _open_gzip(path: str, position: int) -> gzip.GzipFile:
    file = gzip.GzipFile(_there(path), "rb")
    file.seek(position)
    return file


def _npz(archive: Any) -> Reduction:
    if archive.zip is None or archive.zip.fp is None:
        raise refusal(archive, "closed")
    options = {"allow_pickle": archive.allow_pickle, "max_header_size": archive.max_header_size}
    return _open_npz, (_readable(archive.zip.fp.raw), {**options, **archive.pickle_kwargs})


def _open_npz(path: str, options: dict[str, Any]) -> Any:
    return np.load(_there(path), **options)


# ---- SQLite


def _sqlite(obj: Any, sqlite3: Any) -> Reduction | None:
    """A connection that only reads, by the path of its database; what might give other values there is refused."""
    if type(obj) in (sqlite3.Cursor, getattr(sqlite3, "Blob", None)):
        raise refusal(obj, "it belongs to a connection; keep the connection, and make this in `__getitem__`")
    if type(obj) is not sqlite3.Connection:
        return None
    try:
        path = _database(obj)
        with contextlib.closing(_open_sqlite(path)) as new:
            if _asked(obj, "PRAGMA query_only") == [(0,)] and _writes(obj) != _writes(new):
                raise refusal(obj, "open for writing; open it with sqlite3.connect('file:PATH?mode=ro', uri=True)")
            if _converts(obj, sqlite3):
                raise refusal(obj, "opened with `detect_types`, which its converters in a worker might not fit")
            if _held(obj) != _held(new) or any(_asked(obj, query) != _asked(new, query) for query in _OF_PROGRAM):
                raise refusal(obj, "it has functions, collations, an authorizer or other callbacks of the program's")
    except sqlite3.Error as error:
        raise refusal(obj, f"SQLite says: {error}") from error
    attributes = {name: getattr(obj, name) for name in _SQLITE_ATTRIBUTES if hasattr(obj, name)}
    return _open_sqlite, (path,), attributes, None, None, _set_each  # which may refer to the connection


_SQLITE_ATTRIBUTES = "row_factory", "text_factory", "isolation_level", "autocommit"
_OF_PROGRAM = (
    "SELECT name, narg, flags FROM pragma_function_list WHERE NOT builtin ORDER BY 1, 2",
    "SELECT name FROM pragma_collation_list ORDER BY 1",
)


def _database(connection: Any) -> str:
    """The path of the one database of a connection that is not within a transaction."""
    if connection.in_transaction:
        raise refusal(connection, "within a transaction")
    _asked(connection, "SELECT count(*) FROM main.sqlite_master")  # SQLite opens the file now, at the latest
    files = dict(_asked(connection, "SELECT name, file FROM pragma_database_list"))
    if "temp" in files and _asked(connection, "SELECT count(*) FROM sqlite_temp_master") == [(0,)]:
        del files["temp"]
    if list(files) != ["main"]:
        raise refusal(connection, "it has temporary tables, or has attached a database")
    if not (path := files["main"]):
        raise refusal(connection, "a database in memory, or a temporary one")
    if not _has_open(path):
        raise refusal(connection, f"{path!r} was removed, or is another file by now")
    return str(path)


def _has_open(path: str) -> bool:
    """Whether the file at this path is open, rather than a removed one that had the same path."""
    found = False
    for descriptor in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{descriptor}"
        with contextlib.suppress(OSError):
            if os.readlink(link) == f"{path} (deleted)":
                return False
            found |= os.path.samefile(link, path)
    return found


def _asked(connection: Any, query: str) -> list[tuple[Any, ...]]:
    """The rows of a query, without the program's factories."""
    kept, connection.text_factory = connection.text_factory, os.fsdecode
    try:
        cursor = connection.cursor()
        cursor.row_factory = None
        return cursor.execute(query).fetchall()  # type: ignore[no-any-return]
    finally:
        connection.text_factory = kept


def _writes(connection: Any) -> list[tuple[int, ...]]:
    """What it would do to begin to write; only the numbers, because the texts do not matter."""
    return [(row[0], *row[2:5]) for row in _asked(connection, "EXPLAIN BEGIN IMMEDIATE")]


def _converts(connection: Any, sqlite3: Any) -> bool:
    """Whether it was opened with `detect_types`, as a converter shows; also where that cannot be known."""
    seen: list[bytes] = []
    if "TEXT" in sqlite3.converters:
        return True
    sqlite3.converters.update(TEXT=seen.append, RAYLOADER=seen.append)
    try:
        rows = _asked(connection, 'SELECT type, 1 AS "_ [RAYLOADER]" FROM sqlite_master LIMIT 1')
    finally:
        del sqlite3.converters["TEXT"], sqlite3.converters["RAYLOADER"]
    return bool(seen) or not rows


def _held(connection: Any) -> Counter[type]:
    """The kinds of objects that it holds, except for its factories: callbacks are the only ones of the program's."""
    factories = connection.row_factory, connection.text_factory, connection.isolation_level
    return Counter(type(one) for one in gc.get_referents(connection) if not any(one is other for other in factories))


def _open_sqlite(path: str) -> Any:
    import sqlite3

    # The thread that opens it need not be the one that loads.
    return sqlite3.connect(f"file:{quote(os.fsencode(_there(path)))}?mode=ro", uri=True, check_same_thread=False)


def _set_each(obj: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(obj, name, value)


# ---- packages that the program may have imported


def _h5py(obj: Any, h5py: Any) -> Reduction | None:
    if isinstance(obj, h5py.File):
        if not obj or obj.mode != "r" or obj.driver not in ("sec2", "stdio"):
            raise refusal(obj, f"open with mode {obj.mode!r} and driver {obj.driver!r}" if obj else "closed")
        _, slots, nbytes, w0 = obj.id.get_access_plist().get_cache()
        cache = {"rdcc_nslots": slots, "rdcc_nbytes": nbytes, "rdcc_w0": w0}
        return _open_h5py, (os.path.abspath(obj.filename), obj.driver, bool(obj.swmr_mode), cache)
    if isinstance(obj, (h5py.Group, h5py.Dataset)):
        if not obj or obj.name is None:
            raise refusal(obj, "closed, or without a name in its file")
        return _h5py_item, (obj.file, obj.name)
    return None


def _open_h5py(path: str, driver: str, swmr: bool, cache: dict[str, Any]) -> Any:
    import h5py

    return h5py.File(_there(path), "r", driver=driver, swmr=swmr, **cache)


def _h5py_item(file: Any, name: str) -> Any:
    return file[name]


def _lmdb(obj: Any) -> Reduction:
    flags = obj.flags()
    if not flags["readonly"]:
        raise refusal(obj, "open for writing; open it with readonly=True")
    options = {name: flags[name] for name in ("subdir", "readonly", "readahead", "lock")}
    options["map_size"] = obj.info()["map_size"]
    return _open_lmdb, (os.path.abspath(os.fsdecode(obj.path())), options)


def _open_lmdb(path: str, options: dict[str, Any]) -> Any:
    import lmdb

    # A process may open an environment once, and may host several workers.
    key = os.path.realpath(path), *sorted(options.items())
    environment = _environments.get(key)
    if environment is None or not _is_open(environment):
        # The number of databases to be opened cannot be read. So many cost nothing.
        environment = _environments[key] = lmdb.open(_there(path), create=False, max_dbs=64, **options)
    return environment


def _is_open(environment: Any) -> bool:
    try:
        environment.flags()
    except Exception:  # lmdb.Error, or what older versions raise
        return False
    return True


_environments: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


_REDUCERS: dict[type, Callable[[Any], Reduction | None]] = {
    type(threading.Lock()): _lock,
    type(threading.RLock()): _rlock,
    threading.local: _local,
    io.FileIO: _raw,
    io.BufferedReader: _buffered,
    io.BufferedWriter: _written,
    io.BufferedRandom: _written,
    io.TextIOWrapper: _text,
    gzip.GzipFile: _gzip,
    np.lib.npyio.NpzFile: _npz,
}
