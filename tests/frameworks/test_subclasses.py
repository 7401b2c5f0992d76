"""Under `rayloader.patch()`, classes that derive from torch's loader, and others that make its iterators, get ours.

Stand-ins for what libraries define run in `make test`, the libraries' own in `make test-full`.
"""

import pytest

import rayloader
from inside import has_workers
from rayloader.epoch.iterator import EpochIterator
from subclasses_cases import CASES, REAL, STAND_INS, run

pytestmark = pytest.mark.usefixtures("ray_session")
FULL = [pytest.param(name, marks=(pytest.mark.full, pytest.mark.filterwarnings("default"))) for name in REAL]


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
    if name not in theirs:
        pytest.skip("its package is not installed")
    with rayloader.patch():
        assert run(name) == theirs[name]
    assert made


def test_a_library_can_end_the_workers_of_iterators_that_it_gets_after_the_patch(made):
    with rayloader.patch():
        loader = CASES["endless"]()
    next(iter(loader))
    assert made
    loader.close()
    assert not has_workers(loader.iterator)
    with pytest.raises(rayloader.RayloaderError):
        next(loader.iterator)
