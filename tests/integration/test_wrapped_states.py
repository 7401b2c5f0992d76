"""States of loaders over rayloader's wrappers of datasets: each place in a run continues as it would have gone on."""

import copy
import inspect
import itertools
import random
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import stateful
from checkpoint_data import plain
from probes import as_is, oversubscribed
from rayloader import DataLoader, ParquetStream, ShuffleBuffer, cached
from rayloader.plans import Cuts, PackedStream
from replay_data import seed
from stateful import LateStream, Shuffled, StatefulStream
from wrapped_data import STREAMS, BothTell, Salted, Told

pytestmark = [
    oversubscribed,
    pytest.mark.filterwarnings("ignore:this state was saved before the first batch of an epoch"),
    pytest.mark.filterwarnings("ignore:this epoch has the same random order as the one before"),
]

FORKS = {"num_workers": 2, "workers": "fork"}
PERSISTENT = {**FORKS, "persistent_workers": True}
BATCH = {"seeding": "batch"}
RANK = {"num_replicas": 2, "rank": 1}
WRAPPERS = {
    "none": lambda stream: {"dataset": stream, "batch_size": None},
    "packs": lambda stream: {"dataset": PackedStream(stream, 12), "batch_size": 2},
    "packs, unbatched": lambda stream: {"dataset": PackedStream(stream, 12, drop_last=True), "batch_size": None},
    "buffer": lambda stream: {"dataset": ShuffleBuffer(stream, 4), "batch_size": 2},
    "buffer, unbatched": lambda stream: {"dataset": ShuffleBuffer(stream, 4), "batch_size": None},
}
PACKS, BUFFER = "packs, unbatched", "buffer, unbatched"


def check_each_place(arguments, places=None, **options):
    """A loader of a new program, with other seeds, continues from each place of two epochs as the uninterrupted run.

    The function `arguments` makes those of the loader, all objects anew; places are before and after each batch, or
    those of the second epoch in a slice.
    """

    def make(number):
        seed(number)
        return DataLoader(**{"collate_fn": as_is, **arguments(), **options})

    loader, whole, states = make(1), [], []
    for epoch in range(2):
        whole.append([])
        states.append((epoch, 0, loader.state_dict()))
        loader.set_epoch(epoch)
        for batch in loader:
            whole[-1].append(plain(batch))
            states.append((epoch, len(whole[-1]), loader.state_dict()))
    assert all(len(epoch) > 1 for epoch in whole)
    for epoch, taken, state in states if places is None else [place for place in states if place[0]][places]:
        loader = make(2)
        loader.load_state_dict(state)
        rest = []
        for number in range(epoch, 2):
            loader.set_epoch(number)
            rest.append([plain(batch) for batch in loader])
        assert rest == [whole[epoch][taken:], *whole[epoch + 1 :]], (epoch, taken)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_stream_without_workers_goes_on_from_each_place(wrapper, stream):
    check_each_place(lambda: WRAPPERS[wrapper](stream()))


WAYS = [
    *((wrapper, stream, RANK) for wrapper in (PACKS, BUFFER) for stream in (Shuffled, LateStream)),
    *((wrapper, Shuffled, options) for wrapper in (PACKS, BUFFER) for options in (BATCH, PERSISTENT)),
    (PACKS, Shuffled, {**PERSISTENT, **BATCH}),
    *((wrapper, Told, options) for wrapper in ("none", BUFFER) for options in (FORKS, PERSISTENT)),
    (BUFFER, StatefulStream, PERSISTENT),
    (BUFFER, BothTell, {**PERSISTENT, **BATCH}),
    (PACKS, Shuffled, {**PERSISTENT, "workers": "ray"}),
    (BUFFER, StatefulStream, {**PERSISTENT, "workers": "ray"}),
]


@pytest.mark.parametrize(("wrapper", "stream", "options"), WAYS)
def test_a_wrapped_stream_goes_on_with_ranks_seeds_of_batches_and_workers(wrapper, stream, options, ray_session):
    """From places of the second epoch, with persistent workers the one before its first batch included."""
    places = slice(None, None, 4) if "num_workers" in options else None
    check_each_place(lambda: WRAPPERS[wrapper](stream()), places, **options)


@pytest.mark.parametrize("options", [{}, PERSISTENT])
@pytest.mark.parametrize(("wrap", "dataset"), [(Cuts, stateful.Counting), (cached, Salted)])
def test_a_wrapped_map_style_dataset_goes_on(wrap, dataset, options):
    """It has a salt that only its state tells; before all workers have given samples it has that of its program."""
    salts = itertools.count()

    def arguments():
        return {"dataset": wrap(dataset(next(salts))), "batch_size": 3}

    check_each_place(arguments, slice(3, None, 2), **options)


def jittered(rows):
    """Decodes with random numbers."""
    return [(float(row["text"]) + torch.rand(()).item() + random.random(), row["number"]) for row in rows]


def test_rows_of_files_that_are_decoded_with_random_numbers(tmp_path):
    """The buffer saves the numbers of rows, not the rows."""
    table = pa.table({"text": [str(number) for number in range(30)], "number": range(30)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)

    def arguments():
        return {"dataset": ShuffleBuffer(ParquetStream(tmp_path, shuffle=True), 9), "batch_size": 3}

    check_each_place(arguments, collate_fn=jittered)


@pytest.mark.parametrize("wrap", [partial(PackedStream, seq_len=2), partial(ShuffleBuffer, size=2), cached, Cuts])
def test_a_wrapper_has_what_the_dataset_has(wrap):
    inner = StatefulStream() if isinstance(wrap, partial) else Salted()
    inner.set_epoch = partial(setattr, inner, "heard")
    wrapper = wrap(inner)
    assert wrapper.state_dict() == inner.state_dict()
    assert inspect.getattr_static(wrapper, "state_dict")  # as the protocols of torchdata and Lightning ask
    DataLoader(wrapper).set_epoch(3)
    assert inner.heard == 3
    copied = copy.deepcopy(wrapper)
    copied.load_state_dict({"position": 2, "salt": 2})
    assert copied.state_dict() != inner.state_dict()
    stateless = wrap(Shuffled() if isinstance(wrap, partial) else [1])
    for name in "state_dict", "load_state_dict", "set_epoch":
        assert inspect.getattr_static(stateless, name, None) is None


@pytest.mark.parametrize("kind", [PackedStream, ShuffleBuffer])
def test_what_a_subclass_of_a_wrapper_defines_is_its_own(kind):
    class Own(kind):
        def set_epoch(self, epoch):
            self.heard = epoch

        def state_dict(self):
            return {"own": 1, **self.stream.state_dict()}

    own = Own(StatefulStream(), 2)
    DataLoader(own).set_epoch(3)
    assert (own.heard, own.state_dict()["own"]) == (3, 1)
