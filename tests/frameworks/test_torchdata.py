"""torchdata's StatefulDataLoader: where its import is changed to rayloader's DataLoader, the program stays as it is."""

import contextlib
from pathlib import Path

import pytest
from torch.utils.data import SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import rayloader
from framework_data import Numbers, written_by
from torchdata_cases import NUM_WORKERS, STATES, TURNS, Squares, run, settings

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # which its constructor calls
]


# What `make test` runs: without workers it takes no time, and with them the chief cases.
CHIEF = {"states, stream with a state, 2", "turns, sample, 2"}
# Where torchdata's loader does not lead back to its own batches, by case.
LOST = {
    "drawn": {"after 8", "loaded twice"},  # the generator of torch's own sampler is not restored
    "drawn with replacement": {"loaded twice"},
    "its own distributed sampler": {"after 5"},  # without workers, the epoch after one that has ended is empty
    "sampler with a state": {"after 6"},  # with workers, it is the end of the one before
}
# The order of this one is another: it draws when it is asked for its iterator, and torchdata's loader asks it twice.
ASKED_TWICE = "states, its own random sampler, 2"


def sample(names):
    return [
        pytest.param(name, marks=() if name in CHIEF or name.endswith(", 0") else pytest.mark.full) for name in names
    ]


@pytest.fixture(scope="module")
def theirs(request, tmp_path_factory):
    """What torchdata's loader gives for the cases of this run, in a process without Ray: its workers are forks."""
    own = [item for item in request.session.items if item.path == Path(__file__) and "theirs" in item.fixturenames]
    names = {item.callspec.params["name"] for item in own}
    return written_by("torchdata_cases.py", tmp_path_factory.mktemp("torchdata"), *sorted(names))


@pytest.mark.parametrize("name", sample(STATES))
def test_states_lead_to_the_same_batches(name, theirs):
    """And to those that followed in our own loader, also where torchdata's loses its place."""
    found, expected = run(rayloader.DataLoader, name), theirs[name]
    first, second = found["first"], found["second"]
    for taken in range(len(first) + 1):
        assert found.get(f"after {taken}") in ([first[taken:], second], None)
    assert found.get(f"after {len(first) + 1}", [second])[0] == second
    assert found["loaded twice"] == first[1:]
    if name == ASKED_TWICE:
        assert expected["first"] == second
    else:
        differs = {what for what in expected if found[what] != expected[what]}
        assert differs <= LOST.get(settings(name)[0], set()), (found, expected)
    assert run(rayloader.DataLoader, name, steps=4) == found


WRONG = {
    "workers": ({"num_workers": -1}, Squares),
    "timeout": ({"timeout": -1}, Squares),
    "depth without workers": ({"prefetch_factor": 2}, Squares),
    "persistent without workers": ({"persistent_workers": True}, Squares),
    "sampler and shuffle": ({"sampler": range(3), "shuffle": True}, Squares),
    "batch sampler and size": ({"batch_sampler": [[1]], "batch_size": 2}, Squares),
    "drop_last without batches": ({"batch_size": None, "drop_last": True}, Squares),
    "shuffled stream": ({"shuffle": True}, Numbers),
    "sampled stream": ({"sampler": range(3)}, Numbers),
    "unknown": ({"snapshot_every_steps": 1}, Squares),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_the_same_errors(case):
    arguments, dataset_class = WRONG[case]
    types = []
    for loader_class in (StatefulDataLoader, rayloader.DataLoader):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            loader_class(dataset_class(), **arguments)
        types.append(caught.type)
    assert types[0] is types[1]


@pytest.mark.parametrize("name", sample(TURNS))
def test_what_is_raised_arrives_in_its_turn(name, theirs):
    """A worker of torchdata's whose sample raised has an AssertionError for its next batch."""
    found, expected = run(rayloader.DataLoader, name), theirs[name]
    lost = [turn for turn, what in enumerate(expected) if what == "AssertionError"]
    assert len(lost) <= (name.endswith(", 2") and "ZeroDivisionError" in expected)
    for turn in lost:
        expected[turn] = found[turn]
        assert isinstance(found[turn], (list, int))
    assert found == expected


@pytest.mark.parametrize("steps", [0, None])
def test_that_no_worker_is_to_send_its_state_has_no_effect(steps):
    """In torchdata's loader too, a loader that goes on from a state gives the rest."""
    for loader_class in (StatefulDataLoader, rayloader.DataLoader):
        loader = loader_class(Squares(), 2, snapshot_every_n_steps=steps)
        iterator = iter(loader)
        next(iterator)
        state, rest = loader.state_dict(), list(map(str, iterator))
        loader = loader_class(Squares(), 2, snapshot_every_n_steps=steps)
        loader.load_state_dict(state)
        assert list(map(str, loader)) == rest


def test_a_state_of_its_own_is_refused():
    state = StatefulDataLoader(Squares()).state_dict()
    with pytest.raises(rayloader.StateError, match="but of torchdata's StatefulDataLoader"):
        rayloader.DataLoader(Squares()).load_state_dict(state)


@pytest.mark.parametrize(("state", "kind"), [(3, TypeError), ({"a": 1}, AssertionError)])
def test_what_is_no_state_is_refused_where_it_is_loaded(state, kind):
    """The other class refuses it later, in `iter()`."""
    loader = StatefulDataLoader(Squares())
    loader.load_state_dict(state)
    with pytest.raises(kind):
        iter(loader)
    with pytest.raises(rayloader.StateError, match="not a state of a rayloader"):
        rayloader.DataLoader(Squares()).load_state_dict(state)


class Asked(SequentialSampler):
    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


@pytest.mark.parametrize("num_workers", NUM_WORKERS)
def test_a_sampler_is_asked_for_its_iterator_once_an_epoch(num_workers):
    """As torch's loader does. torchdata's asks it twice for the first epoch, with workers."""
    sampler = Asked(range(20))
    loader = rayloader.DataLoader(Squares(), 3, sampler=sampler, num_workers=num_workers)
    for times in (1, 2):
        assert len(list(loader)) == 7
        assert sampler.times == times


def fail(worker_id):
    raise LookupError(f"worker {worker_id}")


@pytest.mark.parametrize("patched", [False, True])
def test_a_worker_that_fails_to_start_is_told_of_in_its_batches_turns(patched):
    """As by torch's loader; torchdata's waits in `iter()` for all workers, and raises there."""
    with rayloader.patch() if patched else contextlib.nullcontext():
        loader = (StatefulDataLoader if patched else rayloader.DataLoader)(
            Squares(), 8, num_workers=2, worker_init_fn=fail
        )
    assert isinstance(loader, rayloader.DataLoader)
    iterator = iter(loader)
    for worker in (0, 1):
        with pytest.raises(LookupError, match=f"worker {worker}"):
            next(iterator)
