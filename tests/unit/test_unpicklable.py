"""What belongs to one process, so that sending it is an error that names it; proxies of managers do go."""

import contextlib
import gzip
import io
import mmap
import multiprocessing
import socket
import sqlite3
import sys
import tarfile
import tempfile
import threading
import weakref
import zipfile
from multiprocessing.managers import SyncManager
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from rayloader.transport.codec import decode, encode
from rayloader.transport.replica import encode_for_worker, explain

# Where they hold what can't be pickled.
OF_GZIP = ".myfileobj" if sys.version_info < (3, 14) else ".fileobj"
OF_THREAD = {(3, 13): "._handle", (3, 14): "._os_thread_handle"}.get(sys.version_info[:2], "._started._cond._lock")


@pytest.mark.parametrize("key", [None, b"of its own"])
def test_a_proxy_of_a_manager_brings_its_key_along(key, monkeypatch):
    with SyncManager(authkey=key, ctx=multiprocessing.get_context("fork")) as manager:
        proxy = manager.dict(a=1)
        encoded = encode_for_worker(proxy)
        monkeypatch.setitem(multiprocessing.current_process()._config, "authkey", b"of a worker")
        assert decode(encoded.skeleton, encoded.buffers)["a"] == 1


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
            "gzip": (OF_GZIP, stack.enter_context(gzip.open(tmp_path / "lines.gz"))),
            "zip": (".fp", stack.enter_context(zipfile.ZipFile(tmp_path / "lines.zip"))),
            "tar": (".fileobj", stack.enter_context(tarfile.open(tmp_path / "lines.tar"))),
            "npz": (".zip.fp", stack.enter_context(np.load(tmp_path / "data.npz"))),
            "hdf5": ("", stack.enter_context(h5py.File(tmp_path / "data.h5", "w"))),
            "sqlite": ("", stack.enter_context(contextlib.closing(sqlite3.connect(tmp_path / "data.db")))),
            "temporary": (".file", stack.enter_context(tempfile.NamedTemporaryFile())),
            "socket": ("", stack.enter_context(socket.socket())),
            "lock": ("", threading.Lock()),
            "condition": ("._lock", threading.Condition()),
            "thread": (OF_THREAD, threading.Thread()),
            "local": ("", threading.local()),
            "weak": ("", weakref.ref(threading.Thread)),
            "map": ("", stack.enter_context(mmap.mmap(-1, mmap.PAGESIZE))),
        }


def test_what_belongs_to_one_process_is_an_error_that_names_the_attribute_and_the_remedy(held):
    for name, (part, obj) in held.items():
        dataset = SimpleNamespace(held=obj)
        with pytest.raises(TypeError, match="pickle"):
            encode_for_worker(dataset)
        said = explain(dataset, "dataset")
        assert said.startswith(f"dataset.held{part}: "), name
        assert said.endswith("; create it in worker_init_fn or lazily on first use, or drop it in __getstate__"), name


@pytest.mark.parametrize("encode", [encode, encode_for_worker], ids=["batch", "dataset"])
def test_a_stream_over_a_descriptor_is_an_error(encode, tmp_path):
    """Whose pickle would be the descriptor's number."""
    tarfile.open(tmp_path / "a.tar", "w").close()
    with tarfile.open(tmp_path / "a.tar", "r|") as stream, pytest.raises(TypeError, match="a descriptor of this"):
        encode(stream)
