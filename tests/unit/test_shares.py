"""What `share` and `shared` refuse: no Ray."""

import pytest
from torch.utils.data import ChainDataset

from rayloader import DataLoader, share, shared


@pytest.mark.parametrize(
    ("options", "kind", "error"),
    [
        ({"consumers": 0}, ValueError, "consumers must be a whole number >= 1, got 0"),
        ({"consumers": 1.5}, TypeError, "consumers must be a whole number >= 1, got 1.5"),
        ({"consumers": 1, "buffer": 0}, ValueError, "buffer must be a whole number >= 1, got 0"),
        ({"consumers": 1, "name": ""}, TypeError, "name must be a text"),
        ({"loader": range(3), "consumers": 1}, TypeError, r"takes a rayloader\.DataLoader, got range;"),
    ],
)
def test_arguments_are_checked(options, kind, error):
    with pytest.raises(kind, match=error):
        share(**{"loader": DataLoader(range(3)), **options})
    with pytest.raises(TypeError, match="name must be a text"):
        shared("", 0)


def test_a_stream_of_a_rank_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match="needs num_replicas and rank"):
        share(DataLoader(ChainDataset([])), consumers=1)
