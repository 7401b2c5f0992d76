"""Hugging Face's `datasets`: rows and streams give torch's batches, and a stream's own state leads to the rest."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rayloader
from datasets_cases import CASES, SETTINGS, epoch, make, plain, two_epochs

full = pytest.mark.full
pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.filterwarnings("default")]

HANG_LIMIT = 300  # seconds; on expiry subprocess.run kills the process and raises
SAMPLE = {"rows, 2p", "stream, 0"}  # workers import a large package; the collator's is there for `make test-full` only
NAMES = [f"{case}, {setting}" for case, setting in itertools.product(CASES, SETTINGS)]


@pytest.fixture(scope="module")
def theirs(request, tmp_path_factory):
    """What torch's loader gives for the cases of this run, made in a process without Ray: its workers are forks."""
    own = [item for item in request.session.items if item.path == Path(__file__) and "theirs" in item.fixturenames]
    names = {item.callspec.params["name"] for item in own}
    out = tmp_path_factory.mktemp("datasets") / "cases.json"
    script = Path(__file__).with_name("datasets_cases.py")
    subprocess.run([sys.executable, script, out, *sorted(names)], check=True, timeout=HANG_LIMIT)
    return json.loads(out.read_text())


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
