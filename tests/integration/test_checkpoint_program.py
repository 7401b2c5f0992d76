"""What a state does to the program around the loader: its generators, its samplers and their epochs.

Each program is run once without an interruption. Then one like it, with other seeds, loads a state and goes on from
there; what the program does before each epoch it does once more, as a script does that was started again.
"""

import functools
import itertools
import logging
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, Sampler

import stateful
from checkpoint_data import EPOCHS, INDICES, batches, make, plain, read, save
from probes import oversubscribed
from rayloader import StateError
from stateful import LENGTH

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]

TAKEN = 3  # batches before a state is saved in the middle of an epoch; 8 an epoch


class Program:
    """A training script.

    Args:
        seed: of all that it makes; two programs that differ in it must not differ after a state was loaded.
        options: of its loaders.
    """

    def __init__(self, seed, **options):
        self.generator = torch.Generator().manual_seed(seed)
        random.seed(seed), np.random.seed(seed)
        self.loader = make(self.arguments, 2, seed=seed, **options)
        self.loaders = [self.loader]

    def arguments(self):
        """Of the training loader."""
        return {"dataset": stateful.Augmented(), "shuffle": True}

    def before(self, epoch):
        """Runs before each epoch."""

    def after(self):
        """Runs after each batch; what it gives is compared too."""

    def validate(self):
        """Runs after each epoch."""

    def steps(self, epoch=0):
        """A step for each batch, and one for each epoch's end."""
        for number in range(epoch, EPOCHS):
            self.before(number)
            for batch in batches(self.loader):
                yield number, batch, self.after()
            yield number, self.validate()

    def save(self):
        return [save(loader) for loader in self.loaders]

    def load(self, states):
        for loader, state in zip(self.loaders, states, strict=True):
            loader.load_state_dict(read(state))


class SeedsEachEpoch(Program):
    def before(self, epoch):
        torch.manual_seed(100 + epoch)


class SeedsItsGenerator(Program):
    def arguments(self):
        return {**super().arguments(), "generator": self.generator}

    def before(self, epoch):
        self.generator.manual_seed(50 + epoch)


class DrawsFromItsGenerator(Program):
    def arguments(self):
        return {**super().arguments(), "generator": self.generator}

    def after(self):
        return torch.rand(1, generator=self.generator).item()


class CountsWhileItIsAsked(Program):
    """The iterator makes of the counter what the epoch is."""

    class Sampler(stateful.Counts):
        def __iter__(self):
            self.epoch += 1
            for index in random.Random(self.epoch).sample(INDICES, LENGTH):
                self.place = index
                yield index

    def arguments(self):
        sampler = self.Sampler()
        return {"dataset": stateful.Augmented(), "batch_sampler": BatchSampler(sampler, 3, False)}


class ValidatesAndDraws(Program):
    """With a loader of its own, also shuffled, whose seeds come from the same generator."""

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        torch.manual_seed(seed)
        arguments = {"dataset": stateful.Augmented(9), "shuffle": True}
        self.loaders.append(make(lambda: arguments, 1, seed=seed, **options))

    def after(self):
        return torch.rand(1).item()

    def validate(self):
        return list(batches(self.loaders[1]))


PROGRAMS = [
    SeedsEachEpoch,
    SeedsItsGenerator,
    DrawsFromItsGenerator,
    CountsWhileItIsAsked,
    ValidatesAndDraws,
]


WAYS = itertools.cycle(itertools.product([True, False], [9, 2]))  # persistent workers; a deep window, or torch's


@pytest.mark.parametrize(("program", "way"), list(zip(PROGRAMS, WAYS, strict=False)))
def test_a_program_that_is_started_again_goes_on_as_if_nothing_had_been(program, way):
    options = {"persistent_workers": way[0], "prefetch_factor": way[1]}
    running = program(1, **options)
    steps, saved = [], {}
    for step in running.steps():
        steps.append(step)
        if len(steps) in (TAKEN, 9, 9 + TAKEN):  # in the first epoch, at its end, in the second
            saved[len(steps)] = running.save()
    for taken, states in saved.items():
        again = program(2, **options)
        again.load(states)
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


@pytest.mark.parametrize("sampler", ["stock", "lazy"])
def test_the_iter_that_goes_on_in_the_middle_of_an_epoch_moves_no_generator(sampler):
    own = torch.Generator()
    order = {"shuffle": True, "generator": own} if sampler == "stock" else {"sampler": stateful.Lazy()}
    loader = make(lambda: {"dataset": stateful.Augmented(), **order}, 2)
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
    iterator = iter(loader)
    assert torch.equal(own.get_state(), seeded)
    loader.load_state_dict(state)  # the generators are what they were when it was saved
    assert torch.equal(own.get_state(), seeded)
    del iterator


# ---- samplers


def of(sampler):
    return lambda: {"dataset": stateful.Augmented(), "sampler": sampler}


@pytest.mark.parametrize("taken", [0, 2, 9])
def test_the_arguments_of_a_sampler_stay_and_other_ones_show_in_the_indices(taken):
    def loader(seed):
        return make(of(DistributedSampler(INDICES, 1, 0, seed=seed)), 1)

    one = loader(1)
    if taken:
        iterator = iter(one)
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


@pytest.mark.parametrize("epoch_is_set", [False, True])
def test_a_distributed_sampler_gets_its_epoch_back(epoch_is_set):
    def fresh():
        return make(of(DistributedSampler(INDICES, 2, 1, seed=7)), 1, workers="fork")

    loader = fresh()
    loader.sampler.set_epoch(3)
    iterator = batches(loader)
    next(iterator)
    saved, rest = save(loader), list(iterator)
    loader = fresh()
    loader.load_state_dict(read(saved))
    assert loader.sampler.epoch == 3
    if epoch_is_set:
        loader.sampler.set_epoch(3)
    assert list(batches(loader)) == rest


def test_an_epoch_that_the_program_sets_is_restored_whenever_it_was_set():
    class Sets(stateful.Counts):
        current_epoch = 0

        def set_epoch(self, epoch):
            self.current_epoch = epoch

    def fresh():
        sampler = Sets()
        sampler.current_epoch = 0
        return make(of(sampler), 1)

    state = save(fresh())
    loader = fresh()
    loader.sampler.set_epoch(3)
    loader.load_state_dict(read(state))
    assert loader.sampler.current_epoch == 0


def test_a_sampler_tells_its_state_once_an_epoch_and_not_for_each_draw():
    class Big(stateful.StatefulSampler):
        told = 0

        def state_dict(self):
            self.told += 1
            return {**super().state_dict(), "weights": np.zeros(1 << 14)}

    sampler = Big()
    loader = make(of(sampler), 2)
    for _ in range(3):
        assert len(list(loader)) == 8
    assert sampler.told == 3 * 2  # before and after the epoch's first draw


def test_a_sampler_that_cannot_tell_its_state_is_an_error_only_for_who_asks():
    class Locked(stateful.StatefulSampler):
        def state_dict(self):
            return {"lock": threading.Lock()}

    loader = make(of(Locked()), 2)
    assert sorted(index for batch in loader for index in batch[0].tolist()) == list(INDICES)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(StateError, match=r"sampler could not save its state(?s:.*)lock"):
        loader.state_dict()


# ---- samplers without a `state_dict`, which hold generators, or their code does


def draws(generator):
    return (generator.randrange(LENGTH) for _ in range(LENGTH))


OF_THE_MODULE = random.Random(0)


class OfTheModule(Sampler):
    def __init__(self, dataset):
        """Keeps nothing."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return draws(OF_THE_MODULE)


class OfItsData(OfTheModule):
    def __init__(self, dataset):
        self.data_source = dataset

    def __iter__(self):
        return iter(list(draws(self.data_source.python)))


def in_a_closure(dataset):
    generator = random.Random(0)

    class InAClosure(OfTheModule):
        def __iter__(self):
            return draws(generator)

    return InAClosure(dataset)


def unseeded(dataset):
    class Unseeded(OfTheModule):
        def __iter__(self):
            return iter(np.random.default_rng().permutation(LENGTH).tolist())

    return Unseeded(dataset)


def with_sampler(kind, num_workers=0):
    random.seed(1)
    dataset = stateful.OwnGenerators()
    return make(lambda: {"dataset": dataset, "sampler": kind(dataset), "collate_fn": indices_of}, num_workers)


def indices_of(samples):
    return [sample[0] for sample in samples]


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
@pytest.mark.parametrize("kind", [OfItsData, in_a_closure, unseeded])
def test_in_the_middle_of_an_epoch_an_order_that_cannot_be_drawn_again_is_an_error(kind, num_workers):
    loader = with_sampler(kind, num_workers)
    list(loader)
    iterator = iter(loader)
    next(iterator)
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


# Saved by persistent workers, loaded by such, and when.
@pytest.mark.parametrize(
    ("persistent", "taken"),
    [((False, False), TAKEN), ((True, True), TAKEN), ((False, True), 8), ((True, False), 8)],
)
def test_other_workers_end_the_epoch_and_then_the_loaders_own_begin(caplog, persistent, taken):
    """Saved by three workers, one of them persistent or not; loaded by as many, and by four and by two."""

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


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("taken", [TAKEN, 8])
def test_with_seeds_for_batches_the_loaders_own_workers_go_on_at_once(caplog, persistent, taken):
    def fresh(num_workers, seed=1):
        options = {"seeding": "batch", "persistent_workers": persistent, "workers": "fork"}
        return make(lambda: {"dataset": stateful.Noise(), "shuffle": True}, num_workers, seed=seed, **options)

    loader = fresh(3)
    expected = [list(batches(loader)) for _ in range(EPOCHS)]
    loader = fresh(3)
    iterator = in_second_epoch(loader, taken)
    saved = save(loader)
    for num_workers in (1, 4):
        again = fresh(num_workers, seed=2)
        again.load_state_dict(read(saved))
        with caplog.at_level(logging.WARNING, "rayloader"):
            iterator = batches(again)
            first = next(iterator)
            assert again.state_dict()["num_workers"] == num_workers
            assert [first, *iterator] == (expected[1][taken:] or expected[2])
        assert "processes" not in caplog.text
        if taken != 8:
            assert list(batches(again)) == expected[2]


def own_noise(samples, generator):
    return [samples, generator.random()]


HOLDERS = {
    "dataset": lambda: {"dataset": stateful.OwnGenerators()},
    "collate_fn": lambda: {
        "dataset": stateful.Indices(),
        "collate_fn": functools.partial(own_noise, generator=random.Random(6)),
    },
}


@pytest.mark.parametrize("taken", [0, 6])
@pytest.mark.parametrize("holder", HOLDERS)
def test_seeds_for_batches_and_generators_of_the_loaders_own_keep_the_workers_of_the_epoch(holder, taken):
    loader = make(HOLDERS[holder], 3, seeding="batch")
    iterator = iter(loader)
    for _ in range(taken):
        next(iterator)
    saved, rest = save(loader), [*map(plain, iterator)]
    again = make(HOLDERS[holder], 2, seed=2, seeding="batch")
    again.load_state_dict(read(saved))
    assert list(batches(again)) == rest
