"""Locks and open files of a replica: made anew, at the same place, and independent of the driver's."""

import gzip
import io
import multiprocessing
import os
import socket
import tarfile
import tempfile
import threading
import weakref
import zipfile
from multiprocessing.managers import SyncManager

import h5py
import lmdb
import numpy as np
import pytest

from rayloader.transport.codec import decode, encode
from rayloader.transport.mapped import Mappings

LINES = "ä\none\r\ntwo\rthree\nfour"


def copied(obj):
    """As it arrives in a worker."""
    encoded = encode(obj, mapped=Mappings())
    return decode(encoded.skeleton, encoded.buffers, encoded.carried)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes(LINES.encode())
    return path


# ---- locks


def test_locks_arrive_unlocked_and_what_stands_on_them_works():
    condition, lock = threading.Condition(), threading.Lock()
    objects = [lock, threading.RLock(), condition, threading.Event(), threading.Semaphore(3), lock, {"of": condition}]
    with lock, condition:
        new_lock, rlock, new_condition, event, semaphore, same, of = copied(objects)
        assert new_lock is same
        assert of["of"] is new_condition
        assert new_lock.acquire(blocking=False)
        assert rlock.acquire(blocking=False)
    with new_condition:
        new_condition.notify_all()
    assert not event.is_set()
    assert [semaphore.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]


class Leaf:
    def __init__(self, parent):
        self.parent = weakref.proxy(parent)


class Tree:
    def __init__(self):
        self.name = "tree"
        self.leaf = Leaf(self)


def test_a_weak_proxy_arrives_as_what_it_stands_for():
    """As for a process that is spawned, but where its own pickling would not end."""
    tree = copied(Tree())
    assert tree.leaf.parent is tree
    assert tree.leaf.parent.name == "tree"


@pytest.mark.parametrize("key", [None, b"of its own"])
def test_a_proxy_knows_the_key_of_its_manager(key, monkeypatch):
    """A key of its own travels with it; the process's does not: it is given only to workers on this machine."""
    with SyncManager(authkey=key, ctx=multiprocessing.get_context("fork")) as manager:
        proxy = manager.dict(a=1)
        encoded = encode(proxy, mapped=Mappings())
        if key is None:
            assert bytes(multiprocessing.current_process().authkey) not in encoded.skeleton
        else:
            monkeypatch.setitem(multiprocessing.current_process()._config, "authkey", b"another")
        assert decode(encoded.skeleton, encoded.buffers)["a"] == 1


def test_a_thread_local_has_what_this_thread_has_put_there():
    local = threading.local()
    local.cache = {"a": 1}
    new = copied(local)
    assert vars(new) == {"cache": {"a": 1}}
    seen = []
    thread = threading.Thread(target=lambda: seen.append(vars(new)))
    thread.start()
    thread.join()
    assert seen == [{}]


# ---- files


def test_a_binary_file_is_at_the_same_place_with_an_offset_of_its_own(path):
    for buffering in (-1, 0):
        with path.open("rb", buffering=buffering) as file:
            file.read(3)
            with copied(file) as new:
                assert (type(new), new.name, new.mode) == (type(file), str(path), "rb")
                assert new.read(5) == LINES.encode()[3:8]
                assert file.tell() == 3
                assert file.read() == LINES.encode()[3:]


@pytest.mark.parametrize("newline", [None, "", "\n", "\r", "\r\n"], ids=repr)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_text_file_reads_the_same_lines_from_the_same_place(path, newline, zipped):
    if zipped:
        path.write_bytes(gzip.compress(path.read_bytes()))
    opened = gzip.open if zipped else open
    for lines in range(3):
        with opened(path, "rt", encoding="utf-8", newline=newline, errors="replace") as file:
            for _ in range(lines):
                file.readline()
            with copied(file) as new:
                assert (new.encoding, new.errors) == ("utf-8", "replace")
                rest = [new.readline() for _ in range(6)]
            assert rest == [file.readline() for _ in range(6)]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_a_text_file_of_another_encoding(path, encoding):
    path.write_text("one\ntwö\nthree", encoding=encoding)
    with path.open(encoding=encoding) as file:
        assert file.readline() == "one\n"
        with copied(file) as new:
            assert new.read() == "twö\nthree"


def test_a_file_with_a_relative_name_is_found_from_elsewhere(path, monkeypatch):
    monkeypatch.chdir(path.parent)
    with open(path.name, "rb") as file:
        monkeypatch.chdir("/")
        with copied(file) as new:
            assert new.read() == LINES.encode()


def test_archives_go_on_where_they_are(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive, tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for name in "abc":
            archive.writestr(name, name * 10)
            member = tarfile.TarInfo(name)
            member.size = 10
            tar.addfile(member, io.BytesIO(name.encode() * 10))
    with zipfile.ZipFile(tmp_path / "a.zip") as archive, copied(archive) as new:
        assert [new.read(name) for name in new.namelist()] == [archive.read(name) for name in "abc"]
    for mode in ("r", "r:gz"):
        with tarfile.open(tmp_path / "a.tar.gz", mode) as tar:
            assert tar.next().name == "a"
            with copied(tar) as new:
                assert [new.extractfile(name).read() for name in "cab"] == [n.encode() * 10 for n in "cab"]
                assert new.getnames() == tar.getnames() == ["a", "b", "c"]


def test_an_archive_of_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3), y=np.array([{}], dtype=object))
    with np.load(tmp_path / "a.npz", allow_pickle=True) as archive, copied(archive) as new:
        assert new.files == ["x", "y"]
        assert (new["x"].tolist(), new["y"].tolist(), new.f.x.tolist()) == ([0, 1, 2], [{}], [0, 1, 2])
    with pytest.raises(TypeError, match="closed"):
        copied(archive)


def test_a_gzip_file_goes_on_where_it_is(path):
    path.write_bytes(gzip.compress(path.read_bytes()))
    with gzip.open(path) as file:
        file.read(4)
        with copied(file) as new:
            assert new.read(4) == file.read(4) == LINES.encode()[4:8]


@pytest.mark.parametrize("mode", ["r", "rb", "w", "wb", "r+b"])
def test_a_closed_file_is_refused(path, mode):
    with path.open(mode) as file:
        pass
    with pytest.raises(TypeError, match="object: closed"):
        copied(file)


def test_hdf5_files_and_what_is_in_them(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["group/data"] = np.arange(5)
    with h5py.File(tmp_path / "data.h5", rdcc_nbytes=12345) as file:
        new, group, data = copied([file, file["group"], file["group/data"]])
        assert (new.mode, new.filename) == ("r", str(tmp_path / "data.h5"))
        assert new.id.get_access_plist().get_cache() == file.id.get_access_plist().get_cache()
        assert new["group/data"][:].tolist() == group["data"][:].tolist() == data[:].tolist() == [0, 1, 2, 3, 4]
    assert data[2] == 2, "open though the driver's is closed"


def test_an_lmdb_environment(tmp_path):
    with lmdb.open(str(tmp_path / "db"), max_dbs=2) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
        transaction.put(b"key", b"named", db=environment.open_db(b"name", transaction))
    options = {"readonly": True, "lock": False, "readahead": False}
    with lmdb.open(str(tmp_path / "db"), max_dbs=2, **options) as environment:
        encoded = encode(environment, mapped=Mappings())
        flags = environment.flags()
    with decode(encoded.skeleton, encoded.buffers) as new:  # one process may open it once
        assert new.flags() == flags
        assert decode(encoded.skeleton, encoded.buffers) is new, "of another worker of the same process"
        with new.begin() as transaction:
            assert transaction.get(b"key") == b"value"
            assert transaction.get(b"key", db=new.open_db(b"name", transaction, create=False)) == b"named"


# ---- what is refused


def test_what_cannot_be_opened_again_is_refused(path, tmp_path):
    read, write = os.pipe()
    ours, theirs = socket.socketpair()
    iterated = path.open()
    next(iterated)
    removed = (tmp_path / "removed").open("w+b")
    removed.close()
    removed = (tmp_path / "removed").open("rb")
    os.unlink(tmp_path / "removed")
    replaced = path.open("rb")
    os.rename(path, tmp_path / "other")
    path.write_text("another file")
    with tarfile.open(tmp_path / "a.tar", "w"):
        pass
    stream = tarfile.open(tmp_path / "a.tar", "r|")  # noqa: SIM115
    with h5py.File(tmp_path / "data.h5", "w") as file, lmdb.open(str(tmp_path / "db")) as environment:
        refused = {
            "open for writing": [path.open("ab"), path.open("a"), path.open("r+b"), path.open("r+b", buffering=0)],
            "not a regular file": [os.fdopen(read, "rb")],
            "within `for line in file`": [iterated],
            "was removed, or is another file": [removed],
            "reads from a BytesIO": [io.TextIOWrapper(io.BytesIO())],
            "a thread of this process": [threading.Thread(), threading.Timer(1, print)],
            "deleted with this object": [tempfile.NamedTemporaryFile("rb")],  # noqa: SIM115
            "content begins is not known": [gzip.GzipFile(fileobj=replaced)],
            "open with mode 'r.'": [file],
            "readonly=True": [environment],
            "a descriptor of this process": [stream],
            "pickle": [ours],
        }
        for why, objects in refused.items():
            for obj in objects:
                with pytest.raises(TypeError, match=why):
                    encode(obj, mapped=Mappings())
    for obj in (part for objects in refused.values() for part in objects):
        if hasattr(obj, "close"):
            obj.close()
    theirs.close()
    replaced.close()
    os.close(write)


def test_a_file_that_is_not_there_is_an_error_that_says_so(path):
    with path.open("rb") as file:
        encoded = encode(file, mapped=Mappings())
    path.unlink()
    with pytest.raises(FileNotFoundError, match="must be on the node of each worker"):
        decode(encoded.skeleton, encoded.buffers)


def test_batches_are_as_before(path):
    """What a worker returns is not its dataset."""
    with path.open("rb") as file:
        for obj in (file, threading.Lock()):
            with pytest.raises(TypeError, match="cannot pickle"):
                encode(obj)
