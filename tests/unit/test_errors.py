"""Our errors are made, copied, pickled and raised again as other exceptions are."""

import copy
import pickle

import pytest
from torch._utils import ExceptionWrapper

import rayloader
from rayloader.errors import add_note, own_notes

ERRORS = [getattr(rayloader, name) for name in rayloader.__all__ if name.endswith("Error")]


def made(kind: type[Exception]) -> Exception:
    """An error as it is raised: with a note, and with its worker."""
    error = kind("what happened", 3) if kind is rayloader.WorkerDiedError else kind("what happened")  # type: ignore[call-arg]
    add_note(error, "and where")
    return error


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_has_text_and_attributes(kind, again):
    error = again(made(kind))
    assert (type(error), str(error), error.__notes__) == (kind, "what happened", ["and where"])
    assert getattr(error, "worker_id", 3) == 3


def test_our_notes_come_before_those_of_pickle_and_in_their_order():
    error = TypeError("cannot pickle")
    error.__notes__ = ["of the user's", "when serializing dict item 'a'", "when serializing list item 0"]
    add_note(error, "culprit")
    add_note(error, "remedy")
    assert error.__notes__[:3] == own_notes(error) == ["of the user's", "culprit", "remedy"]
    assert len(error.__notes__) == 5


@pytest.mark.parametrize("kind", ERRORS)
def test_torchs_wrapper_raises_it_again(kind):
    """As of a worker of torch's loader whose dataset has one of our loaders."""
    try:
        raise made(kind)
    except kind:
        wrapper = ExceptionWrapper(where="in a worker")
    with pytest.raises(kind, match=f"^Caught {kind.__name__} in a worker") as caught:
        wrapper.reraise()
    assert type(caught.value) is kind
    assert getattr(caught.value, "worker_id", None) is None
