"""What a fork inherits and pickle refuses: locks and proxies of a replica are made anew, other things are an error."""

import contextlib
import copyreg
import gzip
import io
import mmap
import multiprocessing
import socket
import sqlite3
import tarfile
import tempfile
import threading
import weakref
import zipfile
from multiprocessing.managers import SyncManager
from types import SimpleNamespace
from unittest import mock

import h5py
import numpy as np
import pytest

from rayloader.transport import unpicklable
from rayloader.transport.codec import decode, encode
from rayloader.transport.mapped import Mappings


def copied(obj):
    """As it arrives in a worker."""
    encoded = encode(obj, mapped=Mappings())
    return decode(encoded.skeleton, encoded.buffers, encoded.carried)


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


def test_a_lock_that_the_program_pickles_in_a_way_of_its_own_keeps_that():
    with mock.patch.dict(copyreg.dispatch_table, {type(threading.Lock()): lambda _: (str, ("a lock",))}):
        assert copied(threading.Lock()) == "a lock"


# ---- what belongs to one process


@pytest.fixture
def held(tmp_path):
    """What a fork inherits and another process cannot be sent, each with the part that is named."""
    path = tmp_path / "lines.txt"
    path.write_text("one\ntwo\n")
    (tmp_path / "lines.gz").write_bytes(gzip.compress(path.read_bytes()))
    np.savez(tmp_path / "data.npz", x=np.arange(3))
    with zipfile.ZipFile(tmp_path / "lines.zip", "w") as archive, tarfile.open(tmp_path / "lines.tar", "w") as tar:
        archive.write(path)
        tar.add(path)
    with contextlib.ExitStack() as stack:
        (tmp_path / "closed").touch()
        with (tmp_path / "closed").open() as closed:
            pass
        yield {
            "raw": ("", stack.enter_context(io.FileIO(path))),
            "binary": ("", stack.enter_context(path.open("rb"))),
            "text": ("", stack.enter_context(path.open())),
            "closed": ("", closed),
            "written": ("", stack.enter_context(path.open("a"))),
            "gzip": (".myfileobj", stack.enter_context(gzip.open(tmp_path / "lines.gz"))),
            "zip": (".fp", stack.enter_context(zipfile.ZipFile(tmp_path / "lines.zip"))),
            "tar": (".fileobj", stack.enter_context(tarfile.open(tmp_path / "lines.tar"))),
            "npz": (".zip.fp", stack.enter_context(np.load(tmp_path / "data.npz"))),
            "hdf5": ("", stack.enter_context(h5py.File(tmp_path / "data.h5", "w"))),
            "sqlite": ("", stack.enter_context(contextlib.closing(sqlite3.connect(tmp_path / "data.db")))),
            "temporary": (".file", stack.enter_context(tempfile.NamedTemporaryFile())),
            "socket": ("", stack.enter_context(socket.socket())),
            "map": ("", stack.enter_context(mmap.mmap(-1, mmap.PAGESIZE))),
        }


def test_what_belongs_to_one_process_is_an_error_that_names_the_attribute_and_the_remedy(held):
    for name, (part, obj) in held.items():
        dataset = SimpleNamespace(lock=threading.Lock(), held=obj)
        with pytest.raises(TypeError, match="pickle"):
            encode(dataset, mapped=Mappings())
        said = unpicklable.explain(dataset, "dataset")
        assert said.startswith(f"dataset.held{part}: "), name
        assert said.endswith("; create it in worker_init_fn or lazily on first use, or drop it in __getstate__"), name


@pytest.mark.parametrize("thread", [threading.Thread(), threading.Timer(1, print)])
def test_a_thread_is_an_error(thread):
    with pytest.raises(TypeError, match="a thread of this process"):
        encode(thread, mapped=Mappings())


@pytest.mark.parametrize("mapped", [None, Mappings()], ids=["batch", "dataset"])
def test_a_stream_over_a_descriptor_is_an_error(mapped, tmp_path):
    """Whose pickle would be the descriptor's number."""
    tarfile.open(tmp_path / "a.tar", "w").close()
    with tarfile.open(tmp_path / "a.tar", "r|") as stream, pytest.raises(TypeError, match="a descriptor of this"):
        encode(stream, mapped=mapped)


def test_in_a_batch_a_lock_is_an_error_too():
    """What a worker returns is not its dataset."""
    with pytest.raises(TypeError, match="cannot pickle"):
        encode(threading.Lock())
