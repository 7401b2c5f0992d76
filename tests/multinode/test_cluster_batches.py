"""What comes from another node: copied ahead into memory that is used again, and never more of it than was agreed."""

import gc
import threading

import pytest
import torch

from multinode_data import AWAY, Calls, as_is
from multinode_waiting import wait_until
from rayloader import DataLoader
from rayloader.transport.lanes import SMALL_BYTES

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("warm")]

MB = 1 << 20
LENGTH = 60


def sample(index):
    """Every third is small, and every seventh an error."""
    if index % 7 == 3:
        raise LookupError(f"no sample {index}")
    numbers = 8 if index % 3 == 0 else 4 * SMALL_BYTES + index
    return {
        "image": torch.full((numbers,), index),
        "array": torch.full((SMALL_BYTES + index,), index % 128, dtype=torch.int8).numpy(),
        "labels": torch.tensor([index, -index]),
        "name": f"sample {index}",
    }


def is_sample(batch, index, plus=0):
    expected = sample(index)
    return (
        torch.equal(batch["image"], expected["image"] + plus)
        and (batch["array"] == expected["array"]).all()
        and torch.equal(batch["labels"], expected["labels"])
        and batch["name"] == expected["name"]
    )


def load(function, length, **options):
    options = {"num_workers": 2, "collate_fn": as_is, "ray_remote_args": AWAY, **options}
    return DataLoader(Calls(function, length), None, **options)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]


def test_small_batches_need_no_thread_until_a_large_one_comes():
    iterator = iter(load(lambda index: torch.full((8 if index < 100 else MB,), index), 120, prefetch_factor=2))
    assert [int(next(iterator)[0]) for _ in range(90)] == list(range(90))
    assert threads() == []
    assert [int(next(iterator)[-1]) for _ in range(20)] == list(range(90, 110))
    assert len(threads()) == 1
    assert len(list(iterator)) == 10
    assert threads() == []


@pytest.mark.parametrize("depth", [None, 3])
def test_batches_of_every_kind_come_as_they_were_whatever_is_kept(depth):
    loader = load(sample, LENGTH, prefetch_factor=depth, persistent_workers=True)
    for _ in range(2):
        iterator, kept = iter(loader), {}
        for index in range(LENGTH):
            if index % 7 == 3:
                with pytest.raises(LookupError, match=f"no sample {index}"):
                    next(iterator)
                continue
            batch = next(iterator)
            assert is_sample(batch, index)
            batch["image"].add_(1)  # a read-only page would end this process
            batch["array"][0] = batch["array"][0]
            if index % 2:
                kept[index] = batch
            assert all(is_sample(batch, number, plus=1) for number, batch in kept.items())
        with pytest.raises(StopIteration):
            next(iterator)
        assert len(threads()) == 1
    assert all(is_sample(batch, number, plus=1) for number, batch in kept.items())


def test_breaking_off_while_batches_are_under_way_leaves_no_thread():
    iterator = iter(load(lambda index: torch.full((MB,), index), LENGTH))
    kept = [next(iterator) for _ in range(3)]
    assert len(threads()) == 1
    del iterator
    gc.collect()
    wait_until(lambda: not threads(), "the thread has ended")
    assert [int(batch.unique()) for batch in kept] == [0, 1, 2]
