"""What a state holds and whom it fits: samplers of every kind, its size, and loaders that refuse it."""

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import checkpoint_data as data
from checkpoint_data import batches, check, hosted, make, read, resumed, run, save, some
from probes import as_is, oversubscribed
from rayloader import DataLoader, StateError

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]

# ---- samplers: `seed` differs between the run and who goes on


def generator(seed):
    return torch.Generator().manual_seed(seed)


def one_generator_for_both(seed):
    both = generator(seed)
    return {"sampler": RandomSampler(INDICES, generator=both), "generator": both}


INDICES = range(data.LENGTH)
SAMPLERS = {
    "global generator": lambda seed: {"shuffle": True},
    "generator": lambda seed: {"shuffle": True, "generator": generator(seed)},
    "generator of the sampler's": lambda seed: {"sampler": RandomSampler(INDICES, generator=generator(seed))},
    "one generator for both": one_generator_for_both,
    "with replacement": lambda seed: {"sampler": RandomSampler(INDICES, True, 50, generator=generator(seed))},
    "weighted": lambda seed: {"sampler": WeightedRandomSampler([1.0] * data.LENGTH, 20)},
    "subset, unbatched": lambda seed: {"sampler": SubsetRandomSampler(range(3, 15)), "batch_size": None},
    "batches of a sampler": lambda seed: {"batch_sampler": BatchSampler(RandomSampler(INDICES), 4, True)},
    "batches of the user's": lambda seed: {"batch_sampler": data.GrowingBatches()},
    "batches in a list": lambda seed: {"batch_sampler": [[0, 1], [2], [], [3, 4, 5]], "collate_fn": as_is},
    "stateful": lambda seed: {"sampler": data.StatefulSampler(seed)},
    "stateful, unbatched": lambda seed: {"sampler": data.StatefulSampler(seed), "batch_size": None},
    "stateful batches": lambda seed: {"batch_sampler": data.StatefulBatchSampler(seed)},
    "stateful iterators": lambda seed: {"sampler": data.SamplerOfStatefulIterators()},
}


@some(2, 5)
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_go_on(name, which):
    def arguments(seed):
        return lambda: {"dataset": data.Augmented(), **SAMPLERS[name](seed)}

    epochs, points = run(make(arguments(1), 2))
    assert epochs[0]
    for point in points[which]:
        check(epochs, point, hosted(arguments(2), 1, of=2))


@pytest.mark.parametrize("epoch_is_set", [False, True])
def test_a_distributed_sampler_gets_its_epoch_back(epoch_is_set):
    def arguments():
        return {"dataset": data.Augmented(), "sampler": DistributedSampler(range(data.LENGTH), 2, 1, seed=7)}

    loader = make(arguments, 2)
    epochs, saved = [], []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        epochs.append([])
        for batch in batches(loader):
            epochs[-1].append(batch)
            saved.append((epoch, len(epochs[-1]), save(loader)))
    for epoch, taken, state in saved[1:-4:3]:
        loader = hosted(arguments, 1, of=2)
        loader.load_state_dict(read(state))
        if epoch_is_set:
            loader.sampler.set_epoch(epoch)
        assert list(batches(loader)) == epochs[epoch][taken:]
        assert loader.sampler.epoch == epoch
        loader.sampler.set_epoch(epoch + 1)
        assert list(batches(loader)) == epochs[epoch + 1]


# ---- what a state is


@pytest.mark.parametrize("num_workers", [2, pytest.param(8, marks=pytest.mark.full)])
def test_a_state_of_eight_workers_is_small(num_workers):
    """All their generators have moved. Eight actors, or two that host eight workers."""
    loader = make(lambda: {"dataset": data.Augmented(400), "shuffle": True}, 8)
    loader.resize(num_workers)
    iterator = batches(loader)
    workers = {next(iterator)[-3][0] for _ in range(70)}
    assert workers == set(range(8))
    assert len(save(loader)) < 80_000


def test_a_state_holds_no_sample():
    loader = DataLoader(torch.rand(40, 100_000), 2, num_workers=2)
    next(iter(loader))
    assert len(save(loader)) < 80_000


def small(**options):
    return make(lambda: {"dataset": data.Augmented(), **options}, 2)


REFUSED = {
    "batch_size": ({"batch_size": 4}, "batch_size"),
    "no batch_size": ({"batch_size": None}, "batch_size"),
    "length": ({"dataset": data.Augmented(23)}, "length"),
    "kind": ({"dataset": data.Shuffled()}, "iterable"),
    "drop_last": ({"drop_last": True}, "drop_last"),
    "in_order": ({"in_order": False}, "in_order"),
    "seeding": ({"seeding": "batch"}, "seeding"),
    "other indices": ({"shuffle": True}, "sampler|indices"),
    "another sampler": ({"sampler": data.StatefulSampler(1)}, "sampler|indices"),
    "another rank's": ({"sampler": DistributedSampler(range(2 * data.LENGTH), 2, 1, shuffle=False)}, "sampler|indices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_state_of_another_loader_is_refused(name):
    options, what_differs = REFUSED[name]
    loader = small()
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    with pytest.raises(StateError, match=f"(?i){what_differs}"):
        resumed(small(**options), save(loader))


def test_an_order_that_nobody_can_draw_again_is_refused():
    def arguments():
        return {"dataset": data.Augmented(), "sampler": data.UnseededSampler()}

    loader = make(arguments, 2)
    next(iter(loader))
    with pytest.raises(StateError, match=r"sampler|indices"):
        resumed(make(arguments, 2), save(loader))


@pytest.mark.parametrize("kind", [torch.Tensor, np.ndarray])
def test_indices_in_tensors_and_arrays_are_compared_too(kind):
    def arguments(seed):
        return lambda: {"dataset": data.Augmented(), "batch_sampler": data.TensorBatches(seed, kind)}

    loader = make(arguments(1), 2)
    expected = list(batches(loader))
    torch.manual_seed(1)
    next(iter(loader))
    saved = save(loader)
    assert resumed(make(arguments(1), 2), saved)[0] == expected[1:]
    with pytest.raises(StateError, match="indices"):
        resumed(make(arguments(2), 2), saved)


@pytest.mark.parametrize("state", [None, [], "state", {"_snapshot": {"_main_snapshot": {}}, "_num_yielded": 3}])
def test_what_is_no_state_is_refused_and_changes_nothing(state):
    expected = list(batches(small()))
    loader = small()
    with pytest.raises(StateError):
        loader.load_state_dict(state)
    assert list(batches(loader)) == expected


def test_a_state_of_an_unknown_version_is_refused():
    loader = small()
    state = loader.state_dict()
    assert isinstance(state["version"], int)
    with pytest.raises(StateError, match="version"):
        loader.load_state_dict({**state, "version": state["version"] + 1})
