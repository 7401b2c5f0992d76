"""The same cases through torch's loader and ours: equal in every value, type, stride, error and generator state.

Torch's side runs once, in a process of its own that has no Ray in it (reference.py; conftest.py starts it before the
first test of the session); ours runs here, on warm actors and on forks.
Batches come from actors through Ray's object store in a third of the cases, from actors through arenas, however small
they are, in another, and from forks in the third. A full run takes each case all these ways, and by TCP.
`pytest tests/conformance --against=torch` puts torch's loader in the place of ours, to prove the cases deterministic.
"""

import pytest
import torch.utils.data

from conformance_cases import CASES
from conformance_record import first_difference, record
from conformance_side import ALWAYS, LANES, Records
from rayloader.actors.actors import ActorLine, RayCalls, TcpCalls
from rayloader.workers.forks import ForkCalls
from reference import SPAWNED

FRESH = "noisy-shuffled-w2"  # the case that is also run where it is what starts the workers


@pytest.fixture(scope="session")
def loader_class(request):
    if request.config.getoption("--against") == "torch":
        return torch.utils.data.DataLoader
    request.getfixturevalue("ray_session")
    from rayloader import DataLoader

    return DataLoader


def in_all_ways():
    """Each case in one way, in turn, and in all others in a full run; without workers there is no way."""
    for number, case in enumerate(CASES):
        if case.name.endswith("-w0"):
            yield pytest.param(case, "store", id=case.name, marks=pytest.mark.full if case.full else ())
            continue
        ways = [way for way in ALWAYS if case.actors is not None or way == "fork"]
        for place, lane in enumerate(ways):
            marks = () if number % len(ways) == place and not case.full else pytest.mark.full
            yield pytest.param(case, lane, id=f"{case.name}-{lane}", marks=marks)
        if case.actors is None:
            continue
        yield pytest.param(case, "tcp", id=f"{case.name}-tcp", marks=() if case.name == FRESH else pytest.mark.full)


@pytest.mark.parametrize(("case", "lane"), list(in_all_ways()), indirect=["lane"])
def test_same_as_torch(case, lane, reference, loader_class):
    is_ours = loader_class is not torch.utils.data.DataLoader
    spawned = is_ours and lane != "fork" and case.actors == "spawn"
    expected = reference[SPAWNED.format(case.name) if spawned else case.name]
    difference = first_difference(expected, record(case, loader_class))
    if difference:
        pytest.fail(difference, pytrace=False)


@pytest.mark.parametrize("lane", LANES, indirect=True)
def test_the_lanes_are_those_that_are_named(lane, loader_class, request, monkeypatch):
    used = set()
    for channel in (ActorLine, ForkCalls, RayCalls):  # the first is that of TcpCalls too
        run = channel.run

        def noting(self, *arguments, run=run, **named):
            lent = run(self, *arguments, **named)
            used.add((type(self), lent is not None))
            return lent

        monkeypatch.setattr(channel, "run", noting)
    batches = list(loader_class(torch.arange(40), 2, num_workers=2))
    assert len(batches) == 20
    if request.config.getoption("--against") == "rayloader":
        channels = {
            "arena": {(ActorLine, True)},
            "fork": {(ForkCalls, True)},
            "store": {(RayCalls, False)},
            "tcp": {(TcpCalls, False)},
        }
        assert used == channels[lane]


@pytest.mark.full
@pytest.mark.parametrize("workers", ["ray", "fork"])
@pytest.mark.parametrize("case", [case for case in CASES if case.name == FRESH])
def test_same_as_torch_where_iterating_starts_the_workers(case, workers, reference, tmp_path):
    """Neither importing nor starting Ray may move the user's generators, Python's `random` included; nor a fork."""
    records = Records(tmp_path, "fresh_process.py", workers, FRESH).read()
    difference = first_difference(reference[FRESH], records[FRESH])
    if difference:
        pytest.fail(difference, pytrace=False)


@pytest.mark.parametrize(
    ("way", "method", "step"),
    [("macOS", "fork", 9), ("no memory files", "fork", 31), ("Windows", "spawn", 4), ("no forks", "spawn", 5)],
)
def test_same_as_torch_where_its_own_workers_are_at_work(way, method, step, tmp_path):
    """A sample of the cases; with three workers torch's advice depends on how it counts CPUs."""
    names = [case.name for case in CASES if case.actors == method and not case.full and "-w3" not in case.name][::step]
    assert names
    (tmp_path / "torchs").mkdir()
    torchs = Records(tmp_path / "torchs", "reference.py", *names)
    records, expected = Records(tmp_path, "without_linux.py", way, *names).read(), torchs.read()
    if method == "spawn":
        expected = {name: expected[SPAWNED.format(name)] for name in names}
    differences = {name: first_difference(expected[name], records[name]) for name in names}
    assert not any(differences.values()), differences
