"""Under `rayloader.patch()`, classes that derive from torch's loader, and others that make its iterators, get ours.

Stand-ins for what libraries define run in `make test`, the libraries' own in `make test-full`.
"""

import importlib.util
from pathlib import Path

import pytest

import rayloader
from framework_data import written_by
from inside import has_workers
from rayloader.epoch.iterator import EpochIterator
from subclass_cases import CASES, REAL, STAND_INS, Endless, run

pytestmark = pytest.mark.usefixtures("ray_session")
FULL = [pytest.param(name, marks=(pytest.mark.full, pytest.mark.filterwarnings("default"))) for name in REAL]
PACKAGES = {name: name.split(",")[0] for name in REAL}


@pytest.fixture(scope="module")
def theirs(request, tmp_path_factory):
    """What torch's iterators give for the cases of this run."""
    own = [item for item in request.session.items if item.path == Path(__file__) and "theirs" in item.fixturenames]
    names = {item.callspec.params["name"] for item in own} - missing()
    return written_by("subclass_cases.py", tmp_path_factory.mktemp("subclasses"), *sorted(names))


def missing():
    return {name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is None}


@pytest.fixture
def made(monkeypatch):
    """The iterators of ours that are made."""
    found = []
    begin = EpochIterator.__init__

    def noted(iterator, *arguments):
        found.append(type(iterator))
        begin(iterator, *arguments)

    monkeypatch.setattr(EpochIterator, "__init__", noted)
    return found


@pytest.mark.parametrize("name", [*STAND_INS, *FULL])
def test_batches_are_those_of_torchs_iterators(name, theirs, made):
    if name in missing():
        pytest.skip(f"{PACKAGES[name]} is not installed")
    with rayloader.patch():
        assert run(name) == theirs[name]
    assert made


def test_a_loader_made_under_a_patch_gets_our_iterators_afterwards_too(made):
    with rayloader.patch():
        loader = CASES["collated"]()
    for _ in range(2):
        assert len(list(loader)) == 6
    assert made == [EpochIterator] * 2


def test_a_library_can_end_its_iterators_workers(made):
    with rayloader.patch():
        loader = CASES["endless"]()
    assert isinstance(loader, Endless)
    next(iter(loader))
    loader.close()
    assert not has_workers(loader.iterator)
    with pytest.raises(rayloader.RayloaderError):
        next(loader.iterator)
