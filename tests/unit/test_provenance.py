"""The provenance log, without workers: what is written when, and what the reader makes of it."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import sys
from types import SimpleNamespace

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import programs
import rayloader
from rayloader import DataLoader, RayloaderError
from rayloader.replay import log_writer, provenance
from rayloader.replay.provenance import OUTCOMES, read
from rayloader.task import Outcome

EMPTY = SimpleNamespace(restarts=0)


class Squares(Dataset):
    def __init__(self, length=12, bad=()):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(index)
        return torch.tensor(index) ** 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(6))


class WithState(Stream):
    """Its state holds what JSON has not."""

    def state_dict(self):
        return {"position": torch.tensor(3), 1: "one"}

    def load_state_dict(self, state):
        self.loaded = state


class Anything(Dataset):
    """Whatever the index is, the sample is a number."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return 1


def columns(log, *names):
    """The rows of all iterations, in the order of the file."""
    return [tuple(row[name] for name in names) for one in log.iterations for row in one.rows.to_pylist()]


def written(path, *, label="", steps=range(5), flush=True):
    """The rows of an epoch that a loader's iterator has written."""
    rows = log_writer.opened(SimpleNamespace(provenance=path, _label=label))
    loader = DataLoader(Squares(), 2, name=label or None)
    rows.begin(loader, DataLoader(Squares())._position or position_of(loader), EMPTY)
    for step in steps:
        rows.drawn(step, [step, step + 1], skipped=False)
        rows.add(step, step % 2, 100 + step, Outcome.BATCH, 0)
    if flush:
        rows.flush()
    return rows


def position_of(loader):
    iterator = iter(loader)
    return iterator.position


# ---- what is in it


def test_each_batch_has_a_row(tmp_path):
    path = tmp_path / "log.arrows"
    torch.manual_seed(0)
    loader = DataLoader(Squares(), 4, shuffle=True, provenance=path)
    batches = [[list(batch) for batch in loader] for _ in range(2)]
    log = read(path)
    assert log.epochs == [0, 1]
    assert [one.loader for one in log.iterations] == ["Squares"] * 2
    assert columns(log, "epoch", "step") == [(epoch, step) for epoch in range(2) for step in range(3)]
    assert columns(log, "worker", "outcome", "skipped", "restarts") == [(0, 0, 0, 0)] * 6
    indices = [[torch.tensor(index) ** 2 for index in row] for (row,) in columns(log, "indices")]
    assert indices == [batch for epoch in batches for batch in epoch]


def test_pandas_and_pyarrow_read_it(tmp_path):
    path = tmp_path / "log.arrows"
    list(DataLoader(Squares(), 4, provenance=path))
    with pa.OSFile(str(path)) as file:
        table = pa.ipc.open_stream(file).read_all()
    frame = table.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame[["step", "epoch"]].values.tolist() == [[0, 0], [1, 0], [2, 0]]
    assert frame["indices"][2].tolist() == [8, 9, 10, 11]


def test_the_state_of_each_epoch_gives_its_batches_again(tmp_path):
    path = tmp_path / "log.arrows"

    def make(**options):
        return DataLoader(Squares(), 2, shuffle=True, **options)

    loader = make(provenance=path)
    epochs = [torch.stack(list(loader)).tolist() for _ in range(3)]
    log = read(path)
    for epoch, batches in enumerate(epochs):
        again = make()
        again.load_state_dict(log.states_of(epoch)[0])
        assert torch.stack(list(again)).tolist() == batches
        assert again._position.epoch_of_run == epoch


def test_equal_batches_have_equal_digests_and_others_have_not(tmp_path):
    def digests(name, **options):
        torch.manual_seed(1)
        list(DataLoader(Squares(), 4, shuffle=True, provenance=tmp_path / name, **options))
        return columns(read(tmp_path / name), "digest")

    assert digests("a") == digests("b")
    assert len({*digests("a")}) == 3
    assert digests("c", drop_last=True, collate_fn=as_floats) != digests("a")


def as_floats(samples):
    return torch.stack(samples).float()


def test_outcomes(tmp_path):
    path = tmp_path / "log.arrows"
    loader = DataLoader(Squares(bad=(2, 3, 4)), 2, on_error="skip", provenance=path, skip_steps=[4])
    assert len(list(loader)) == 4
    rows = columns(read(path), "step", "outcome", "skipped", "indices")
    assert [(step, OUTCOMES[outcome], skipped) for step, outcome, skipped, _ in sorted(rows)] == [
        (0, "batch", 0),
        (1, "empty", 2),
        (2, "batch", 1),
        (3, "batch", 0),
        (4, "skipped", 0),
        (5, "batch", 0),
    ]
    assert [indices for *_, indices in sorted(rows)] == [[step * 2, step * 2 + 1] for step in range(6)]


def test_an_exception_is_a_row_too(tmp_path):
    loader = DataLoader(Squares(bad=(2,)), 2, provenance=tmp_path / "log")
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="2"):
        next(iterator)
    rest = list(iterator)
    assert len(rest) == 4
    assert [OUTCOMES[outcome] for (outcome,) in columns(read(tmp_path / "log"), "outcome")] == [
        "batch",
        "error",
        *["batch"] * 4,
    ]


@pytest.mark.parametrize(
    "indices",
    [("a", "b"), "text", torch.tensor([1, 2]), np.arange(3), [(1, 2), (3, 4)], [[1], 2], [1.5], [2**70], {"a": 1}],
    ids=repr,
)
def test_indices_that_are_no_whole_numbers_are_pickled(tmp_path, indices):
    list(DataLoader(Anything(), sampler=[indices], batch_size=None, provenance=tmp_path / "log"))
    ((whole, other),) = columns(read(tmp_path / "log"), "indices", "indices_other")
    assert whole is None
    assert repr(pickle.loads(other)) == repr(indices)


@pytest.mark.parametrize("indices", [[3], 3, [np.int64(3)]], ids=repr)
def test_whole_numbers_are_lists(tmp_path, indices):
    list(DataLoader(Anything(), sampler=[indices], batch_size=None, provenance=tmp_path / "log"))
    assert columns(read(tmp_path / "log"), "indices", "indices_other") == [([3], None)]


def test_indices_that_cannot_be_pickled_are_left_out(tmp_path):
    list(DataLoader(Anything(), sampler=[(i for i in ())], batch_size=None, provenance=tmp_path / "log"))
    assert columns(read(tmp_path / "log"), "step", "indices", "indices_other") == [(0, None, None)]


@pytest.mark.parametrize("batch_size", [2, None])
def test_a_stream_has_no_indices(tmp_path, batch_size):
    list(DataLoader(Stream(), batch_size, provenance=tmp_path / "log"))
    rows = columns(read(tmp_path / "log"), "step", "indices", "indices_other")
    assert rows == [(step, None, None) for step in range(3 if batch_size else 6)]


def test_a_state_that_json_has_not_is_in_it(tmp_path):
    list(DataLoader(WithState(), None, provenance=tmp_path / "log"))
    state = read(tmp_path / "log").states_of(0)[0]
    loader = DataLoader(WithState(), None)
    loader.load_state_dict(state)
    assert loader.dataset.loaded == {"position": torch.tensor(3), 1: "one"}


def test_why_there_is_no_state_is_said(tmp_path):
    class Stateless(Stream):
        def state_dict(self):
            raise OSError("gone")

        def load_state_dict(self, state):
            raise NotImplementedError

    list(DataLoader(Stateless(), None, provenance=tmp_path / "log"))
    log = read(tmp_path / "log")
    assert "gone" in log.iterations[0].error
    with pytest.raises(LookupError, match=r"(?s)no state of epoch 0.*gone"):
        log.states_of(0)


# ---- the reader


def test_the_last_row_of_a_step_counts(tmp_path):
    path = tmp_path / "log"
    loader = DataLoader(Squares(), 2, provenance=path)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    next(iterator)
    del iterator
    again = DataLoader(Squares(), 2, provenance=path, collate_fn=as_floats)
    again.load_state_dict(state)
    list(again)
    log = read(path)
    assert [one.rows["step"].to_pylist() for one in log.iterations] == [[0, 1, 2], [2, 3, 4, 5]]
    assert log.epochs == [0]
    assert log.row(0, 2) == log.iterations[1].rows.to_pylist()[0] != log.iterations[0].rows.to_pylist()[2]
    assert log.steps_of(0)["step"].to_pylist() == [*range(6)]
    assert log.states_of(0) == [one.state for one in log.iterations]


def test_what_a_worker_has_built(tmp_path):
    written(tmp_path / "log")
    log = read(tmp_path / "log")
    assert log.of_worker(0, 1) == {1: 101, 3: 103}
    assert log.of_worker(0, 0) == {0: 100, 2: 102, 4: 104}


def test_what_is_not_there_is_an_error(tmp_path):
    written(tmp_path / "log")
    log = read(tmp_path / "log")
    with pytest.raises(LookupError, match=r"no epoch 7; it has \[0\]"):
        log.states_of(7)
    with pytest.raises(LookupError, match="no step 9 of epoch 0"):
        log.row(0, 9)


@pytest.mark.parametrize("content", [b"no log", pa.schema([("a", pa.int8())]).serialize().to_pybytes()])
def test_another_file_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(RayloaderError, match="is no provenance log"):
        read(path)
    with pytest.raises(RayloaderError, match="is no provenance log"):
        iter(DataLoader(Squares(), provenance=path))
    assert path.read_bytes() == content


def test_an_empty_file_is_a_log_without_rows(tmp_path):
    (tmp_path / "file").touch()
    assert read(tmp_path / "file").iterations == []
    list(DataLoader(Squares(), provenance=tmp_path / "file"))
    assert read(tmp_path / "file").steps_of(0)["step"].to_pylist() == [*range(12)]


def test_a_damaged_log_is_refused_and_not_cut(tmp_path):
    path = tmp_path / "log"
    for _ in range(2):
        written(path)
        gc.collect()
    content = bytearray(path.read_bytes())
    content[len(provenance.BEGIN)] ^= 1
    path.write_bytes(content)
    with pytest.raises(RayloaderError, match="is damaged after"):
        read(path)
    with pytest.raises(RayloaderError, match="is damaged after"):
        iter(DataLoader(Squares(), provenance=path))
    assert path.read_bytes() == content


def test_a_damaged_length_in_the_middle_is_no_end(tmp_path):
    """What comes after it would be cut off by the next run."""
    path = tmp_path / "log"
    for _ in range(2):
        written(path)
        gc.collect()
    content = bytearray(path.read_bytes())
    content[len(provenance.BEGIN) + 7] ^= 1
    path.write_bytes(content)
    with pytest.raises(RayloaderError, match=f"is damaged after {len(provenance.BEGIN)} bytes"):
        read(path)
    with pytest.raises(RayloaderError, match=f"is damaged after {len(provenance.BEGIN)} bytes"):
        iter(DataLoader(Squares(), provenance=path))
    assert path.read_bytes() == content


@pytest.mark.parametrize("place", [10**8, -4, 5])
def test_offsets_that_leave_the_file_are_damage(tmp_path, place):
    """Arrow takes them as they are, and reads there when the rows are sorted: the interpreter would crash."""
    path = tmp_path / "log"
    written(path)
    offsets = np.arange(0, 12, 2, np.int32)  # of two indices for each of the five steps
    content = path.read_bytes()
    assert content.count(offsets.tobytes()) == 1
    damaged = np.where(offsets == 2, np.int32(place), offsets)
    path.write_bytes(content.replace(offsets.tobytes(), damaged.tobytes()))
    with pytest.raises(RayloaderError, match="is damaged after"):
        read(path).steps_of(0)


# ---- killed


def test_from_every_length_that_a_kill_may_leave_it_is_read_and_continued(tmp_path):
    path = tmp_path / "whole"
    written(path)
    whole = path.read_bytes()
    begin = len(provenance.BEGIN)
    ends = [begin]
    while ends[-1] < len(whole):
        message = pa.ipc.read_message(pa.py_buffer(whole).slice(ends[-1]))
        ends.append(ends[-1] + 8 + message.metadata.size + message.body.size)
    assert len(ends) == 3  # the start of the epoch, and its rows
    around = [*ends, *(end - 1 for end in ends[1:]), *(end + 5 for end in ends[:-1])]
    for size in [*range(begin, len(whole), 977), *around]:
        cut = tmp_path / "cut"
        cut.write_bytes(whole[:size])
        log = read(cut)
        assert columns(log, "step") == ([(step,) for step in range(5)] if size == len(whole) else [])
        assert len(log.iterations) == (size >= ends[1])
        loader = DataLoader(Squares(4), 2, provenance=cut)
        list(loader)
        assert [one.rows["step"].to_pylist() for one in read(cut).iterations][-1:] == [[0, 1]]
        assert cut.read_bytes()[: max(end for end in ends if end <= size)] == whole[: max(e for e in ends if e <= size)]
        cut.unlink()


@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_file_without_its_whole_beginning_is_begun_again(tmp_path, size):
    path = tmp_path / "log"
    path.write_bytes(provenance.BEGIN[:size])
    list(DataLoader(Squares(4), 2, provenance=path))
    assert columns(read(path), "step") == [(0,), (1,)]


def test_zeros_at_the_end_which_a_failing_machine_leaves_are_cut_off(tmp_path):
    path = tmp_path / "log"
    written(path)
    gc.collect()
    before = path.read_bytes()
    path.write_bytes(before + bytes(100))
    assert columns(read(path), "step") == [(step,) for step in range(5)]
    list(DataLoader(Squares(4), 2, provenance=path))
    assert path.read_bytes()[: len(before)] == before
    assert len(read(path).iterations) == 2


# ---- when it is written


def test_rows_are_written_when_there_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(log_writer, "ROWS", 4)
    monkeypatch.setattr(log_writer, "SECONDS", 1e9)
    rows = written(tmp_path / "log", steps=range(3), flush=False)
    assert columns(read(tmp_path / "log"), "step") in ([], [(0,)])  # the first may find that it is long since the last
    rows.flush()
    for step in range(3, 9):
        rows.add(step, 0, 0, Outcome.BATCH, 0)
    assert columns(read(tmp_path / "log"), "step") == [(step,) for step in range(7)]


def test_rows_are_written_with_the_next_one_when_it_is_time(tmp_path, monkeypatch):
    monkeypatch.setattr(log_writer, "SECONDS", 0.0)
    written(tmp_path / "log", steps=range(3), flush=False)
    assert columns(read(tmp_path / "log"), "step") == [(0,), (1,)]


def test_an_iterator_that_is_dropped_has_written_its_rows(tmp_path):
    for _ in DataLoader(Squares(), 2, provenance=tmp_path / "log"):
        break
    assert columns(read(tmp_path / "log"), "step") == [(0,)]


def test_a_program_that_ends_has_written_its_rows(tmp_path):
    program = f"""
import rayloader
iterator = iter(rayloader.DataLoader(range(8), 2, provenance={str(tmp_path / "log")!r}))
next(iterator), next(iterator)
"""
    assert programs.run(program).returncode == 0
    assert columns(read(tmp_path / "log"), "step", "indices") == [(0, [0, 1]), (1, [2, 3])]


def test_rows_hold_no_batch(tmp_path):
    loader = DataLoader(Squares(), 2, provenance=tmp_path / "log")
    iterator = iter(loader)
    batch = next(iterator)
    assert not [holder for holder in gc.get_referrers(batch) if isinstance(holder, (tuple, dict, list))]


# ---- interrupts


def test_a_row_that_is_added_again_is_one(tmp_path):
    rows = written(tmp_path / "log", steps=range(2), flush=False)
    rows.add(1, 1, 101, Outcome.BATCH, 0)
    rows.flush()
    rows.add(1, 1, 101, Outcome.BATCH, 0)
    rows.flush()
    assert columns(read(tmp_path / "log"), "step") == [(0,), (1,)]


class Interrupted(BaseException):
    """Raised by a signal handler."""


def test_an_interrupt_at_any_point_loses_and_doubles_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(log_writer, "ROWS", 2)
    count = 3

    def interrupt(number):
        points = itertools.count(1)

        def profile(frame, event, argument):
            own = frame.f_code.co_filename == log_writer.__file__ and frame.f_code.co_name != "__del__"
            if own and event in ("call", "c_return") and argument is not sys.setprofile and next(points) == number:
                sys.setprofile(None)
                raise Interrupted

        return profile

    for number in itertools.count(1):
        path = tmp_path / f"{number}"
        rows = written(path, steps=[], flush=False)
        fired = False
        for step in range(count):
            rows.drawn(step, [step], skipped=False)
        for step in range(count):
            if step == 2 and not fired:
                sys.setprofile(interrupt(number))
            try:
                rows.add(step, 0, step, Outcome.BATCH, 0)
                rows.flush() if step == 2 else None
            except Interrupted:
                fired = True
            finally:
                sys.setprofile(None)
            if fired:  # it is added again, as `Position.settle` does
                rows.add(step, 0, step, Outcome.BATCH, 0)
        rows.flush()
        assert columns(read(path), "step", "indices") == [(step, [step]) for step in range(count)], number
        if not fired:
            break
    assert number > 20


def test_a_finalizer_in_the_middle_of_a_write_adds_to_it(tmp_path, monkeypatch):
    path = tmp_path / "log"
    first, second = written(path, steps=range(2), flush=False), written(path, steps=range(3), flush=False)
    pwrite, finalizes = os.pwrite, [second.flush]

    def interrupted(descriptor, content, place):
        if finalizes:
            finalizes.pop()()
        return pwrite(descriptor, content, place)

    monkeypatch.setattr(os, "pwrite", interrupted)
    first.flush()
    assert [one.rows["step"].to_pylist() for one in read(path).iterations] == [[0, 1], [0, 1, 2]]


# ---- a disk that is full


def test_a_full_disk_does_not_end_the_training_and_the_next_epoch_is_logged_again(tmp_path, monkeypatch, caplog):
    path = tmp_path / "log"
    loader = DataLoader(Squares(), 2, provenance=path)
    list(loader)
    pwrite, full = os.pwrite, [True]

    def writes(descriptor, content, place):
        if not full:
            return pwrite(descriptor, content, place)
        pwrite(descriptor, bytes(content)[:10], place)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", writes)
    with caplog.at_level(logging.WARNING, "rayloader"):
        assert len(list(loader)) == 6
    assert ["cannot be written" in record.getMessage() for record in caplog.records] == [True]
    assert len(read(path).iterations) == 1
    full.clear()
    list(loader)
    assert [one.epoch for one in read(path).iterations] == [0, 2]
    assert columns(read(path), "epoch", "step") == [(epoch, step) for epoch in (0, 2) for step in range(6)]


def test_a_part_of_a_message_is_completed(tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, content, place: pwrite(descriptor, content[:500], place))
    written(tmp_path / "log")
    assert columns(read(tmp_path / "log"), "step") == [(step,) for step in range(5)]


# ---- where it is


def test_a_folder_gets_a_file_for_each_loader(tmp_path):
    for name in ("train", "a/b c"):
        list(DataLoader(Squares(), 2, provenance=tmp_path, name=name))
    list(DataLoader(Squares(), 2, provenance=f"{tmp_path}/new/"))
    list(DataLoader(Squares(), 2, provenance=tmp_path, num_replicas=2, rank=1))
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.arrows"))
    assert found == ["Squares-rank1.arrows", "a_b_c.arrows", "new/Squares.arrows", "train.arrows"]


def test_a_folder_that_is_missing_is_an_error_of_iter(tmp_path):
    loader = DataLoader(Squares(), 2, provenance=tmp_path / "no" / "log.arrows")
    state = torch.get_rng_state()
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*/no for the provenance log; make it first"):
        iter(loader)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("value", [3, "", b"x", ["a"], True])
def test_what_is_no_path_is_an_error(value):
    with pytest.raises(TypeError, match="provenance must be the path of a file or of a folder, or None, got"):
        DataLoader(Squares(), provenance=value)


def test_a_relative_path_is_where_the_loader_was_pickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loader = DataLoader(Squares(), 2, provenance="log.arrows")
    assert pickle.loads(pickle.dumps(loader)).provenance == str(tmp_path / "log.arrows")


def test_loaders_of_one_process_share_a_file(tmp_path):
    path, link = tmp_path / "log", tmp_path / "link"
    one = iter(DataLoader(Squares(4), 2, provenance=path, name="one"))
    link.symlink_to(path)
    two = iter(DataLoader(Squares(6), 2, provenance=link, name="two"))
    for iterator in (one, two, two, one, two):
        next(iterator)
    del one, two, iterator
    log = read(path)
    assert log.loaders == ["one", "two"]
    assert columns(log.of_loader("one"), "indices") == [([0, 1],), ([2, 3],)]
    assert columns(log.of_loader("two"), "indices") == [([0, 1],), ([2, 3],), ([4, 5],)]
    with pytest.raises(LookupError, match="is of several loaders, one, two: choose one"):
        log.row(0, 0)
    assert log.of_loader("two").row(0, 2)["indices"] == [4, 5]


@contextlib.contextmanager
def child(does):
    """A forked child that lives; gives the text that it has returned."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    if (number := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            sending.send(does())
        signal.pause()
    with receiving:
        sending.close()
        try:
            yield receiving.recv()
        finally:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)


def begun(path):
    """Begins an epoch that is logged there; what it says if it can't."""
    try:
        iter(DataLoader(Squares(), 2, provenance=path))
    except RayloaderError as error:
        return str(error)
    return ""


def test_another_process_is_kept_out_until_the_loader_has_ended(tmp_path):
    path = tmp_path / "log"
    loader = DataLoader(Squares(), 2, provenance=path)
    list(loader)
    with child(lambda: begun(path)) as error:
        assert f"another process writes to the provenance log {path}" in error
    del loader
    gc.collect()
    with child(lambda: begun(path)) as error:
        assert not error
    assert len(read(path).iterations) == 2


def test_where_no_file_can_be_locked_it_is_written_all_the_same(tmp_path, monkeypatch, caplog):
    def unlocked(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(log_writer.fcntl, "flock", unlocked)
    with caplog.at_level(logging.INFO, "rayloader"):
        list(DataLoader(Squares(), 2, provenance=tmp_path / "log"))
    assert "nothing keeps other processes from the provenance log" in caplog.text
    assert len(columns(read(tmp_path / "log"), "step")) == 6


def test_a_forked_child_leaves_it_to_its_parent(tmp_path):
    loader = DataLoader(Squares(), 2, provenance=tmp_path / "log")
    iterators = [iter(loader)]
    next(iterators[0])

    def writes():
        next(iterators[0])
        iterators[0].position.flush_log()
        return "done"

    with child(writes) as told:
        assert told == "done"
        del loader, iterators[:]  # the child still lives, and does not keep the lock
        gc.collect()
        with child(lambda: begun(tmp_path / "log")) as error:
            assert not error
    assert [one.rows["step"].to_pylist() for one in read(tmp_path / "log").iterations] == [[0], []]


def test_without_pyarrow_the_remedy_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("provenance", "log_writer"):
        monkeypatch.delitem(sys.modules, f"rayloader.replay.{name}")
        monkeypatch.delattr(rayloader.replay, name)
    with pytest.raises(ImportError, match=r"provenance= needs pyarrow: pip install rayloader\[arrow\]"):
        iter(DataLoader(Squares(), provenance=tmp_path / "log"))
