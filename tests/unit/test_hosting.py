"""What is finalized when a worker's objects go: no Ray."""

import gc
import multiprocessing.shared_memory
import multiprocessing.util
import subprocess
import weakref
import zipfile

import pytest

from rayloader._compat import finalizers_of_processes, run_exit_finalizers
from rayloader.host.hosting import Hosting, open_files, without_finalizers


@pytest.fixture(autouse=True)
def of_no_other_test():
    """What this process has registered at `multiprocessing` by now, such as other tests' sockets, is left alone."""
    kept = dict(finalizers_of_processes)
    finalizers_of_processes.clear()
    yield
    finalizers_of_processes.clear()
    finalizers_of_processes.update(kept)


class Noted:
    def __init__(self, notes):
        self.notes = notes

    def __del__(self):
        self.notes.append("__del__")


class Derived(Noted):
    pass


class Slotted(Noted):
    __slots__ = ()


class Plain:
    """May be referred to weakly, and by itself."""


@pytest.fixture
def notes():
    return []


@pytest.mark.parametrize("kind", [Noted, Derived, Slotted])
def test_no_del_runs_in_the_block_and_each_does_after_it(kind, notes):
    going, garbage, staying = kind(notes), kind(notes), kind(notes)
    garbage.itself = garbage
    del garbage
    with without_finalizers() as left_out:
        del going
    assert notes == left_out == []
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


def test_files_are_closed_though_their_finalizers_are_left_out(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("a", "b")
    before = open_files()
    archive = zipfile.ZipFile(tmp_path / "a.zip")
    assert open_files() == before + 1
    with without_finalizers():
        del archive
    assert open_files() == before


def test_memory_of_the_process_is_released(notes):
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=100)
    memory.unlink()
    before = open_files()
    with without_finalizers():
        del memory
    assert open_files() == before


def test_a_weak_finalizer_of_what_goes_is_left_out_and_told_of(notes):
    going, staying = Plain(), Plain()
    weakref.finalize(going, notes.append, "going")
    weakref.finalize(staying, notes.append, "staying")
    with without_finalizers() as left_out:
        pass
    assert left_out == []
    with without_finalizers() as left_out:
        del going
    assert left_out == ["a `weakref.finalize`"]
    assert notes == []
    del staying
    assert notes == ["staying"]


def test_of_multiprocessings_finalizers_those_with_a_priority_run_in_its_order(notes):
    obj = Plain()
    for priority in (None, -5, 3):
        multiprocessing.util.Finalize(obj, notes.append, (priority,), exitpriority=priority)
    run_exit_finalizers(float("-inf"))
    assert notes == [3, -5]
    with without_finalizers() as left_out:
        del obj
    assert left_out == ["a finalizer of `multiprocessing`"]
    assert notes == [3, -5]


class Hosted:
    """A worker."""

    def __init__(self, notes):
        self.dataset, self.iterator = Noted(notes), Noted(["iterator"])
        self.iterator.notes = notes

    def end(self):
        self.iterator = None

    def park(self):
        pass

    def rewind_modules(self):
        pass


def test_a_worker_that_moves_away_or_starts_again_ends_its_iterator_and_not_its_dataset(notes):
    hosting = Hosting(None)
    hosting.add(0, Hosted(notes))
    hosting.add(1, Hosted(notes))
    hosting.remove(0)
    assert notes == ["__del__"]
    hosting.add(1, Hosted(notes))
    assert notes == ["__del__"] * 2
    assert hosting.clear() == []
    gc.collect()
    assert notes == ["__del__"] * 3


def test_why_a_process_must_end_is_remembered_of_workers_that_have_moved_away(notes):
    hosting = Hosting(None)
    worker = Hosted(notes)
    weakref.finalize(worker.dataset, notes.append, "finalized")
    hosting.add(0, worker)
    del worker
    hosting.remove(0)
    assert hosting.clear() == ["a `weakref.finalize`"]
    assert notes == ["__del__"]
    assert hosting.clear() == []


def test_pipes_and_sockets_do_not_count_as_open_files():
    before = open_files()
    with subprocess.Popen(["true"], stdin=subprocess.PIPE):
        assert open_files() == before
