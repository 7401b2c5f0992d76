"""What a SQLite connection reveals about itself, to find out whether another one gives the same values.

Promise: nothing is written, neither to a database nor to temporary tables; no lock is taken except a read lock; nothing
that the program has registered is called, except `text_factory`. Only the thread that may use the connection may call.

NOTE [The same answers]. A connection does not reveal how it was opened, nor what the program has registered with it. So
another one is opened here, in the same way as the workers will open theirs, and both are asked the same:

- `EXPLAIN BEGIN IMMEDIATE` has no effect, and shows whether it would take the write lock. It would not if the
  database was opened for reading only.
- `journal_mode` reveals an `immutable` connection to a database with a write-ahead log, which it does not read.
- The lists of functions, collations and modules name all additions. To find replacements with the same name, these are
  called with text that is not UTF-8: Python's `sqlite3` cannot pass that to a function of the program's, and fails.
- Converters are looked up in a dictionary. A key of ours, which equals none, notices which of a query's names are used:
  declared types, names of columns or neither. That is `detect_types`.

- Callbacks (authorizer, trace, progress) are the only objects of the program that a connection holds besides its two
  factories, and Python's garbage collector reveals what it holds.

Everything else is a setting that can be read and set.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rayloader.transport.reopening import refusal

if TYPE_CHECKING:
    from sqlite3 import Connection

# Settings that change the rows of a connection, or its speed.
_SETTINGS = (
    *("automatic_index", "busy_timeout", "cell_size_check", "count_changes", "empty_result_callbacks", "foreign_keys"),
    *("full_column_names", "ignore_check_constraints", "legacy_alter_table", "query_only", "read_uncommitted"),
    *("recursive_triggers", "reverse_unordered_selects", "short_column_names", "temp_store", "threads"),
    *("trusted_schema", "writable_schema"),
)
_SETTINGS_OF_A_DATABASE = "cache_size", "mmap_size"

# All texts are requested as bytes, because `text_factory` may convert a text to anything.
_ENCODING = "SELECT CAST(encoding AS BLOB) FROM pragma_encoding"
_DATABASES = "SELECT CAST(name AS BLOB), CAST(file AS BLOB) FROM pragma_database_list ORDER BY seq"
_FUNCTIONS = "SELECT CAST(name AS BLOB), CAST(type AS BLOB), narg, flags FROM pragma_function_list WHERE NOT builtin"
_COLLATIONS = "SELECT CAST(name AS BLOB) FROM pragma_collation_list"
_MODULES = "SELECT CAST(name AS BLOB) FROM pragma_module_list WHERE substr(name, 1, 7) != 'pragma_'"
_JOURNAL_MODE = "SELECT CAST(journal_mode AS BLOB) FROM pragma_journal_mode WHERE schema = ?"
_NO_UTF8, _OTHER_NO_UTF8 = "CAST(x'ff' AS TEXT)", "CAST(x'fe' AS TEXT)"
_NO_CONVERTER = "RAYLOADER"


def asked(connection: Connection, query: str, *parameters: str) -> list[tuple[Any, ...]]:
    """The rows of a query, without the program's `row_factory`."""
    cursor = connection.cursor()
    cursor.row_factory = None
    return cursor.execute(query, parameters).fetchall()


def quoted(name: str) -> str:
    """The name, quoted for SQL."""
    return '"' + name.replace('"', '""') + '"'


# ---- how it was opened


def has_callbacks(connection: Connection, sqlite3: ModuleType) -> bool:
    """Whether it holds other objects than a new connection."""
    with closing(sqlite3.connect(":memory:", isolation_level=connection.isolation_level)) as new:
        new.row_factory, new.text_factory = connection.row_factory, connection.text_factory
        return Counter(map(type, gc.get_referents(connection))) != Counter(map(type, gc.get_referents(new)))


def databases(connection: Connection) -> list[tuple[bytes, bytes]]:
    """Name and path of each database; no path, if it is in memory.

    Raises:
        TypeError: their text is UTF-16. Then all names are too, and all of them can be passed to a program's collation.
    """
    if asked(connection, _ENCODING) != [(b"UTF-8",)]:
        raise refusal(connection, "its text is UTF-16, with which a collation of the program's cannot be told")
    return asked(connection, _DATABASES)


def settings(connection: Connection, databases: Iterable[str]) -> dict[str, int]:
    """The settings that PRAGMA can read and set, by name."""
    names = [f"{quoted(schema)}.{name}" for schema in databases for name in _SETTINGS_OF_A_DATABASE]
    answers = {name: asked(connection, f"PRAGMA {name}") for name in (*_SETTINGS, *names)}
    return {name: rows[0][0] for name, rows in answers.items() if rows}  # none if SQLite does not know it


def numbered_settings(connection: Any, sqlite3: ModuleType) -> tuple[dict[int, int], dict[int, bool]]:
    """Limits, which Python reveals from 3.11 on, and SQLite's configuration, from 3.12 on."""
    limits = [getattr(sqlite3, name) for name in dir(sqlite3) if name.startswith("SQLITE_LIMIT_")]
    switches = [getattr(sqlite3, name) for name in dir(sqlite3) if name.startswith("SQLITE_DBCONFIG_")]
    return {n: connection.getlimit(n) for n in limits}, {n: connection.getconfig(n) for n in switches}


class _Observer(str):
    """A key that equals none, and notes when its thread looks for one like it."""

    __hash__ = str.__hash__
    seen = False

    def __init__(self, _: str) -> None:
        self._thread = threading.get_ident()

    def __eq__(self, other: object) -> bool:
        self.seen |= threading.get_ident() == self._thread
        return False


def detect_types(connection: Connection, sqlite3: ModuleType) -> int:
    """The argument `detect_types` with which it was opened."""
    with closing(sqlite3.connect(":memory:", detect_types=sqlite3.PARSE_DECLTYPES | sqlite3.PARSE_COLNAMES)) as other:
        if not all(_looked_up(other, sqlite3)):
            raise refusal(connection, "the program has converters of TEXT and of INT, which hide its `detect_types`")
    by_type, by_name = _looked_up(connection, sqlite3)
    return (sqlite3.PARSE_DECLTYPES if by_type else 0) | (sqlite3.PARSE_COLNAMES if by_name else 0)


def _looked_up(connection: Connection, sqlite3: ModuleType) -> tuple[bool, bool]:
    """Whether it looks for converters by the declared types, and by the names of columns."""
    name, *types = observers = _Observer(_NO_CONVERTER), _Observer("TEXT"), _Observer("INT")
    sqlite3.converters.update(dict.fromkeys(observers))
    for observer in observers:
        observer.seen = False
    try:
        asked(connection, f'SELECT type, rootpage, rootpage AS "_ [{_NO_CONVERTER}]" FROM sqlite_master LIMIT 0')
        return any(observer.seen for observer in types), name.seen
    finally:
        for observer in observers:
            del sqlite3.converters[observer]


# ---- differences from another connection


def check_alike(connection: Connection, new: Connection, databases: Iterable[str]) -> None:
    """Makes sure that the new connection gives the same values.

    Raises:
        TypeError: it might not.
    """
    if asked(connection, "PRAGMA query_only") == [(0,)] and _writes(connection) != _writes(new):
        raise refusal(connection, "open for writing; open it with sqlite3.connect('file:PATH?mode=ro', uri=True)")
    if journal_modes(connection, databases) != journal_modes(new, databases):
        raise refusal(connection, "its databases cannot be opened in the same way")
    for (module,) in set(asked(connection, _MODULES)) - set(asked(new, _MODULES)):
        asked(new, f"PRAGMA table_info({quoted(module.decode())})")  # some exist only after their first use
    if not set(asked(connection, _MODULES)) <= set(asked(new, _MODULES)):
        raise refusal(connection, "it has modules of an extension")
    if set(asked(connection, _FUNCTIONS)) != set(asked(new, _FUNCTIONS)):
        raise refusal(connection, "it has functions of the program's, or `case_sensitive_like`")
    if set(asked(connection, _COLLATIONS)) != set(asked(new, _COLLATIONS)):
        raise refusal(connection, "it has collations of the program's")
    calls = list(_calls(new))
    if [_outcome(connection, call) for call in calls] != [_outcome(new, call) for call in calls]:
        raise refusal(connection, "it has functions or collations of the program's in place of SQLite's")


def _writes(connection: Connection) -> list[tuple[int, ...]]:
    """What it would do to begin to write; only the numbers, because the texts do not matter."""
    return [(row[0], *row[2:5]) for row in asked(connection, "EXPLAIN BEGIN IMMEDIATE")]


def journal_modes(connection: Connection, databases: Iterable[str]) -> list[bytes]:
    """The journal mode of each database."""
    for schema in databases:  # it is known once the database has been read
        asked(connection, f"SELECT count(*) FROM {quoted(schema)}.sqlite_master")
    return [asked(connection, _JOURNAL_MODE, schema)[0][0] for schema in databases]


def _calls(new: Connection) -> Iterator[str]:
    """Calls of the functions and collations that a program may replace, with text that is not UTF-8."""
    for (name,) in asked(new, _COLLATIONS):
        yield f"{_NO_UTF8} = {_OTHER_NO_UTF8} COLLATE {quoted(name.decode())}"
    for name, _, count, _ in asked(new, _FUNCTIONS):
        if count:  # -1 means any number; the value itself may be random, like that of `fts5_locale`
            yield f"typeof({quoted(name.decode())}({', '.join([_NO_UTF8] * abs(count))}))"


def _outcome(connection: Connection, call: str) -> object:
    try:
        return asked(connection, f"SELECT CAST({call} AS BLOB)")
    except Exception as error:
        return type(error), str(error)
