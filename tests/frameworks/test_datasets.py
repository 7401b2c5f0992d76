"""Hugging Face's `datasets`: rows and streams give torch's batches, and a stream's own state leads to the rest."""

import itertools
from pathlib import Path

import pytest

import rayloader
from datasets_cases import CASES, SETTINGS, epoch, make, plain, two_epochs
from framework_data import seed, written_by
from inside import kill_worker

full = pytest.mark.full
pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.filterwarnings("default")]

SAMPLE = {"rows, 2p", "stream, 0"}  # workers import a large package; the collator's is there for `make test-full` only
NAMES = [f"{case}, {setting}" for case, setting in itertools.product(CASES, SETTINGS)]


@pytest.fixture(scope="module")
def theirs(request, tmp_path_factory):
    """What torch's loader gives for the cases of this run, made in a process without Ray: its workers are forks."""
    own = [item for item in request.session.items if item.path == Path(__file__) and "theirs" in item.fixturenames]
    names = {item.callspec.params["name"] for item in own}
    return written_by("datasets_cases.py", tmp_path_factory.mktemp("datasets"), *sorted(names))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else full) for name in NAMES])
def test_batches_are_torchs_in_two_epochs(name, theirs):
    assert two_epochs(rayloader.DataLoader, name) == theirs[name]


@pytest.mark.parametrize("setting", ["0", pytest.param("2", marks=full)])
def test_the_states_of_a_stream_lead_to_the_rest(setting):
    """In either epoch, and between two. Not with a shuffled stream: see the page on datasets."""
    loader = make(rayloader.DataLoader, "stream", setting)
    states, epochs = [], []
    for number in range(2):
        loader.dataset.set_epoch(number)
        taken = [(plain(batch), loader.state_dict()) for batch in loader]
        epochs.append([batch for batch, _ in taken])
        states.append([state for _, state in taken] + [loader.state_dict()])
    for number, count in ((0, 2), (1, 1), (1, 4), (1, len(epochs[1]))):
        again = make(rayloader.DataLoader, "stream", setting)
        again.load_state_dict(states[number][count - 1])
        assert epoch(again, number) == epochs[number][count:], (number, count)
        if number == 0:
            assert epoch(again, 1) == epochs[1]
    again = make(rayloader.DataLoader, "stream", setting)
    again.load_state_dict(states[0][-1])
    assert epoch(again, 1) == epochs[1]


@pytest.mark.parametrize("setting", ["0", *(pytest.param(name, marks=full) for name in ("2", "2p"))])
@pytest.mark.parametrize(
    "case",
    ["stream", "held", *(pytest.param(name, marks=full) for name in ("interleaved", "joined"))],
)
def test_epochs_after_a_resumed_one_are_whole_though_no_epoch_is_told(case, setting):
    """The dataset begins at the position that was loaded into it until the epoch is another."""
    loader = make(rayloader.DataLoader, case, setting)
    states = []
    for _ in range(2):
        iterator = iter(loader)
        states.append(loader.state_dict())
        batches = []
        for batch in iterator:
            batches.append(plain(batch))
            states.append(loader.state_dict())
    for place in (0, 2, len(batches), len(batches) + 1, len(batches) + 3):
        again = make(rayloader.DataLoader, case, setting)
        again.load_state_dict(states[place])
        taken = place % (len(batches) + 1)
        assert [plain(batch) for batch in again] == batches[taken:], place
        assert [plain(batch) for batch in again] == batches, place


@pytest.mark.parametrize("setting", ["0", pytest.param("2p", marks=full)])
def test_a_position_that_the_program_has_loaded_counts_in_each_epoch(setting):
    stream = make(rayloader.DataLoader, "stream", "0").dataset
    iterator = iter(stream)
    next(iterator)
    position = stream.state_dict()
    state, found = None, []
    for resumed in (False, True):
        loader = make(rayloader.DataLoader, "stream", setting)
        loader.dataset.load_state_dict(position)
        if resumed:
            loader.load_state_dict(state)
        iterator = iter(loader)
        first = [] if resumed else [plain(next(iterator))]
        state = loader.state_dict() if state is None else state
        found.append(first + [plain(batch) for batch in iterator])
        found.append([plain(batch) for batch in loader])
    whole, second, rest, after = found
    assert second == after == whole
    assert rest == whole[1:]
    assert whole != [plain(batch) for batch in make(rayloader.DataLoader, "stream", setting)]


@pytest.mark.parametrize("setting", ["0", pytest.param("2p", marks=full)])
def test_the_epoch_after_a_resumed_one_is_whole_if_the_state_is_passed_on_late(setting):
    loader = make(rayloader.DataLoader, "held, passed on late", setting)
    iterator = iter(loader)
    batches = [plain(next(iterator)) for _ in range(4)]
    state = loader.state_dict()
    batches += [plain(batch) for batch in iterator]
    again = make(rayloader.DataLoader, "held, passed on late", setting)
    again.load_state_dict(state)
    assert [plain(batch) for batch in again] == batches[4:]
    assert [plain(batch) for batch in again] == batches


@full
def test_the_position_at_which_the_program_has_left_a_dataset_is_not_that_of_its_workers():
    """It has looked at the first samples, or a loader without workers has gone on in the middle of an epoch."""
    whole = [plain(batch) for batch in make(rayloader.DataLoader, "stream", "2")]
    looked_at = make(rayloader.DataLoader, "stream", "2")
    next(iter(looked_at.dataset))
    iterator = iter(looked_at)
    state = looked_at.state_dict()
    assert [plain(batch) for batch in iterator] == whole
    looked_at.load_state_dict(state)
    assert [plain(batch) for batch in looked_at] == whole
    before = make(rayloader.DataLoader, "stream", "0")
    next(iter(before))
    after = make(rayloader.DataLoader, "stream", "0")
    after.load_state_dict(before.state_dict())
    list(after)
    seed(1)
    again = rayloader.DataLoader(after.dataset, batch_size=3, num_workers=2)
    assert [plain(batch) for batch in again] == whole


@pytest.mark.parametrize(
    "case",
    ["held", *(pytest.param(name, marks=full) for name in ("held, passed on late", "stream", "interleaved", "joined"))],
)
def test_epochs_in_which_workers_are_killed_are_whole_though_no_epoch_is_told(case):
    expected = [plain(batch) for batch in make(rayloader.DataLoader, case, "2p")]
    loader = make(rayloader.DataLoader, case, "2p")
    for number in range(4):
        iterator = iter(loader)
        found = [plain(next(iterator)) for _ in range(3)]
        if number % 3 == 0:  # the ones in between are whole too
            kill_worker(iterator, number % 2)
        assert found + [plain(batch) for batch in iterator] == expected, number
