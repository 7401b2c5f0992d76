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
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler

import checkpoint_data as data
from checkpoint_data import EPOCHS, LENGTH, batches, make, plain, read, save
from probes import oversubscribed
from rayloader import StateError

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]

INDICES = range(LENGTH)
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
        return {"dataset": data.Augmented(), "shuffle": True}

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


class SetsTheEpoch(Program):
    def arguments(self):
        return {"dataset": data.Augmented(), "sampler": DistributedSampler(INDICES, 1, 0, seed=5)}

    def before(self, epoch):
        self.loader.sampler.set_epoch(2 * epoch + 1)


class SeedsEachEpoch(Program):
    def before(self, epoch):
        torch.manual_seed(100 + epoch)


class DrawsToo(Program):
    def after(self):
        return torch.rand(1).item()


class SeedsItsGenerator(Program):
    def arguments(self):
        return {"dataset": data.Augmented(), "shuffle": True, "generator": self.generator}

    def before(self, epoch):
        self.generator.manual_seed(50 + epoch)


class DrawsFromItsGenerator(Program):
    def arguments(self):
        return {"dataset": data.Augmented(), "shuffle": True, "generator": self.generator}

    def after(self):
        return torch.rand(1, generator=self.generator).item()


class DrawsWithReplacement(Program):
    """Its sampler draws 32 indices at a time, some of them in the middle of the epoch."""

    def arguments(self):
        sampler = RandomSampler(INDICES, replacement=True, num_samples=2 * LENGTH, generator=self.generator)
        return {"dataset": data.Augmented(), "sampler": sampler, "batch_size": 6}


class Lazy(Sampler):
    """Draws each index from the global generators when it is asked."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        for _ in range(LENGTH):
            drawn = random.random(), np.random.rand(), torch.rand(1).item()
            yield int(sum(drawn) * 1000) % LENGTH


class DrawsLazily(Program):
    def arguments(self):
        return {"dataset": data.Augmented(), "sampler": Lazy()}


class Counts(Sampler):
    """Counts its epochs, as many a sampler does, and shuffles by that."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(INDICES, LENGTH))


class CountsInItsSampler(Program):
    def arguments(self):
        return {"dataset": data.Augmented(), "sampler": Counts()}


class CountsWhileItIsAsked(Program):
    """The iterator makes of the counter what the epoch is."""

    class Sampler(Counts):
        def __iter__(self):
            self.epoch += 1
            for index in random.Random(self.epoch).sample(INDICES, LENGTH):
                self.place = index
                yield index

    def arguments(self):
        return {"dataset": data.Augmented(), "batch_sampler": BatchSampler(self.Sampler(), 3, False)}


class Stateful(Program):
    def arguments(self):
        return {"dataset": data.Augmented(), "sampler": data.StatefulSampler(self.generator.initial_seed())}


class Validates(Program):
    """With a loader of its own, also shuffled, whose seeds come from the same generator."""

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        torch.manual_seed(seed)
        self.loaders.append(make(lambda: {"dataset": data.Augmented(9), "shuffle": True}, 1, seed=seed, **options))

    def after(self):
        return torch.rand(1).item()

    def validate(self):
        return list(batches(self.loaders[1]))


PROGRAMS = [
    SetsTheEpoch,
    SeedsEachEpoch,
    DrawsToo,
    SeedsItsGenerator,
    DrawsFromItsGenerator,
    DrawsWithReplacement,
    DrawsLazily,
    CountsInItsSampler,
    CountsWhileItIsAsked,
    Stateful,
    Validates,
]
SAMPLED = SetsTheEpoch, SeedsEachEpoch, SeedsItsGenerator, CountsInItsSampler, CountsWhileItIsAsked, Validates


def options():
    """Persistent workers or not, and a deep window or torch's; for some programs a sample has one of the four."""
    for number, program in enumerate(PROGRAMS):
        for place, (persistent, depth) in enumerate(itertools.product([True, False], [9, 2])):
            given = {"persistent_workers": persistent, "prefetch_factor": depth}
            name = f"{program.__name__}{'-persistent' if persistent else ''}{'-deep' if depth > 2 else ''}"
            yield pytest.param(
                program, given, id=name, marks=() if place == number % 4 and program in SAMPLED else pytest.mark.full
            )


@pytest.mark.parametrize(("program", "options"), list(options()))
def test_a_program_that_is_started_again_goes_on_as_if_nothing_had_been(program, options):
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


def moved(loader, generator):
    """Which generators an `iter()` moves."""
    before = random.getstate(), plain(list(np.random.get_state())), torch.get_rng_state(), generator.get_state()
    iterator = iter(loader)
    after = random.getstate(), plain(list(np.random.get_state())), torch.get_rng_state(), generator.get_state()
    del iterator
    same = before[0] == after[0], before[1] == after[1], *map(torch.equal, before[2:], after[2:])
    return [name for name, is_same in zip(("python", "numpy", "torch", "own"), same, strict=True) if not is_same]


@pytest.mark.parametrize("sampler", ["stock", "lazy"])
def test_the_iter_that_goes_on_in_the_middle_of_an_epoch_moves_no_generator(sampler):
    own = torch.Generator()

    def arguments():
        order = {"shuffle": True, "generator": own} if sampler == "stock" else {"sampler": Lazy()}
        return {"dataset": data.Augmented(), **order}

    loader = make(arguments, 2)
    iterator = batches(loader)
    next(iterator)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert moved(loader, own) == []
    loader.load_state_dict(state)
    random.seed(4), np.random.seed(4), torch.manual_seed(4), own.manual_seed(4)
    assert moved(loader, own) == []


def test_a_state_is_loaded_at_once_and_what_the_program_does_then_counts():
    own = torch.Generator()
    loader = make(lambda: {"dataset": data.Augmented(), "shuffle": True, "generator": own}, 2)
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


# ---- arguments of samplers


def of(sampler):
    return lambda: {"dataset": data.Augmented(), "sampler": sampler}


class Mine(Sampler):
    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(INDICES)


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


def test_a_state_that_is_refused_changes_nothing():
    """The sampler has no generator of its own here; there it had one."""
    saved = save(make(of(RandomSampler(INDICES, generator=torch.Generator())), 1))
    loader = make(of(RandomSampler(INDICES)), 1)
    before = torch.get_rng_state()
    with pytest.raises(StateError, match="1 random generators of its own, this one has 0"):
        loader.load_state_dict(read(saved))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(loader)) == 8


def test_an_epoch_that_the_program_sets_is_restored_whenever_it_was_set():
    class Sets(Mine):
        def set_epoch(self, epoch):
            self.current_epoch = epoch

    state = save(make(of(Sets(current_epoch=0)), 1))
    sampler = Sets(current_epoch=0)
    sampler.set_epoch(3)
    loader = make(of(sampler), 1)
    loader.load_state_dict(read(state))
    assert sampler.current_epoch == 0


# ---- samplers that tell their state


class Big(data.StatefulSampler):
    """Its state is big; counts how often it is told."""

    def __init__(self, seed):
        super().__init__(seed)
        self.told = 0
        self.weights = np.zeros(1 << 14)

    def state_dict(self):
        self.told += 1
        return {**super().state_dict(), "weights": self.weights}


def test_a_sampler_tells_its_state_once_an_epoch_and_not_for_each_draw():
    sampler = Big(1)
    loader = make(of(sampler), 2)
    for _ in range(3):
        assert len(list(loader)) == 8
    assert sampler.told == 3 * 2  # before and after the epoch's first draw


def test_a_sampler_that_cannot_tell_its_state_is_an_error_only_for_who_asks():
    class Locked(data.StatefulSampler):
        def state_dict(self):
            return {"lock": threading.Lock()}

    loader = make(of(Locked(1)), 2)
    assert sorted(index for batch in loader for index in batch[0].tolist()) == list(INDICES)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(StateError, match=r"sampler could not save its state(?s:.*)lock"):
        loader.state_dict()


@pytest.mark.parametrize("batched", [pytest.param(True, marks=pytest.mark.full), False])
def test_samplers_of_torchdata(batched):
    """At an epoch's end theirs say that all was given; the next epoch is a whole one."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def arguments():
        sampler = stateful.StatefulDistributedSampler(INDICES, 1, 0, seed=3)
        given = {"batch_sampler": stateful.BatchSampler(sampler, 3, False)} if batched else {"sampler": sampler}
        return {"dataset": data.Augmented(), **given}

    epochs, points = data.run(make(arguments, 2), slice(0, None, 3))
    assert [len(epoch) for epoch in epochs] == [8, 8, 8]
    for point in points:
        data.check(epochs, point, make(arguments, 2, seed=2))


# ---- other workers than those that were saved


def ordinary(arguments, num_workers, generator_state, **options):
    """An epoch that begins with torch's generator in this state."""
    loader = make(arguments, num_workers, **options)
    torch.set_rng_state(generator_state)
    return list(batches(loader))


def in_second_epoch(loader, taken):
    """The batches after those taken; of all eight, also the end is taken."""
    list(loader)
    iterator = batches(loader)
    for _ in range(taken):
        next(iterator)
    if taken == 8:
        assert list(iterator) == []
    return iterator


def three_choices():
    """Saved by persistent workers, loaded by such, at the end of an epoch: any two of the three meet in a sample."""
    for saved, loaded, taken in itertools.product((False, True), (False, True), (TAKEN, 8)):
        in_sample = (taken == 8) == (saved != loaded)
        yield pytest.param((saved, loaded), taken, marks=() if in_sample else pytest.mark.full)


@pytest.mark.parametrize(("persistent", "taken"), list(three_choices()))
def test_other_workers_end_the_epoch_and_then_the_loaders_own_begin(caplog, persistent, taken):
    """Saved by three workers, one of them persistent or not; loaded by as many, and by four and by two."""

    def arguments():
        return {"dataset": data.Augmented(), "shuffle": True}

    loader = make(arguments, 3, persistent_workers=persistent[0])
    iterator = in_second_epoch(loader, taken)
    saved, rest = save(loader), list(iterator)
    for num_workers in (2, 4):
        caplog.clear()
        again = make(arguments, num_workers, seed=2, persistent_workers=persistent[1])
        again.load_state_dict(read(saved))
        if rest:
            assert list(batches(again)) == rest
            assert ("rest of this epoch has 3 workers" in caplog.text) is (num_workers == 2)
        now = torch.get_rng_state()
        following = list(batches(again))
        assert following == ordinary(arguments, num_workers, now)
        assert {batch[-2][0] for batch in following} == {num_workers}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("taken", [TAKEN, 8])
def test_with_seeds_for_batches_the_loaders_own_workers_go_on_at_once(caplog, persistent, taken):
    options = {"seeding": "batch", "persistent_workers": persistent}

    def arguments():
        return {"dataset": data.Indices(), "shuffle": True, "collate_fn": lambda samples: [samples, *data.noise()]}

    expected = [list(batches(loader)) for loader in [make(arguments, 3, **options)] * EPOCHS]
    loader = make(arguments, 3, **options)
    iterator = in_second_epoch(loader, taken)
    saved = save(loader)
    for num_workers in (1, 4):
        again = make(arguments, num_workers, seed=2, **options)
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
    "dataset": lambda: {"dataset": data.OwnGenerators()},
    "collate_fn": lambda: {
        "dataset": data.Indices(),
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
