"""What `share` and `shared` refuse: no Ray."""

import pytest
from torch.utils.data import IterableDataset

from rayloader import DataLoader, share, shared


@pytest.mark.parametrize(
    ("options", "kind", "error"),
    [
        ({"consumers": 0}, ValueError, "consumers must be a whole number >= 1, got 0"),
        ({"consumers": 1.5}, TypeError, "consumers must be a whole number >= 1, got 1.5"),
        ({"consumers": 1, "buffer": 0}, ValueError, "buffer must be a whole number >= 1, got 0"),
    ],
)
def test_arguments_are_checked(options, kind, error):
    with pytest.raises(kind, match=error):
        share(DataLoader(range(3)), **options)


def test_what_is_no_loader_and_no_name_is_refused():
    with pytest.raises(TypeError, match=r"takes a rayloader\.DataLoader, got range;"):
        share(range(3), consumers=1)
    with pytest.raises(TypeError, match="name must be a text"):
        share(DataLoader(range(3)), consumers=1, name="")
    with pytest.raises(TypeError, match="name must be a text"):
        shared("", 0)


def test_a_stream_of_a_rank_that_nobody_knows_is_refused(monkeypatch):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match="needs num_replicas and rank"):
        share(DataLoader(Stream()), consumers=1)
