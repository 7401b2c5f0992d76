"""What belongs to one process, so that sending it is an error that names it and a remedy; proxies of managers do go."""

import contextlib
import functools
import gzip
import mmap
import multiprocessing
import os
import socket
import sqlite3
import sys
import tarfile
import threading
from multiprocessing.managers import SyncManager
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from rayloader.transport.codec import decode, encode
from rayloader.transport.replica import encode_for_worker, explain, note_batch

# Where they hold what can't be pickled.
OF_GZIP = ".myfileobj" if sys.version_info < (3, 14) else ".fileobj"
OF_THREAD = {(3, 13): "._handle", (3, 14): "._os_thread_handle"}.get(sys.version_info[:2], "._started._cond._lock")
REMEDY = "create it in worker_init_fn or lazily on first use, or drop it in __getstate__"


@pytest.mark.parametrize("key", [None, b"of its own"])
def test_a_proxy_of_a_manager_brings_its_key_along(key, monkeypatch):
    """For those that it returns, too, where the key is the program's."""
    with SyncManager(authkey=key, ctx=multiprocessing.get_context("fork")) as manager:
        inner = manager.dict(b=2)
        outer = manager.dict(a=1, inner=inner)
        encoded = encode_for_worker(outer)
        monkeypatch.setitem(multiprocessing.current_process()._config, "authkey", b"of a worker")
        proxy = decode(encoded.skeleton, encoded.buffers)
        assert proxy["a"] == 1
        assert key is not None or proxy["inner"]["b"] == 2


@pytest.fixture
def held(tmp_path):
    """What a fork inherits and another process cannot be sent, each with the part that is named."""
    path = tmp_path / "lines.txt"
    path.write_text("one\ntwo\n")
    (tmp_path / "lines.gz").write_bytes(gzip.compress(path.read_bytes()))
    np.savez(tmp_path / "data.npz", x=np.arange(3))
    with contextlib.ExitStack() as stack:
        yield {
            "binary": ("", stack.enter_context(path.open("rb"))),
            "text": ("", stack.enter_context(path.open())),
            "gzip": (OF_GZIP, stack.enter_context(gzip.open(tmp_path / "lines.gz"))),
            "npz": (".zip.fp", stack.enter_context(np.load(tmp_path / "data.npz"))),
            "hdf5": ("", stack.enter_context(h5py.File(tmp_path / "data.h5", "w"))),
            "sqlite": ("", stack.enter_context(contextlib.closing(sqlite3.connect(tmp_path / "data.db")))),
            "socket": ("", stack.enter_context(socket.socket())),
            "lock": ("", threading.Lock()),
            "thread": (OF_THREAD, threading.Thread()),
            "map": ("", stack.enter_context(mmap.mmap(-1, mmap.PAGESIZE))),
            "lock of processes": ("", multiprocessing.Lock()),
            "queue": ("", multiprocessing.Queue()),
            "value": ("", multiprocessing.Value("i")),
            "pipe": ("", stack.enter_context(multiprocessing.Pipe()[0])),
            "generator": ("", iter_nothing()),
            "graph": ("", torch.ones(2, requires_grad=True) * 2),
            "in lists": ("['x'][1].stream", {"x": [1, SimpleNamespace(stream=iter_nothing())]}),
            "kept": (".stream", Drops()),
            "closure": (".<closure>.stream", closing_over(iter_nothing())),
            "argument": ("[0]", functools.partial(print, iter_nothing())),
            "cycle": (".stream", cyclic()),
            "deep": ("[0]" * 5, functools.reduce(lambda inner, _: [inner], range(20), iter_nothing())),
        }


INSTEAD = {
    "lock of processes": "use that of a manager, such as multiprocessing.Manager().Lock(), instead",
    "queue": "use multiprocessing.Manager().Queue() instead",
    "value": "use a tensor after share_memory_() instead",
    "pipe": "use a tensor after share_memory_(), or multiprocessing.Manager().Queue(), instead",
}


class Drops:
    __slots__ = ("dropped", "stream")

    def __init__(self):
        self.stream, self.dropped = iter_nothing(), iter_nothing()

    def __getstate__(self):
        return {"stream": self.stream}


def iter_nothing():
    return (i for i in ())


def closing_over(stream):
    return lambda: stream


def cyclic():
    holder = SimpleNamespace()
    holder.stream, holder.me = iter_nothing(), SimpleNamespace(back=holder)
    return holder


def test_what_belongs_to_one_process_is_an_error_that_names_the_attribute_and_the_remedy(held):
    for name, (part, obj) in held.items():
        dataset = SimpleNamespace(held=obj)
        with pytest.raises((TypeError, RuntimeError), match=r"pickle|serialize|shared between processes"):
            encode_for_worker(dataset)
        said = explain(dataset, "dataset")
        assert said.startswith(f"dataset.held{part}: "), name
        assert said.endswith(f"; {REMEDY}" if name not in INSTEAD else f" share, or {REMEDY}"), name
        assert INSTEAD.get(name, "") in said
    said = explain([held["binary"][1]], "dataset")
    assert said.startswith("dataset[0]: _io.BufferedReader can't be sent to a worker (TypeError: cannot pickle")


def test_a_note_names_what_of_a_batch_cannot_be_pickled():
    error = TypeError()
    with open(os.devnull) as file:
        note_batch(error, {"labels": [1, file]}, encode)
    (note,) = error.__notes__
    assert "sent to the trainer: batch['labels'][1]: _io.TextIOWrapper (TypeError: cannot pickle" in note
    note_batch(error, {"labels": [1]}, encode)
    assert error.__notes__ == [note]


class Hostile:
    def __reduce_ex__(self, protocol):
        raise OSError

    def __repr__(self):
        raise OSError


def test_explaining_is_bounded_and_never_raises():
    assert explain([Hostile(), iter_nothing()], "x").startswith(f"x[0]: {__name__}.")
    assert explain({Hostile(): iter_nothing()}, "x").startswith("x: builtins.dict")
    assert explain([0] * 5000 + [iter_nothing()], "x").startswith("x: builtins.list")
    assert explain(SimpleNamespace(a=1), "x") is None


@pytest.mark.parametrize("encode", [encode, encode_for_worker], ids=["batch", "dataset"])
def test_what_pickles_as_something_else_is_an_error(encode, held, tmp_path):
    """A descriptor as its number, a view as bytes, and a text file as a stream with other offsets."""
    tarfile.open(tmp_path / "a.tar", "w").close()
    with tarfile.open(tmp_path / "a.tar", "r|") as stream:
        for obj, message in (
            (stream, "a descriptor of this"),
            (held["pipe"][1], "'Connection' object: a descriptor of this"),
            (held["text"][1], "'TextIOWrapper' object: a file of this process"),
            (memoryview(np.arange(3)), "'memoryview' object: keep the object that it is a view of"),
        ):
            with pytest.raises(TypeError, match=message):
                encode([obj])
