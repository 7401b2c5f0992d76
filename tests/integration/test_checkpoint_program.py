"""What a state does to the program around the loader: its generators, its samplers and their epochs.

Each program is run once without an interruption. Then one like it, with other seeds, loads a state and goes on from
there; what the program does before each epoch it does once more, as a script does that was started again.
"""

import functools
import logging
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, Sampler

import stateful
from checkpoint_data import EPOCHS, INDICES, batches, make, plain, read, resumed, save
from probes import oversubscribed
from rayloader import StateError
from stateful import LENGTH

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]

TAKEN = 3  # batches before a state is saved in the middle of an epoch; 8 an epoch


class Program:
    """A training script, which draws from its loader's generator after each batch, and validates after each epoch.

    The validation's loader is its own, also shuffled, and its seeds come from the same generator. Or the script seeds
    the generator before each epoch; draws would then depend on when it was started.

    Args:
        seed: of all that it makes; two programs that differ in it must not differ after a state was loaded.
        own: whether that generator is the program's own, or the global one.
        seeds: whether it seeds the generator, and does nothing else.
        options: of its loaders.
    """

    def __init__(self, seed, own, seeds, **options):
        random.seed(seed), np.random.seed(seed)
        self.seeds = seeds
        self.generator = torch.Generator().manual_seed(seed) if own else torch.default_generator
        options |= {"shuffle": True, "generator": self.generator if own else None, "seed": seed}
        self.loaders = [
            make(lambda length=length: {"dataset": stateful.Augmented(length)}, 2, **options) for length in (LENGTH, 9)
        ]

    def steps(self, epoch=0):
        """A step for each batch, and one for each epoch's end."""
        for number in range(epoch, EPOCHS):
            if self.seeds:
                self.generator.manual_seed(50 + number)
            for batch in batches(self.loaders[0]):
                yield number, batch, self.seeds or torch.rand(1, generator=self.generator).item()
            yield number, self.seeds or list(batches(self.loaders[1]))


@pytest.mark.parametrize("options", [{"own": False, "persistent_workers": True, "prefetch_factor": 9}, {"own": True}])
@pytest.mark.parametrize("seeds", [False, True])
def test_a_program_that_is_started_again_goes_on_as_if_nothing_had_been(seeds, options):
    running = Program(1, seeds=seeds, **options)
    steps, saved = [], {}
    for step in running.steps():
        steps.append(step)
        if len(steps) in (TAKEN, 9, 9 + TAKEN):  # in the first epoch, at its end, in the second
            saved[len(steps)] = [save(loader) for loader in running.loaders]
    for taken, states in saved.items():
        again = Program(2, seeds=seeds, **options)
        for loader, state in zip(again.loaders, states, strict=True):
            loader.load_state_dict(read(state))
        assert list(again.steps(epoch=taken // 9)) == steps[taken:], f"after {taken} steps"


# ---- the program's generators


def of_the_program(own):
    """The states of all generators."""
    return (
        random.getstate(),
        plain(list(np.random.get_state())),
        torch.get_rng_state().tolist(),
        own.get_state().tolist(),
    )


@pytest.mark.parametrize(("sampler", "num_workers"), [("stock", 2), ("lazy", 2), ("stock", 0)])
def test_the_iter_that_goes_on_in_the_middle_of_an_epoch_moves_no_generator(sampler, num_workers):
    own = torch.Generator()
    order = {"shuffle": True, "generator": own} if sampler == "stock" else {"sampler": stateful.Lazy()}
    loader = make(lambda: {"dataset": stateful.Augmented(), **order}, num_workers)
    next(iter(loader))
    state = loader.state_dict()
    for seeds in (False, True):
        loader.load_state_dict(state)
        if seeds:
            random.seed(4), np.random.seed(4), torch.manual_seed(4), own.manual_seed(4)
        before = of_the_program(own)
        iter(loader)
        assert of_the_program(own) == before


def test_a_state_is_loaded_at_once_and_what_the_program_does_then_counts():
    own = torch.Generator()
    loader = make(lambda: {"dataset": stateful.Augmented(), "shuffle": True, "generator": own}, 2)
    next(iter(loader))
    saved, at_save = save(loader), own.get_state()
    own.manual_seed(3)
    loader.load_state_dict(read(saved))
    assert torch.equal(own.get_state(), at_save)
    own.manual_seed(4)
    seeded = own.get_state()
    state = loader.state_dict()
    iter(loader)
    assert torch.equal(own.get_state(), seeded)
    loader.load_state_dict(state)  # the generators are what they were when it was saved
    assert torch.equal(own.get_state(), seeded)


# ---- samplers


def of(sampler):
    return lambda: {"dataset": stateful.Augmented(), "sampler": sampler}


@pytest.mark.parametrize("taken", [0, 2, 9])
def test_the_arguments_of_a_sampler_stay_and_other_ones_show_in_the_indices(taken):
    def loader(seed):
        return make(of(DistributedSampler(INDICES, 1, 0, seed=seed)), 1)

    one = loader(1)
    iterator = iter(one) if taken else None
    for _ in range(taken):
        next(iterator, None)
    other = loader(2)
    other.load_state_dict(read(save(one)))
    assert other.sampler.seed == 2
    if taken == 2:
        with pytest.raises(StateError, match="the sampler did not reproduce its indices"):
            iter(other)
    else:
        assert list(map(plain, other)) == list(map(plain, loader(2)))


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("epoch_is_set", [False, True])
def test_a_distributed_sampler_gets_its_epoch_back(epoch_is_set, epoch):
    def fresh():
        return make(of(DistributedSampler(INDICES, 2, 1, seed=7)), 1, workers="fork")

    loader = fresh()
    loader.sampler.set_epoch(epoch)
    iterator = batches(loader)
    next(iterator)
    saved, rest = save(loader), list(iterator)
    loader = fresh()
    loader.sampler.set_epoch(5)
    loader.load_state_dict(read(saved))
    assert loader.sampler.epoch == epoch
    if epoch_is_set:
        loader.sampler.set_epoch(epoch)
    assert list(batches(loader)) == rest


class Told(stateful.StatefulSampler):
    """Counts how often it is asked for its state, which it can't tell once it is broken."""

    told, broken = 0, False

    def state_dict(self):
        self.told += 1
        return {"lock": threading.Lock()} if self.broken else super().state_dict()


def test_a_sampler_tells_its_state_once_an_epoch_and_not_for_each_draw():
    sampler = Told()
    loader = make(of(sampler), 2)
    for _ in range(3):
        assert len(list(loader)) == 8
    assert sampler.told == 3 * 2  # before and after the epoch's first draw


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sampler_that_cannot_tell_its_state_is_an_error_only_for_who_asks(num_workers):
    sampler = Told()
    sampler.broken = True
    loader = make(of(sampler), num_workers)
    assert sorted(index for batch in loader for index in batch[0].tolist()) == list(INDICES)
    next(iter(loader))
    with pytest.raises(StateError, match=r"sampler could not save its state(?s:.*)lock"):
        loader.state_dict()


# ---- samplers without a `state_dict`, which hold generators, or their code does


OF_THE_MODULE = random.Random(0)


class OfTheModule(Sampler):
    def __init__(self, dataset):
        self.data_source = dataset

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter([OF_THE_MODULE.randrange(LENGTH) for _ in range(LENGTH)])


class OfItsData(OfTheModule):
    def __iter__(self):
        return iter([self.data_source.python.randrange(LENGTH) for _ in range(LENGTH)])


class Unseeded(OfTheModule):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(LENGTH).tolist())


def with_sampler(kind, num_workers=0):
    random.seed(1)
    dataset = stateful.OwnGenerators()
    arguments = {"dataset": dataset, "sampler": kind(dataset), "collate_fn": lambda samples: [s[0] for s in samples]}
    return make(lambda: arguments, num_workers)


@pytest.mark.parametrize(("num_workers", "taken"), [(0, 0), (0, 1), (2, 0), (2, 1)])
def test_the_next_epochs_have_the_orders_that_they_would_have_had(num_workers, taken):
    loader = with_sampler(OfTheModule, num_workers)
    first = list(loader)
    iterator = iter(loader) if taken else None
    for _ in range(taken):
        next(iterator)
    state = loader.state_dict()
    rest = list(iterator or loader), list(loader)
    assert first != rest[1] != rest[0]
    again = with_sampler(OfTheModule, num_workers)
    again.load_state_dict(state)
    assert (list(again), list(again)) == rest


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [OfItsData, Unseeded])
def test_in_the_middle_of_an_epoch_an_order_that_cannot_be_drawn_again_is_an_error(kind, num_workers):
    loader = with_sampler(kind, num_workers)
    list(loader)
    next(iter(loader))
    state = loader.state_dict()
    again = with_sampler(kind, num_workers)
    again.load_state_dict(state)
    with pytest.raises(StateError, match="the sampler did not reproduce its indices"):
        iter(again)


# ---- other workers than those that were saved


def in_second_epoch(loader, taken):
    """The batches after those taken; of all eight, also the end is taken."""
    list(loader)
    iterator = batches(loader)
    for _ in range(taken):
        next(iterator)
    if taken == 8:
        assert list(iterator) == []
    return iterator


@pytest.mark.parametrize(("persistent", "taken"), [((True, False), TAKEN), ((False, True), 8)])
def test_other_workers_end_the_epoch_and_then_the_loaders_own_begin(caplog, persistent, taken):
    """Saved by three workers, persistent or not, and loaded by others; by four and by two."""

    def fresh(num_workers, persistent, seed=1):
        arguments = {"dataset": stateful.Augmented(), "shuffle": True}
        return make(lambda: arguments, num_workers, seed=seed, persistent_workers=persistent, workers="fork")

    loader = fresh(3, persistent[0])
    iterator = in_second_epoch(loader, taken)
    saved, rest = save(loader), list(iterator)
    for num_workers in (2, 4):
        caplog.clear()
        again = fresh(num_workers, persistent[1], seed=2)
        again.load_state_dict(read(saved))
        if rest:
            assert list(batches(again)) == rest
            assert ("rest of this epoch has 3 workers" in caplog.text) is (num_workers == 2)
        now = torch.get_rng_state()
        following = list(batches(again))
        ordinary = fresh(num_workers, persistent[1])
        torch.set_rng_state(now)
        assert following == list(batches(ordinary))
        assert {batch[-2][0] for batch in following} == {num_workers}


@pytest.mark.parametrize(("persistent", "taken"), [(False, TAKEN), (True, 8)])
def test_with_seeds_for_batches_the_loaders_own_workers_go_on_at_once(caplog, persistent, taken):
    def fresh(num_workers, seed=1):
        options = {"seeding": "batch", "persistent_workers": persistent, "workers": "fork"}
        return make(lambda: {"dataset": stateful.Noise(), "shuffle": True}, num_workers, seed=seed, **options)

    loader = fresh(3)
    iterator = in_second_epoch(loader, taken)
    saved, rest = save(loader), list(iterator)
    following = list(batches(loader))
    again = fresh(1, seed=2)
    again.load_state_dict(read(saved))
    with caplog.at_level(logging.WARNING, "rayloader"):
        iterator = batches(again)
        found = [next(iterator)]
        assert again.state_dict()["num_workers"] == 1
        found += iterator
    assert found == (rest or following)
    assert "processes" not in caplog.text


@pytest.mark.parametrize("taken", [0, 6])
def test_seeds_for_batches_and_generators_of_the_loaders_own_keep_the_workers_of_the_epoch(taken):
    def own_noise(samples, generator):
        return [samples, generator.random()]

    def fresh(num_workers, seed):
        collate = functools.partial(own_noise, generator=random.Random(6))
        arguments = {"dataset": stateful.OwnGenerators(), "collate_fn": collate, "seeding": "batch"}
        return make(lambda: arguments, num_workers, seed=seed, workers="fork")

    loader = fresh(3, seed=1)
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    saved, rest = save(loader), [*map(plain, iterator)]
    assert resumed(fresh(2, seed=2), saved)[0] == rest
