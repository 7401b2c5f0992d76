"""SQLite connections of a replica: those that only read are opened anew, with the same values; others are refused."""

import copyreg
import itertools
import os
import sqlite3
import sys
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from unittest import mock

import pytest

from rayloader.transport.codec import decode, encode
from rayloader.transport.mapped import Mappings

QUERY = "SELECT number, name, day, day AS 'again [date]', upper(name) AS u FROM items WHERE name LIKE 'N%'"


def copied(obj):
    """As it arrives in a worker."""
    encoded = encode(obj, mapped=Mappings())
    return decode(encoded.skeleton, encoded.buffers, encoded.carried)


def refused(obj, why):
    with pytest.raises(TypeError, match=why):
        encode(obj, mapped=Mappings())


def opened(path, query="mode=ro", **options):
    return closing(sqlite3.connect(f"file:{urllib.parse.quote(str(path))}?{query}", uri=True, **options))


def create(path, *statements):
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in (*statements, "CREATE TABLE items (number INTEGER, name TEXT, day DATE)"):
            connection.execute(statement)
        rows = [(number, f"Nä{number}", f"2020-01-0{number + 1}") for number in range(5)]
        connection.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
    return path


@pytest.fixture
def path(tmp_path):
    return create(tmp_path / "items #1?%41.db")  # with the characters that mean something in a URI


def same(connection, new, query=QUERY):
    """What both give."""
    rows, found = connection.execute(query).fetchall(), new.execute(query).fetchall()
    assert [*found, *map(type, found)] == [*rows, *map(type, rows)]
    return rows


# ---- what is opened anew


def as_dict(cursor, row):
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


def lossy(raw):
    return raw.decode("ascii", "replace")


def test_it_gives_the_same_values(path):
    factories = itertools.product([None, sqlite3.Row, as_dict], [str, bytes, lossy])
    for row_factory, text_factory in factories:
        with opened(path, isolation_level=None) as connection:
            connection.row_factory, connection.text_factory = row_factory, text_factory
            with closing(copied(connection)) as new:
                assert len(same(connection, new)) == 5
                assert (new.row_factory, new.text_factory, new.isolation_level) == (row_factory, text_factory, None)


def test_what_has_been_asked_before_does_not_matter(path):
    with opened(path) as connection:
        for query in ("SELECT * FROM pragma_table_info('items')", "SELECT * FROM json_each('[1]')"):
            connection.execute(query).fetchall()
        connection.execute("CREATE TEMP TABLE mine (number)")
        connection.execute("DROP TABLE mine")
        cursor = connection.execute(QUERY)
        cursor.fetchone()
        for _ in range(2):
            with closing(copied(connection)) as new:
                same(connection, new)
        assert len(cursor.fetchall()) == 4


def test_a_connection_that_was_told_to_read_only(path):
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA query_only=1")
        with closing(copied(connection)) as new:
            same(connection, new)
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                new.execute("DELETE FROM items")


def test_a_row_factory_may_refer_to_its_connection(path):
    class Rows:
        def __init__(self, connection):
            self.connection = connection

        def __call__(self, cursor, row):
            return [row[0], self.connection.isolation_level]

    with opened(path) as connection:
        connection.row_factory = Rows(connection)
        with closing(copied(connection)) as new:
            assert new.row_factory.connection is new
            assert new.execute("SELECT number FROM items").fetchone() == [0, ""]


def test_any_thread_of_a_worker_may_use_it(path):
    with opened(path) as connection, closing(copied(connection)) as new, ThreadPoolExecutor(1) as pool:
        assert len(pool.submit(lambda: new.execute(QUERY).fetchall()).result()) == 5
        with pytest.raises(TypeError, match="SQLite says: SQLite objects created in a thread"):
            pool.submit(encode, connection, mapped=Mappings()).result()


def test_its_text_may_be_utf_16(tmp_path):
    path = create(tmp_path / "utf16.db", "PRAGMA encoding='UTF-16'")
    with opened(path) as connection, closing(copied(connection)) as new:
        assert len(same(connection, new)) == 5


def test_a_path_need_not_be_text(path):
    name = os.fsencode(path.parent) + b"/\xff.db"
    os.rename(path, name)
    with closing(sqlite3.connect(name)) as connection:
        connection.execute("PRAGMA query_only=1")
        with closing(copied(connection)) as new:
            same(connection, new)


def test_a_closed_one_is_refused(path):
    with opened(path) as connection:
        pass
    refused(connection, "SQLite says: Cannot operate on a closed database")


def test_nothing_is_written_and_nobody_is_kept_waiting(path):
    with closing(sqlite3.connect(path, timeout=0)) as writer, opened(path) as connection:
        before = path.read_bytes()
        writer.execute("BEGIN IMMEDIATE")  # the lock for writing
        copied(connection).close()
        with closing(sqlite3.connect(path)) as another:
            refused(another, "open for writing")
        assert path.read_bytes() == before
        assert connection.execute("PRAGMA database_list").fetchall() == [(0, "main", str(path))]
        assert not connection.in_transaction


def test_a_way_of_the_programs_own_goes_first(path):
    class Pickled(sqlite3.Connection):
        def __reduce__(self):
            return str, ("mine",)

    with opened(path, factory=Pickled) as connection:
        assert copied(connection) == "mine"
    ways = {sqlite3.Connection: lambda connection: (str, ("mine",))}
    with opened(path, "mode=rw") as connection, mock.patch.dict(copyreg.dispatch_table, ways):
        assert copied(connection) == "mine"


# ---- what is refused


def compare(a, b):
    return (a > b) - (a < b)


def attach_another(connection):
    (path,) = connection.execute("SELECT file FROM pragma_database_list").fetchone()
    connection.execute("ATTACH ? AS other", (str(create(path + "2")),))


ROWS = "it has functions, collations"
REFUSED = {
    "authorizer": ("callback", lambda connection: connection.set_authorizer(lambda *_: sqlite3.SQLITE_OK)),
    "trace": ("callback", lambda connection: connection.set_trace_callback(str)),  # which its `text_factory` is, too
    "progress": ("callback", lambda connection: connection.set_progress_handler(lambda: 0, 10)),
    "function": (ROWS, lambda connection: connection.create_function("twice", 1, lambda x: 2 * x)),
    "function of SQLite's": (ROWS, lambda connection: connection.create_function("upper", 1, str.lower)),
    "aggregate": (ROWS, lambda connection: connection.create_aggregate("total2", 1, list)),
    "LIKE": (ROWS, lambda connection: connection.execute("PRAGMA case_sensitive_like=1")),
    "collation": (ROWS, lambda connection: connection.create_collation("german", compare)),
    "transaction": ("within a transaction", lambda connection: connection.execute("BEGIN")),
    "tables": ("temporary tables", lambda connection: connection.execute("CREATE TEMP TABLE mine (number)")),
    "another": ("has attached a database", attach_another),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_might_give_other_values_is_refused(path, change):
    with opened(path) as connection:
        why, changes = REFUSED[change]
        changes(connection)
        refused(connection, why)


@pytest.mark.parametrize("detect_types", [sqlite3.PARSE_DECLTYPES, sqlite3.PARSE_COLNAMES])
def test_one_that_converts_is_refused(path, detect_types):
    before = dict(sqlite3.converters)
    with opened(path, detect_types=detect_types) as connection:
        refused(connection, "opened with `detect_types`")
    assert sqlite3.converters == before


def test_where_it_is_not_known_whether_it_converts_it_is_refused(path, tmp_path):
    with opened(path) as connection, mock.patch.dict(sqlite3.converters, {"TEXT": bytes}):
        refused(connection, "opened with `detect_types`")
    sqlite3.connect(tmp_path / "empty.db").close()
    with opened(tmp_path / "empty.db") as connection:
        refused(connection, "opened with `detect_types`")


def test_databases_that_cannot_be_opened_again_are_refused(path, tmp_path):
    with closing(sqlite3.connect(":memory:")) as in_memory, closing(sqlite3.connect(path)) as writable:
        refused(in_memory, "in memory")
        refused(writable, "mode=ro")
    with opened(path) as connection:
        os.rename(path, tmp_path / "elsewhere")
        for make in (path.touch, path.unlink):
            refused(connection, "was removed, or is another file")
            make()


def test_a_database_in_whose_place_there_is_another_one_is_refused(path):
    """Though that one is open too."""
    with opened(path) as connection:
        connection.execute(QUERY)
        os.replace(create(path.with_suffix(".new")), path)
        with opened(path) as other:
            refused(connection, "was removed, or is another file by now")
            refused(other, "was removed, or is another file by now")


def test_classes_of_the_programs_own_and_what_belongs_to_a_connection_are_refused(path):
    class Connection(sqlite3.Connection):
        pass

    with opened(path, factory=Connection) as connection:
        refused(connection, "cannot pickle 'Connection")
    with opened(path) as connection:
        parts = [connection.cursor()]
        if sys.version_info >= (3, 11):
            create(path.parent / "blobs.db", "CREATE TABLE blobs (data BLOB)", "INSERT INTO blobs VALUES (x'00')")
            connection.execute("ATTACH ? AS other", (str(path.parent / "blobs.db"),))
            parts.append(connection.blobopen("blobs", "data", 1, readonly=True, name="other"))
        for part in parts:
            refused(part, "keep the connection")
