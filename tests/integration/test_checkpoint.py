"""`state_dict` and `load_state_dict`: from every state of a run a new loader goes on with that run's batches."""

import contextlib
import functools
import itertools
import os
import random
import signal

import pytest
import torch
from torch.utils.data import get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import checkpoint_data as data
from checkpoint_data import batches, check, endless, hosted, make, plain, read, resumed, run, save
from inside import kill_worker, live_actor_pids
from latches import Gate, Mail
from probes import Calls, Stream, oversubscribed
from rayloader import ReplayError
from rayloader.resume.state import State

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]

# ---- the matrix: datasets x seeding x persistent workers x number of workers, from every point of a run

CASES = {
    "augmented": lambda: {"dataset": data.Augmented(), "shuffle": True},
    "augmented, strict depth": lambda: {"dataset": data.Augmented(), "prefetch_factor": 4},
    "own generators": lambda: {"dataset": data.OwnGenerators()},
    "stateful map": lambda: {"dataset": data.Counting()},
    "raising map": lambda: {"dataset": data.Faulty()},
    "skipping map": lambda: {"dataset": data.Faulty(), "on_error": "skip"},
    "shuffled stream": lambda: {"dataset": data.Shuffled()},
    "shuffled stream, drop_last": lambda: {"dataset": data.Shuffled(), "drop_last": True},
    "shuffled stream, unbatched": lambda: {"dataset": data.Shuffled(), "batch_size": None},
    "buffered stream": lambda: {"dataset": data.Buffered()},
    "stateful stream": lambda: {"dataset": data.StatefulStream()},
    "late stream": lambda: {"dataset": data.LateStream()},
    "late stream that keeps its end": lambda: {"dataset": data.LateStream(keeps=True)},
    "late map": lambda: {"dataset": data.LateMap()},
    "stream of stateful iterators": lambda: {"dataset": data.StreamOfStatefulIterators()},
    "datapipe": lambda: {"dataset": IterableWrapper(range(20)).shuffle().sharding_filter(), "shuffle": True},
    "skipping stream": lambda: {"dataset": data.StreamOfStatefulIterators(faulty=True), "on_error": "skip"},
}
SEEDINGS = ["worker", "batch"]
NUM_WORKERS = [1, 2, 3, 5]


def matrix():
    """All combinations, with persistent workers in every second one, each from a quarter of the points by turns.

    A sample has one for each case, and few points.
    """
    for number, case in enumerate(CASES):
        for place, (seeding, num_workers) in enumerate(itertools.product(SEEDINGS, NUM_WORKERS)):
            persistent = (place + place // len(NUM_WORKERS) + number) % 2 == 0
            name = f"{case}-{seeding}-{num_workers}{'-persistent' if persistent else ''}"
            combination = case, {"seeding": seeding, "persistent_workers": persistent}, num_workers
            if place == 3 * number % (len(SEEDINGS) * len(NUM_WORKERS)):
                yield pytest.param(*combination, slice(number % 14, None, 28), id=f"{name}-some")
            which = slice((place + number) % 4, None, 4)
            yield pytest.param(*combination, which, id=f"{name}-quarter", marks=pytest.mark.full)


@functools.cache
def undisturbed(case, **options):
    return run(make(CASES[case], **options))


@pytest.mark.parametrize(("case", "options", "num_workers", "which"), list(matrix()))
def test_from_every_point_the_batches_are_those_of_the_undisturbed_run(case, options, num_workers, which):
    case = CASES[case]
    if options["seeding"] == "batch" and num_workers != data.WORKERS and isinstance(case()["dataset"], data.Augmented):
        case = functools.partial(data.without_worker_info, case)  # the loader's own number of workers applies at once
    epochs, points = run(make(case, **options), which)
    for point in points:
        check(epochs, point, hosted(case, num_workers, **options))


SAVED = {"raising map", "shuffled stream"}  # in a sample


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in SAVED else pytest.mark.full) for c in CASES])
def test_saving_changes_nothing(case):
    epochs, _ = undisturbed(case, seeding="worker", persistent_workers=False)
    loader = make(CASES[case])
    assert [list(batches(loader)) for _ in epochs] == epochs


CHAINED = ["augmented", "own generators", "stateful map", "shuffled stream", "stateful stream"]


def chains():
    """A map-style dataset and a stream for a sample, one of them with persistent workers."""
    for number, case in enumerate(CHAINED):
        for persistent, step in itertools.product((False, True), (1, 2, 3, 4, 5, 7)):
            in_sample = number in (0, 3) and persistent == bool(number % 2) and step == 3 + number % 2
            yield pytest.param(case, persistent, step, marks=() if in_sample else pytest.mark.full)


@pytest.mark.parametrize(("case", "persistent", "step"), list(chains()))
def test_a_chain_of_resumed_runs_is_the_undisturbed_run(case, persistent, step):
    """Each link gives `step` batches, over the ends of epochs, and hands its state to the next one."""
    epochs, _ = undisturbed(case, seeding="worker", persistent_workers=persistent)
    expected = [batch for epoch in epochs for batch in epoch]
    found, saved = [], save(make(CASES[case], persistent_workers=persistent))
    for seed in itertools.islice(itertools.cycle([2, 1, 3]), len(expected) // step):
        processes = data.WORKERS if persistent else seed  # fewer would not go on in the next epoch
        loader = hosted(CASES[case], processes, seed=seed, persistent_workers=persistent)
        loader.load_state_dict(read(saved))
        found += itertools.islice(endless(loader), step)
        saved = save(loader)
    assert found == expected[: len(found)]
    assert len(found) > len(expected) - step


def walks():
    """One for a sample."""
    for seed in range(5):
        for number, case in enumerate(CASES):
            in_sample = number == 5 and seed == 1
            yield pytest.param(case, seed, marks=() if in_sample else pytest.mark.full)


@pytest.mark.parametrize(("case", "seed"), list(walks()))
def test_random_walks(case, seed):
    """Forward, back to any state that was saved on the way, in other numbers of processes: always the same batches."""
    chance = random.Random(seed)
    options = {"persistent_workers": chance.random() < 0.5}
    epochs, _ = undisturbed(case, seeding="worker", **options)
    expected = [batch for epoch in epochs for batch in epoch]
    loader = make(CASES[case], **options)
    stream, place, saved = endless(loader), 0, {0: save(loader)}
    for _ in range(25):
        match chance.choice(["take", "take", "save", "load"]):
            case "take":
                count = min(chance.randrange(1, 7), len(expected) - place)
                assert list(itertools.islice(stream, count)) == expected[place : place + count]
                place += count
            case "save":
                saved[place] = save(loader)
            case "load":
                place = chance.choice(list(saved))
                if chance.random() < 0.7:
                    processes = data.WORKERS if options["persistent_workers"] else chance.choice([1, 2, 3])
                    loader = hosted(CASES[case], processes, **options)
                loader.load_state_dict(read(saved[place]))
                stream = endless(loader)
    assert len(saved) > 1


# ---- late positions: a dataset takes over what it has loaded when it is asked for its first sample

LATE = ["late stream", "late stream that keeps its end", "stateful stream", "late map"]


def played(loader, moves, interrupted=None):
    """What comes of moves: so many batches are taken, or an epoch is broken off (0), or taken to its end (None).

    Args:
        loader: of the moves.
        moves: over several epochs.
        interrupted: before each batch and each move, what gives the loader and the iterator with which it goes on.
    """
    found, iterator = [], None
    for count in moves:
        if interrupted is not None:
            loader, iterator = interrupted(loader, iterator)
        if iterator is None:
            iterator = iter(loader)
        if count == 0:
            iterator = iter(loader)
        found.append([])
        while count is None or len(found[-1]) < count:
            try:
                found[-1].append(plain(next(iterator)))
            except StopIteration:
                iterator = None
                break
            if interrupted is not None:
                loader, iterator = interrupted(loader, iterator)
            if iterator is None:
                iterator = iter(loader)
    return found


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
@pytest.mark.parametrize("case", LATE)
def test_random_interruptions_of_persistent_workers(case, seed):
    """Epochs are broken off, states saved and loaded, several in a row, and workers killed, all at any moment."""
    chance = random.Random(seed)
    moves = [chance.choice([0, 0, 1, 3, None]) for _ in range(8)]
    options = {
        "num_workers": chance.choice([1, 2]),
        "prefetch_factor": 2,
        "workers": "fork",
        "persistent_workers": True,
    }

    def interrupted(loader, iterator):
        while chance.random() < 0.3:
            what = chance.choice(["save", "load", "kill"])
            if what == "kill" and iterator is not None:
                host = iterator._fleet.workers[0].host
                if not host.lost and host.address is not None:
                    with contextlib.suppress(ProcessLookupError):  # it was killed before, and nobody knows it yet
                        kill_worker(iterator)
            elif what != "kill":
                saved = save(loader)
                if what == "load":
                    loader, iterator = make(CASES[case], **{**options, "seed": 2}), None
                    loader.load_state_dict(read(saved))
        return loader, iterator

    expected = played(make(CASES[case], **options), moves)
    assert played(make(CASES[case], **options), moves, interrupted) == expected


@pytest.mark.parametrize(
    ("case", "taken"), [("late stream", 0), ("late stream", 1), ("late stream", 3), ("stateful stream", 0)]
)
def test_a_state_of_the_epoch_after_one_that_was_broken_off(case, taken):
    options = {"num_workers": 1, "workers": "fork", "persistent_workers": True, "batch_size": 1}
    loader = make(CASES[case], **options)
    next(iter(loader))
    iterator = batches(iter(loader))
    found = list(itertools.islice(iterator, taken))
    saved = save(loader)
    rest = list(iterator)
    assert resumed(make(CASES[case], seed=2, **options), saved)[0] == rest
    if case == "late stream":
        assert [batch[1] for batch in found + rest] == [[number] for number in range(1, 5)]


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", LATE)
def test_a_state_that_is_saved_before_the_first_batch_is_the_loaded_one(case, num_workers, taken):
    options = {"num_workers": num_workers, **({"workers": "fork"} if num_workers else {})}
    loader = make(CASES[case], **options)
    iterator = batches(loader)
    for _ in range(taken):
        next(iterator)
    saved = save(loader)
    rest = list(iterator)
    for _ in range(2):
        loader = make(CASES[case], seed=2, **options)
        loader.load_state_dict(read(saved))
        assert plain(loader.state_dict()) == plain(read(saved))
        iter(loader)
        saved = save(loader)
    assert resumed(make(CASES[case], seed=3, **options), saved)[0] == rest


def test_without_workers_a_state_from_before_the_first_batch_after_a_break_is_warned_of():
    loader = make(CASES["late stream"], 0)
    next(iter(loader))
    iterator = iter(loader)
    with pytest.warns(UserWarning, match="broken off"):
        loader.state_dict()
    next(iterator)
    loader.state_dict()


# ---- where in a run


LONG = {
    "map": lambda: {"dataset": data.Augmented(90)},
    "stream": lambda: {"dataset": Stream(lambda worker: ([worker, *data.noise()] for _ in range(45)))},
}


@pytest.mark.parametrize(
    "which",
    [
        pytest.param(slice(4, None, 25), id="some"),
        pytest.param(slice(None, None, 3), id="third", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", LONG)
def test_with_many_tasks_under_way(name, num_workers, which):
    def arguments():
        return {**LONG[name](), "prefetch_factor": 15}

    epochs, points = run(make(arguments, 2), which)
    for point in points:
        check(epochs, point, hosted(arguments, num_workers, of=2))


def test_batches_that_were_built_and_not_taken_do_not_count(tmp_path):
    mail = Mail(tmp_path / "mail")

    def get(index):
        mail.send(index)
        return [index, *data.noise()]

    def arguments():
        return {"dataset": Calls(get, 24), "batch_size": 1, "prefetch_factor": 5}

    loader = make(arguments, 2)
    iterator = batches(loader)
    found = [next(iterator) for _ in range(2)]
    mail.receive(10)  # all that was asked for by iter()
    saved = save(loader)
    rest = list(iterator)
    assert resumed(make(arguments, 1, seed=2), saved)[0] == rest
    assert len(found + rest) == 24
    mail.close()


@pytest.mark.parametrize(
    ("case", "persistent"),
    [
        ("augmented", True),
        pytest.param("shuffled stream", False, marks=pytest.mark.full),
        pytest.param("stateful stream", True, marks=pytest.mark.full),
        pytest.param("augmented", False, marks=pytest.mark.full),
        pytest.param("shuffled stream", True, marks=pytest.mark.full),
        pytest.param("stateful stream", False, marks=pytest.mark.full),
    ],
)
def test_epochs_that_were_broken_off(case, persistent):
    """Also when the state is taken after `break`, with no iterator left."""

    def start():
        loader = make(CASES[case], persistent_workers=persistent)
        for taken, _ in enumerate(loader, 1):
            if taken == 2:
                break
        return loader

    loader = start()
    after_break = save(loader)
    iterator = batches(loader)
    found = [next(iterator) for _ in range(3)]
    in_the_next = save(loader)
    epochs = [found + list(iterator), list(batches(loader))]

    processes = data.WORKERS if persistent else 2
    assert resumed(hosted(CASES[case], processes, persistent_workers=persistent), in_the_next) == [
        epochs[0][3:],
        epochs[1],
    ]
    undisturbed_epochs, _ = undisturbed(case, seeding="worker", persistent_workers=persistent)
    resumed_epochs = resumed(hosted(CASES[case], processes, persistent_workers=persistent), after_break)
    assert resumed_epochs == [undisturbed_epochs[0][2:], undisturbed_epochs[1]]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_goes_back_to_a_state_of_its_own(persistent):
    loader = make(CASES["augmented"], persistent_workers=persistent)
    iterator = batches(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    following = list(batches(loader))
    for _ in range(2):
        loader.load_state_dict(state)
        assert [list(batches(loader)), list(batches(loader))] == [rest, following]


@pytest.mark.parametrize("persistent", [False, True])
def test_loading_acts_on_the_next_iter_and_leaves_a_live_iterator_alone(persistent):
    epochs, points = undisturbed("augmented", seeding="worker", persistent_workers=persistent)
    point = next(point for point in points if point[1:] == (1, 3))
    loader = make(CASES["augmented"], persistent_workers=persistent)
    iterator = batches(loader)
    found = [next(iterator), next(iterator)]
    loader.load_state_dict(read(point.saved))
    assert plain(loader.state_dict()) == plain(read(point.saved))
    assert found + list(iterator) == epochs[0]
    assert [list(batches(loader)), list(batches(loader))] == [epochs[1][3:], epochs[2]]


def test_between_load_and_iter_a_loader_has_the_loaded_state():
    epochs, points = undisturbed("augmented", seeding="worker", persistent_workers=False)
    for point in points[::5]:
        first, second = (hosted(CASES["augmented"], 2, seed=seed) for seed in (2, 3))
        first.load_state_dict(read(points[0].saved))
        first.load_state_dict(read(point.saved))  # the last one counts
        assert plain(first.state_dict()) == plain(read(point.saved))
        check(epochs, point._replace(saved=save(first)), second)


def test_a_state_is_not_changed_by_what_comes_after_it():
    loader = make(CASES["stateful stream"])
    iterator = batches(loader)
    next(iterator)
    state = loader.state_dict()
    before = plain(state)
    rest = list(iterator)
    loader.load_state_dict(state)
    assert list(batches(loader)) == rest
    assert plain(state) == before


def test_at_the_last_batch_nothing_is_left_once():
    epochs, points = undisturbed("augmented", seeding="worker", persistent_workers=False)
    last = next(point for point in points if point[1:] == (0, len(epochs[0])))
    loader = hosted(CASES["augmented"], 2)
    loader.load_state_dict(read(last.saved))
    assert [list(batches(loader)) for _ in range(3)] == [[], *epochs[1:]]


@pytest.mark.parametrize("seeding", SEEDINGS)
def test_at_the_last_batch_the_next_epoch_goes_on_from_behind_it(seeding):
    """What the workers build again to get there is built although nobody waits for it."""
    options = {"seeding": seeding, "persistent_workers": True}
    loader = make(CASES["own generators"], 1, **options)
    iterator = batches(loader)
    for _ in range(8):
        next(iterator)
    saved = save(loader)
    assert list(iterator) == []
    following = list(batches(loader))
    assert resumed(make(CASES["own generators"], 1, seed=2, **options), saved) == [[], following]


def test_the_drivers_generator_is_where_it_was():
    """The training loop draws from the generator that the loader draws its seeds and its shuffling from."""

    def steps(loader):
        for batch in endless(loader):
            yield batch, torch.rand(1).item()

    expected = list(itertools.islice(steps(make(CASES["augmented"])), 20))
    loader = make(CASES["augmented"])
    found = list(itertools.islice(steps(loader), 3))
    saved = save(loader)
    loader = hosted(CASES["augmented"], 2)
    loader.load_state_dict(read(saved))
    assert found + list(itertools.islice(steps(loader), 17)) == expected


def test_a_map_style_dataset_is_read_again_from_the_last_snapshot_on(tmp_path):
    """Calls carry one task here, so that each worker's first snapshot is behind its first batch."""
    mail = Mail(tmp_path / "mail")

    def get(index):
        mail.send(index)
        return index

    def arguments():
        return {"dataset": Calls(get, 40), "batch_size": None, "prefetch_factor": 2}

    loader = make(arguments)
    iterator = iter(loader)
    assert [next(iterator) for _ in range(25)] == list(range(25))
    saved = save(loader)
    rest = list(iterator)
    assert sorted(map(int, mail.receive(40))) == list(range(40))
    loader = make(arguments, 2)
    loader.load_state_dict(read(saved))
    assert list(loader) == rest == list(range(25, 40))
    again = [task_id for worker in State.load(read(saved)).position.workers for task_id, _ in worker.to_rebuild]
    assert sorted(map(int, mail.waiting())) == sorted(again + rest)
    assert {22, 23, 24} <= set(again) <= set(range(3, 25))  # of each worker the last one at least, to be compared
    mail.close()


def test_skipped_samples_are_counted_on():
    loader = make(CASES["skipping map"])
    iterator = batches(loader)
    next(iterator), next(iterator)
    saved = save(loader)
    rest = list(iterator)
    assert loader.skipped == 5
    loader = make(CASES["skipping map"], 2, seed=2)
    loader.load_state_dict(read(saved))
    assert list(batches(loader)) == rest
    assert loader.skipped == 5


@pytest.mark.parametrize("arenas", [True, False])
def test_batches_of_a_resumed_run_are_kept_while_it_goes_on(arenas):
    """Memory of batches that were built again and not delivered is given to others."""

    class Images(data.Sized):
        def __getitem__(self, index):
            return torch.rand(50_000) + index

    def arguments():
        return {"dataset": Images(80), "batch_size": 2, "arenas": arenas, "prefetch_factor": 15}

    loader = make(arguments, 2)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(13)]
    saved = save(loader)
    kept += iterator
    loader = make(arguments, 1, seed=2)
    loader.load_state_dict(read(saved))
    resumed_batches = list(loader)
    assert len(resumed_batches) == 27
    assert all(map(torch.equal, resumed_batches, kept[13:]))


@pytest.mark.full
@pytest.mark.parametrize("case", ["augmented", "own generators", "shuffled stream", "stateful stream"])
def test_a_state_saved_after_the_workers_were_lost(case):
    epochs, _ = undisturbed(case, seeding="worker", persistent_workers=False)
    loader = make(CASES[case])
    iterator = batches(loader)
    found = [next(iterator) for _ in range(3)]
    for pid in live_actor_pids():
        os.kill(pid, signal.SIGKILL)
    found += itertools.islice(iterator, 2)
    assert found + resumed(make(CASES[case], 2, seed=2), save(loader))[0] == epochs[0]
    assert list(iterator) == epochs[0][5:]


# ---- state that is the user's


STATEFUL = {
    "map": lambda salt: {"dataset": data.Counting(salt)},
    "stream": lambda salt: {"dataset": data.StatefulStream(salt)},
    "iterator": lambda salt: {"dataset": data.StreamOfStatefulIterators(salt)},
    "sampler's iterator": lambda salt: {
        "dataset": data.Augmented(),
        "sampler": data.SamplerOfStatefulIterators(salt),
        "batch_size": None,
    },
}


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("name", STATEFUL)
def test_state_dicts_are_used_where_there_are_some(name, num_workers):
    loader = make(lambda: STATEFUL[name](salt=3), 2)
    iterator = batches(loader)
    for _ in range(3):
        next(iterator)
    saved = save(loader)
    rest = list(iterator)
    loader = make(lambda: STATEFUL[name](salt=4), num_workers, seed=2)
    loader.load_state_dict(read(saved))
    assert list(batches(loader)) == rest != []


def batches_that_ask():
    dataset = data.ThatAsks()
    return {"dataset": dataset, "batch_sampler": data.BatchSamplerThatAsks(data.SamplerThatAsks(dataset), 3, False)}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("arguments", [lambda: {"dataset": data.StreamThatAsks()}, batches_that_ask])
def test_a_state_dict_that_needs_arguments_counts_as_none(arguments, num_workers):
    loader = make(arguments, num_workers)
    iterator = batches(loader)
    next(iterator), next(iterator)
    saved = save(loader)
    rest = list(iterator)
    loader = make(arguments, num_workers, seed=2)
    loader.load_state_dict(read(saved))
    assert list(batches(loader)) == rest != []


@pytest.mark.parametrize("dataset", [data.Entropy, data.Unseeded])
def test_a_stream_that_cannot_be_replayed_is_an_error_and_never_another_stream(dataset):
    loader = make(lambda: {"dataset": dataset()})
    states = [save(loader) for _ in batches(loader)]
    for saved in states[:-1:3]:
        loader = make(lambda: {"dataset": dataset()}, 2, seed=2)
        loader.load_state_dict(read(saved))
        with pytest.raises(ReplayError):
            list(batches(loader))


def test_a_stream_that_depends_on_how_often_it_was_iterated_over_is_an_error():
    def arguments():
        return {"dataset": data.CountsEpochs(), "persistent_workers": True}

    epochs, points = run(make(arguments, 2))
    assert epochs[0] != epochs[1]
    in_the_first, in_the_second = (next(point for point in points if point[1:] == (e, 3)) for e in (0, 1))
    check(epochs, in_the_first, hosted(arguments, 1, of=2))
    loader = make(arguments, 1, seed=2)
    loader.load_state_dict(read(in_the_second.saved))
    with pytest.raises(ReplayError):
        next(iter(loader))


def test_worker_init_fn_and_collate_fn_go_with_the_workers():
    def init(worker_id):
        torch.manual_seed(worker_id)
        get_worker_info().dataset.tag = worker_id

    class Tagged(data.Indices):
        def __getitem__(self, index):
            return [index, self.tag, *data.noise()]

    def arguments():
        return {
            "dataset": Tagged(),
            "worker_init_fn": init,
            "collate_fn": lambda samples: plain([*samples, torch.rand(1)]),
        }

    epochs, points = run(make(arguments), slice(0, None, 7))
    for point in points:
        check(epochs, point, hosted(arguments, 2))


# ---- other orders of delivery


@pytest.mark.parametrize("num_workers", [1, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 3))])
def test_dynamic_scheduling(num_workers):
    def arguments():
        return {"dataset": data.Indices(90), "shuffle": True, "seeding": "batch", "scheduling": "dynamic"} | {
            "collate_fn": lambda samples: [samples, *data.noise()]
        }

    epochs, points = run(make(arguments), slice(num_workers, None, 15))
    for point in points:
        check(epochs, point, make(arguments, num_workers, seed=2))


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.full)])
def test_without_order_no_sample_is_lost_or_repeated(tmp_path, stream, num_workers):
    """The first batch is held back until others have been taken; then all states are taken."""
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 0:
            gate.wait()
        return [index, get_worker_info().seed]

    def arguments():
        dataset = Stream(lambda worker: map(get, range(worker, 20, 2))) if stream else Calls(get, 20)
        return {"dataset": dataset, "batch_size": 2, "prefetch_factor": 2, "in_order": False}

    def samples(found):
        return sorted(tuple(sample) for indices, seeds in found for sample in zip(indices, seeds, strict=True))

    loader = make(arguments, 2)
    iterator = batches(loader)
    found, saved = [], []
    for _ in range(2):
        found.append(next(iterator))
        saved.append(save(loader))
    gate.open()
    for batch in iterator:
        found.append(batch)
        saved.append(save(loader))
    assert [index for index, _ in samples(found)] == list(range(20))
    for taken, state in enumerate(saved, 1):
        rest, following = resumed(hosted(arguments, num_workers, of=2), state)
        assert [index for index, _ in samples(found[:taken] + rest)] == list(range(20))
        assert [index for index, _ in samples(following)] == list(range(20))
        if stream:
            assert samples(found[:taken] + rest) == samples(found)


UNORDERED = {
    "map": lambda: {"dataset": data.Indices(44), "shuffle": True},
    "persistent map": lambda: {"dataset": data.Indices(44), "shuffle": True, "persistent_workers": True},
    "dynamic": lambda: {"dataset": data.Indices(44), "seeding": "batch", "scheduling": "dynamic"},
    "stream": lambda: {"dataset": Stream(lambda worker: range(worker, 44, data.WORKERS))},
    "persistent stream": lambda: {**UNORDERED["stream"](), "persistent_workers": True},
}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
@pytest.mark.parametrize("name", UNORDERED)
def test_a_chain_of_unordered_runs(name, seed):
    chance = random.Random(seed)
    loader = make(UNORDERED[name], in_order=False)
    for _ in range(3):
        found, resumes = [], True
        while resumes:
            resumes = False
            for batch in loader:
                found += batch.tolist()
                if chance.random() < 0.2:
                    saved, resumes = save(loader), True
                    break
            if resumes:
                loader = hosted(UNORDERED[name], chance.choice([1, 2, 3]), in_order=False)
                loader.load_state_dict(read(saved))
        assert sorted(found) == list(range(44))


class Known(data.Shuffled):
    """A stream that knows how long it is."""

    def __len__(self):
        return sum(map(data.stream_length, range(data.WORKERS)))


@pytest.mark.full
def test_a_length_is_not_taken_for_too_small():
    """Of a length that is too small torch warns; here that would be an error."""

    def arguments():
        return {"dataset": Known(), "batch_size": None}

    loader = make(arguments)
    assert len(loader) == 27
    epochs, points = run(loader)
    for point in points[5::12]:
        loader = hosted(arguments, 2)
        assert len(loader) == 27
        check(epochs, point, loader)
