"""SQLite connections that only read: opened again in each worker.

Promise: the new connection gives the same values as the original. If that cannot be known, it is refused with a
TypeError, see NOTE [The same answers] in sqlite_answers.py. Nothing is imported that the program has not imported. Only
the thread that may use the connection may call.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from rayloader.transport import sqlite_answers as answers
from rayloader.transport.reopening import Reduction, refusal, there

if TYPE_CHECKING:
    from sqlite3 import Connection

_ATTRIBUTES = "row_factory", "text_factory", "isolation_level", "autocommit"


class _Database(NamedTuple):
    path: str
    how: str = "mode=ro"  # the query of its URI


class _Opening(NamedTuple):
    """How to open a connection like another one."""

    databases: dict[str, _Database]  # the first is "main"
    detect_types: int
    settings: dict[str, int]  # by their PRAGMA
    limits: dict[int, int]
    switches: dict[int, bool]


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
    if answers.has_callbacks(obj, sqlite3):
        raise refusal(obj, "it has an authorizer, a trace callback or a progress handler")
    try:
        opening = _opening(obj, sqlite3)
    except sqlite3.Error as error:
        raise refusal(obj, f"SQLite says: {error}") from error
    attributes = {name: getattr(obj, name) for name in _ATTRIBUTES if hasattr(obj, name)}
    converters = _added(sqlite3.converters) if opening.detect_types else {}
    return _open, (opening,), (attributes, _added(sqlite3.adapters), converters), None, None, _set


# ---- in the trainer: how it was opened


def _opening(connection: Connection, sqlite3: ModuleType) -> _Opening:
    detect_types = answers.detect_types(connection, sqlite3)
    databases = dict(_databases(connection))
    settings = answers.settings(connection, databases)
    opening = _Opening(databases, detect_types, settings, *answers.numbered_settings(connection, sqlite3))
    with closing(_open(opening)) as new:
        modes = zip(answers.journal_modes(connection, databases), answers.journal_modes(new, databases), strict=True)
    for (schema, database), (mode, of_new) in zip(databases.items(), modes, strict=True):
        databases[schema] = database if mode == of_new else database._replace(how="immutable=1")
    with closing(_open(opening)) as new:
        answers.check_alike(connection, new, databases)
        if answers.settings(new, databases) != settings or answers.detect_types(new, sqlite3) != detect_types:
            raise refusal(connection, "its settings cannot be had again")
    return opening


def _databases(connection: Connection) -> Iterator[tuple[str, _Database]]:
    for schema, file in answers.databases(connection):
        if schema == b"temp":
            if answers.asked(connection, "SELECT count(*) FROM sqlite_temp_master") != [(0,)]:
                raise refusal(connection, "it has temporary tables")
            continue
        if not file:
            raise refusal(connection, "a database in memory, or a temporary one")
        path = os.fsdecode(file)
        if not _is_open(path):
            raise refusal(connection, f"{path!r} was removed, or is another file by now")
        yield schema.decode(), _Database(path)


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


def _added(registered: dict[Any, Any]) -> dict[Any, Any]:
    """The program's additions to the adapters or converters of the process."""
    return {key: how for key, how in registered.items() if getattr(how, "__module__", None) != "sqlite3.dbapi2"}


# ---- in a worker


def _open(opening: _Opening) -> Connection:
    import sqlite3

    uris = [f"file:{quote(os.fsencode(there(path)))}?{how}" for path, how in opening.databases.values()]
    # The thread that opens it need not be the one that loads.
    options: dict[str, Any] = {"uri": True, "check_same_thread": False, "detect_types": opening.detect_types}
    connection: Any = sqlite3.connect(uris[0], **options)
    for schema, uri in list(zip(opening.databases, uris, strict=True))[1:]:
        connection.execute(f"ATTACH ? AS {answers.quoted(schema)}", (uri,))
    for name, value in opening.settings.items():
        connection.execute(f"PRAGMA {name}={value}")
    for number, switch in opening.switches.items():
        if connection.getconfig(number) != switch:
            connection.setconfig(number, switch)
    for number, limit in opening.limits.items():
        connection.setlimit(number, limit)
    return connection  # type: ignore[no-any-return]


def _closed() -> Connection:
    import sqlite3

    connection = sqlite3.connect(":memory:")
    connection.close()
    return connection


def _set(connection: Connection, state: tuple[dict[str, Any], dict[Any, Any], dict[str, Any]]) -> None:
    """Sets attributes that may refer to the connection, and so arrive after it."""
    import sqlite3

    attributes, adapters, converters = state
    for name, value in attributes.items():
        setattr(connection, name, value)
    of_the_process: list[tuple[Any, dict[Any, Any]]] = [
        (sqlite3.adapters, adapters),
        (sqlite3.converters, converters),
    ]
    for registered, added in of_the_process:
        _before.append((registered, {key: registered.get(key) for key in added}))
        registered.update(added)


_before: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # adapters and converters that `_set` has replaced, or None


def unregister() -> None:
    """Restores the adapters and converters of the process, which connections have replaced."""
    while _before:
        registered, before = _before.pop()
        for key, how in before.items():
            if how is None:
                registered.pop(key, None)
            else:
                registered[key] = how
