"""What is finalized when a worker's objects go: no Ray."""

import gc
import multiprocessing.shared_memory
import os
import weakref
import zipfile

import pytest

from rayloader.host.server import Hosting, without_finalizers


class Noted:
    def __init__(self, notes):
        self.notes = notes

    def __del__(self):
        self.notes.append("__del__")


class Slotted(Noted):
    __slots__ = ()


@pytest.fixture
def notes():
    return []


@pytest.mark.parametrize("kind", [Noted, Slotted])
def test_no_del_runs_in_the_block_and_each_does_after_it(kind, notes):
    going, garbage, staying = kind(notes), kind(notes), kind(notes)
    garbage.itself = garbage
    del garbage
    with without_finalizers():
        del going
    assert notes == []
    gc.collect()
    assert notes == []
    del staying
    assert notes == ["__del__"]


def test_a_cycle_that_goes_in_the_block_is_collected_in_it(notes):
    going = Noted(notes)
    going.itself, gone = going, weakref.ref(going)
    with without_finalizers():
        del going
    assert gone() is None
    assert notes == []


def open_files():
    return len(os.listdir("/proc/self/fd"))


def archive(folder):
    return zipfile.ZipFile(folder / "a.zip", "w")


def memory(folder):
    shared = multiprocessing.shared_memory.SharedMemory(create=True, size=100)
    shared.unlink()
    return shared


@pytest.mark.parametrize(("make", "files"), [(archive, 1), (memory, 2)])  # its own, and that of the mapping
def test_files_are_closed_though_their_finalizers_are_left_out(make, files, tmp_path):
    make(tmp_path)  # which opens what stays open
    before = open_files()
    one = make(tmp_path)
    assert open_files() == before + files
    with without_finalizers():
        del one
    assert open_files() == before


class Hosted:
    """A worker."""

    def __init__(self, notes):
        self.dataset, self.iterator = Noted(notes), Noted(["iterator"])
        self.iterator.notes = notes

    def end(self):
        self.iterator = None


def test_what_is_no_worker_any_more_ends_its_iterator_and_not_its_dataset(notes):
    hosting = Hosting()
    hosting._worker = Hosted(notes)
    hosting.clear()
    gc.collect()
    assert notes == ["__del__"], "of the iterator, as torch's worker that returns; its dataset just goes"
