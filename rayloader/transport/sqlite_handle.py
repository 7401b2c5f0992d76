"""SQLite connections that only read: opened again in each worker, by their path.

Promise: the new connection gives the same values as the original. What might give others is refused with a TypeError.
Nothing is imported that the program has not imported. Only the thread that may use the connection may call.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections import Counter
from contextlib import closing
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rayloader.transport.reopening import Reduction, refusal, there

if TYPE_CHECKING:
    from sqlite3 import Connection

_ATTRIBUTES = "row_factory", "text_factory", "isolation_level", "autocommit"
# What tells whether rows are the same. Texts are requested as bytes, for `text_factory` may convert a text to anything.
_QUESTIONS = (
    "SELECT CAST(name AS BLOB), narg, flags FROM pragma_function_list WHERE NOT builtin ORDER BY 1, 2",
    "SELECT CAST(name AS BLOB) FROM pragma_collation_list ORDER BY 1",
    *(f"PRAGMA {name}" for name in ("reverse_unordered_selects", "full_column_names", "short_column_names")),
)
_DATABASES = "SELECT CAST(name AS BLOB), CAST(file AS BLOB) FROM pragma_database_list"
_converters = threading.Lock()  # while there are two of ours


def reduce(obj: Any, sqlite3: ModuleType) -> Reduction | None:
    """How to recreate an object of `sqlite3`; None if it is neither a connection nor a part of one.

    Raises:
        TypeError: it cannot exist in another process, or might give other values there.
    """
    if type(obj) in (sqlite3.Cursor, getattr(sqlite3, "Blob", None)):
        raise refusal(obj, "it belongs to a connection; keep the connection, and make this in `__getitem__`")
    if type(obj) is not sqlite3.Connection:
        return None
    try:
        in_transaction = obj.in_transaction
    except sqlite3.ProgrammingError:
        return _closed, ()
    if in_transaction:
        raise refusal(obj, "within a transaction")
    try:
        path = _path(obj)
        with closing(_open(path)) as new:
            _check_alike(obj, new, sqlite3)
    except sqlite3.Error as error:
        raise refusal(obj, f"SQLite says: {error}") from error
    return _open, (path,), {name: getattr(obj, name) for name in _ATTRIBUTES if hasattr(obj, name)}, None, None, _set


def _path(connection: Connection) -> str:
    """Of its database's file."""
    if _asked(connection, "SELECT CAST(encoding AS BLOB) FROM pragma_encoding") != [(b"UTF-8",)]:
        raise refusal(connection, "its text is UTF-16")
    files = dict(_asked(connection, _DATABASES))
    if b"temp" in files and _asked(connection, "SELECT count(*) FROM sqlite_temp_master") == [(0,)]:
        del files[b"temp"]
    if list(files) != [b"main"]:
        raise refusal(connection, "it has temporary tables, or has attached a database")
    if not files[b"main"]:
        raise refusal(connection, "a database in memory, or a temporary one")
    if not _is_open(path := os.fsdecode(files[b"main"])):
        raise refusal(connection, f"{path!r} was removed, or is another file by now")
    return path


def _is_open(path: str) -> bool:
    """Whether the file at this path is open, rather than a removed one that had the same path."""
    found = False
    for descriptor in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{descriptor}"
        with contextlib.suppress(OSError):
            if os.readlink(link) == f"{path} (deleted)":
                return False
            found |= os.path.samefile(link, path)
    return found


def _check_alike(connection: Connection, new: Connection, sqlite3: ModuleType) -> None:
    """Makes sure that the new connection gives the same values.

    Raises:
        TypeError: it might not.
    """
    if _asked(connection, "PRAGMA query_only") == [(0,)] and _writes(connection) != _writes(new):
        raise refusal(connection, "open for writing; open it with sqlite3.connect('file:PATH?mode=ro', uri=True)")
    if _has_detect_types(connection, sqlite3):
        raise refusal(connection, "opened with `detect_types`, which its converters in a worker might not fit")
    if _held(connection) != _held(new):
        raise refusal(connection, "it has an authorizer, a trace callback or a progress handler")
    if any(_asked(connection, question) != _asked(new, question) for question in _QUESTIONS):
        raise refusal(connection, "it has functions or collations of the program's, or other settings for its rows")


def _asked(connection: Connection, query: str) -> list[tuple[Any, ...]]:
    """The rows of a query, without the program's `row_factory`."""
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor.execute(query).fetchall()


def _writes(connection: Connection) -> list[tuple[int, ...]]:
    """What it would do to begin to write; only the numbers, because the texts do not matter."""
    return [(row[0], *row[2:5]) for row in _asked(connection, "EXPLAIN BEGIN IMMEDIATE")]


def _has_detect_types(connection: Connection, sqlite3: ModuleType) -> bool:
    """Whether it looks for converters, as a converter of ours shows."""
    seen = []

    def note(raw: bytes) -> str:
        seen.append(raw)
        return raw.decode()

    with _converters:
        if "TEXT" in sqlite3.converters:
            raise refusal(connection, "the program has a converter of TEXT, which hides its `detect_types`")
        sqlite3.converters.update(TEXT=note, RAYLOADER=note)
        try:
            rows = _asked(connection, 'SELECT type, 1 AS "_ [RAYLOADER]" FROM sqlite_master LIMIT 1')
        finally:
            del sqlite3.converters["TEXT"], sqlite3.converters["RAYLOADER"]
    if not rows:
        raise refusal(connection, "it has no tables, which hides its `detect_types`")
    return bool(seen)


def _held(connection: Connection) -> Counter[type]:
    """The kinds of objects that it holds, except for its factories: callbacks are the only ones of the program's."""
    factories = connection.row_factory, connection.text_factory, connection.isolation_level
    return Counter(type(one) for one in gc.get_referents(connection) if not any(one is other for other in factories))


# ---- in a worker


def _open(path: str) -> Connection:
    import sqlite3

    # The thread that opens it need not be the one that loads.
    return sqlite3.connect(f"file:{quote(os.fsencode(there(path)))}?mode=ro", uri=True, check_same_thread=False)


def _closed() -> Connection:
    import sqlite3

    connection = sqlite3.connect(":memory:")
    connection.close()
    return connection


def _set(connection: Connection, attributes: dict[str, Any]) -> None:
    """Sets attributes that may refer to the connection, and so arrive after it."""
    for name, value in attributes.items():
        setattr(connection, name, value)
