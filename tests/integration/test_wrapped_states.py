"""States of loaders over rayloader's wrappers of datasets: each place in a run continues as it would have gone on."""

import copy
import inspect
import random
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, get_worker_info

from probes import oversubscribed
from rayloader import DataLoader, ParquetStream, ShuffleBuffer, cached
from rayloader.plans import Cuts, PackedStream
from wrapped_data import (
    LENGTH,
    STREAMS,
    BothTell,
    Counts,
    CountsEpochs,
    Fixed,
    Global,
    Holding,
    Noisy,
    Shuffled,
    Staged,
    TakesOverLate,
    TellsPosition,
    Turning,
)

pytestmark = [
    oversubscribed,
    pytest.mark.filterwarnings("ignore:this state was saved before the first batch of an epoch"),
    pytest.mark.filterwarnings("ignore:this epoch has the same random order as the one before"),
]

FULL = pytest.mark.full
FORKS = {"num_workers": 2, "workers": "fork"}
PERSISTENT = {**FORKS, "persistent_workers": True}


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def plain(part):
    """Of lists and numbers, which can be compared."""
    if isinstance(part, dict):
        return [plain(value) for value in part.values()]
    if isinstance(part, list):
        return [plain(item) for item in part]
    return part.tolist() if isinstance(part, torch.Tensor) else part


def as_it_is(samples):
    return samples


def epochs_of(loader, count, states=None):
    """The batches of epochs; `states` gets those before and after each batch, with their places."""
    epochs = []
    for epoch in range(count):
        epochs.append([])
        if states is not None:
            states.append((epoch, 0, loader.state_dict()))
        for batch in loader:
            epochs[-1].append(plain(batch))
            if states is not None:
                states.append((epoch, len(epochs[-1]), loader.state_dict()))
    return epochs


def check_each_place(make, *, epochs=2, places=slice(None)):
    """A loader of a new program, with other seeds, continues from each place as the uninterrupted run."""
    seed(1)
    states = []
    whole = epochs_of(make(), epochs, states)
    assert all(len(epoch) > 1 for epoch in whole)
    for epoch, taken, state in states[places]:
        seed(2)
        loader = make()
        loader.load_state_dict(state)
        rest = [whole[epoch][taken:], *whole[epoch + 1 :]]
        assert epochs_of(loader, epochs - epoch) == rest, (epoch, taken)


def packs(stream, drop_last, *options, **more):
    def make():
        return DataLoader(PackedStream(stream(), 5, drop_last=drop_last), *options, collate_fn=as_it_is, **more)

    return make


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_packs_without_workers(stream, drop_last):
    check_each_place(packs(stream, drop_last, None if drop_last else 2), epochs=3)


def test_packs_without_workers_and_with_seeds_of_batches():
    check_each_place(packs(Shuffled, False, None, seeding="batch"))


@pytest.mark.parametrize("stream", [Shuffled, TakesOverLate])
def test_packs_of_a_rank(stream):
    check_each_place(packs(stream, True, None, num_replicas=2, rank=1), epochs=3)


@pytest.mark.parametrize(
    ("stream", "options"),
    [
        (Shuffled, PERSISTENT),
        (Shuffled, {**PERSISTENT, "seeding": "batch"}),
        pytest.param(Shuffled, FORKS, marks=FULL),
        *(pytest.param(stream, PERSISTENT, marks=FULL) for stream in STREAMS if stream is not Shuffled),
        *(pytest.param(stream, {**FORKS, "seeding": "batch"}, marks=FULL) for stream in STREAMS),
    ],
)
def test_packs_of_forks(stream, options):
    """From the places of the second epoch, the one before its first batch included."""
    check_each_place(packs(stream, False, None, **options), places=slice(-4, None))


def test_packs_of_actors(ray_session):
    make = packs(Shuffled, False, None, num_workers=2, persistent_workers=True, workers="ray")
    check_each_place(make, places=slice(-2, None))


def shuffled(stream, *options, **more):
    def make():
        return DataLoader(ShuffleBuffer(stream(), 4), *options, collate_fn=as_it_is, **more)

    return make


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_shuffle_buffer_without_workers(stream, batch_size):
    check_each_place(shuffled(stream, batch_size), epochs=3)


def test_a_shuffle_buffer_with_seeds_of_batches_or_of_a_rank():
    check_each_place(shuffled(Shuffled, None, seeding="batch"))
    check_each_place(shuffled(TakesOverLate, None, num_replicas=2, rank=1), epochs=3)


@pytest.mark.parametrize(
    ("stream", "options"),
    [
        (Fixed, FORKS),
        (Shuffled, PERSISTENT),
        (TellsPosition, PERSISTENT),
        (BothTell, {**PERSISTENT, "seeding": "batch"}),
        *(pytest.param(stream, PERSISTENT, marks=FULL) for stream in STREAMS),
        *(pytest.param(stream, {**FORKS, "seeding": "batch"}, marks=FULL) for stream in STREAMS),
    ],
)
def test_a_shuffle_buffer_of_forks(stream, options):
    """From the places of the second epoch, the one before its first batch included."""
    check_each_place(shuffled(stream, None, **options), places=slice(LENGTH + 1, None))


def test_a_shuffle_buffer_of_actors(ray_session):
    make = shuffled(TellsPosition, None, num_workers=2, persistent_workers=True, workers="ray")
    check_each_place(make, places=slice(-2, None))


def jittered(rows):
    """Decodes with random numbers."""
    return [(float(row["text"]) + torch.rand(()).item() + random.random(), row["number"]) for row in rows]


@pytest.mark.parametrize("options", [{}, pytest.param(PERSISTENT, marks=FULL)])
def test_rows_of_files_that_are_decoded_with_random_numbers(tmp_path, options):
    table = pa.table({"text": [str(number) for number in range(30)], "number": range(30)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)

    def make():
        return DataLoader(ShuffleBuffer(ParquetStream(tmp_path, shuffle=True), 9), 3, collate_fn=jittered, **options)

    check_each_place(make)


@pytest.mark.parametrize("sampler", [Global, Holding, Turning])
@pytest.mark.parametrize("in_batches", [False, True])
def test_shares_of_ranks(sampler, in_batches):
    def make():
        drawn = sampler()
        given = {"batch_sampler": BatchSampler(drawn, 2, False)} if in_batches else {"batch_size": 2, "sampler": drawn}
        return DataLoader(Cuts(Noisy()), num_replicas=2, rank=1, collate_fn=as_it_is, **given)

    check_each_place(make)


@pytest.mark.parametrize("options", [{}, PERSISTENT])
def test_parts_of_samples_that_depend_on_a_state(options):
    check_each_place(lambda: DataLoader(Cuts(Counts()), 3, collate_fn=as_it_is, **options), places=slice(-3, None))


@pytest.mark.parametrize("wrap", [cached, Cuts])
def test_a_wrapped_dataset_with_a_state_that_the_program_sets(wrap):
    whole, loader = (DataLoader(wrap(Staged()), 3, collate_fn=as_it_is) for _ in range(2))
    whole.dataset.dataset.stage = 4
    iterator = iter(whole)
    next(iterator)
    loader.load_state_dict(whole.state_dict())
    assert [*loader] == [*iterator]
    assert [*loader] == [*whole]


@pytest.mark.parametrize("wrap", [partial(PackedStream, seq_len=2), partial(ShuffleBuffer, size=2), cached, Cuts])
def test_a_wrapper_has_what_the_dataset_has(wrap):
    inner = CountsEpochs() if isinstance(wrap, partial) else Staged()
    inner.set_epoch = partial(setattr, inner, "told")
    wrapper = wrap(inner)
    assert wrapper.state_dict() == inner.state_dict()
    assert inspect.getattr_static(wrapper, "state_dict")  # as the protocols of torchdata and Lightning ask
    DataLoader(wrapper).set_epoch(3)
    assert inner.told == 3
    copied = copy.deepcopy(wrapper)
    copied.load_state_dict({"epoch": 0, "position": 2, "stage": 2})
    assert copied.state_dict() != inner.state_dict()
    stateless = wrap(Fixed() if isinstance(wrap, partial) else [1])
    for name in "state_dict", "load_state_dict", "set_epoch":
        assert inspect.getattr_static(stateless, name, None) is None


@pytest.mark.parametrize(("kind", "size"), [(PackedStream, 2), (ShuffleBuffer, 2)])
def test_what_a_subclass_of_a_wrapper_defines_is_its_own(kind, size):
    told = []

    class Own(kind):
        def set_epoch(self, epoch):
            told.append(epoch)

        def state_dict(self):
            return {"own": 1, **self.stream.state_dict()}

    own = Own(CountsEpochs(), size)
    DataLoader(own).set_epoch(3)
    assert (told, own.state_dict()["own"]) == ([3], 1)


class Told(IterableDataset):
    """Its part is another one in each epoch, and it has no state."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        yield from range(100 * self.epoch + info.id, 100 * self.epoch + 20, info.num_workers)


@pytest.mark.parametrize("options", [FORKS, PERSISTENT])
@pytest.mark.parametrize("wrap", [lambda stream: stream, partial(ShuffleBuffer, size=3)])
@pytest.mark.parametrize(("epoch", "taken"), [(0, 2), (0, None), (1, 2), (1, None)])
def test_a_stream_that_was_told_an_epoch_goes_on_where_the_program_tells_the_next(wrap, options, epoch, taken):
    """Its workers may have to read the epoch before again, of which it was told something else."""
    whole, resumed = (DataLoader(wrap(Told()), 2, collate_fn=as_it_is, **options) for _ in range(2))
    expected = []
    for number in range(3):
        whole.set_epoch(number)
        for step, batch in enumerate(whole):
            if number > epoch or (number == epoch and taken is not None and step >= taken):
                expected.append(batch)
            if (number, step + 1) == (epoch, taken):
                state = whole.state_dict()
        if number == epoch and taken is None:
            state = whole.state_dict()
    resumed.load_state_dict(state)
    found = []
    for number in range(epoch + (taken is None), 3):
        resumed.set_epoch(number)
        found += resumed
    assert found == expected
