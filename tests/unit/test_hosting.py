"""What is finalized when a worker's objects go: no Ray."""

import functools
import gc
import os
import weakref
import zipfile
from types import SimpleNamespace

import pytest

from rayloader.host.server import Hosting, without_finalizers


class Noted:
    def __init__(self, notes):
        self.notes = notes

    def __del__(self):
        self.notes.append("__del__")


@pytest.fixture
def notes():
    return []


def test_no_del_runs_in_the_block_where_cycles_are_collected_and_each_does_after_it(notes):
    going, cycle, garbage, staying = (Noted(notes) for _ in range(4))
    cycle.itself, garbage.itself, gone = cycle, garbage, weakref.ref(cycle)
    del garbage
    with without_finalizers():
        del going, cycle
    assert gone() is None
    gc.collect()
    assert notes == []
    del staying
    assert notes == ["__del__"]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_files_are_closed_though_their_finalizers_are_left_out(tmp_path):
    before = open_files()
    one = zipfile.ZipFile(tmp_path / "a.zip", "w")
    assert open_files() == before + 1
    with without_finalizers():
        del one
    assert open_files() == before


def test_what_is_no_worker_any_more_ends_its_iterator_and_not_its_dataset(notes):
    worker = SimpleNamespace(dataset=Noted(notes), iterator=Noted(notes))
    worker.end = functools.partial(delattr, worker, "iterator")
    hosting = Hosting()
    hosting._worker = worker
    del worker
    hosting.clear()
    gc.collect()
    assert notes == ["__del__"], "of the iterator, as torch's worker that returns; its dataset just goes"
