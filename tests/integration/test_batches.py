"""What a batch is when it arrives: the user's own, writable, as it left the worker. Its kinds: tests/conformance."""

import numpy as np
import pytest
import torch

from probes import load

pytestmark = pytest.mark.usefixtures("ray_session")

INLINE_LIMIT = 100 * 1024  # bytes; what is larger travels through Ray's object store
SIZES = [10, INLINE_LIMIT // 8 + 1, 3_000_000]  # in int64: inline, just over the limit, 24 MB


@pytest.mark.parametrize("size", SIZES)
def test_batches_are_writable_and_private(size):
    def get(index):
        return torch.arange(size) + index, np.arange(size) - index

    kept = []
    for tensor, array in load(get, 4, num_workers=2, persistent_workers=True):
        assert torch.equal(tensor, torch.arange(size) + len(kept))
        assert (array == np.arange(size) - len(kept)).all()
        tensor.neg_()
        array += 1
        kept.append((tensor, array))
    for index, (tensor, array) in enumerate(kept):  # no write showed in another batch, or was undone
        assert torch.equal(tensor, -(torch.arange(size) + index))
        assert (array == np.arange(size) - index + 1).all()


def test_a_kept_batch_outlives_its_loader():
    def get(index):
        return torch.arange(SIZES[-1]) + index

    kept = [next(iter(load(get, 2, num_workers=1))) for _ in range(2)]
    for batch in load(get, 6, num_workers=2):
        batch.fill_(-1)
    assert all(torch.equal(batch, torch.arange(SIZES[-1])) for batch in kept)


def test_small_parts_of_a_batch_do_not_keep_all_of_it():
    big, small = next(iter(load(lambda index: (torch.zeros(1_000_000), torch.ones(2)), 1)))
    assert small.untyped_storage().nbytes() < 1000 < big.untyped_storage().nbytes()


def test_a_batch_may_be_none_or_empty():
    none, empty, nothing = load([None, [], torch.empty(0, 3)].__getitem__, 3, num_workers=1)
    assert (none, empty, nothing.shape) == (None, [], (0, 3))
