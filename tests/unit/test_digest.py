"""The checksum of a batch: equal for equal batches, and different for what a program tells apart."""

import enum

import pytest
import torch

from rayloader.resume.digest import digest, digest_of, of_error

LABELS = [-1, -2, 0, 1, True, False, 0.0, 1.0, None, "a", b"a", 2**61 - 1, 2**70]


class Kind(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("checksum", [digest, digest_of])
def test_equal_batches_have_equal_digests_and_labels_that_hash_alike_have_their_own(checksum):
    """Python's hash of -1 is that of -2, and that of True is 1's."""
    assert len({checksum([torch.ones(2), label]) for label in LABELS}) == len(LABELS)
    for label in (*LABELS, Kind.ONE, 2**200, float("nan")):
        assert checksum([torch.ones(2), label]) == checksum([torch.ones(2), label])


def test_an_exception_in_the_place_of_a_batch_counts_by_its_type():
    assert of_error(ValueError) != of_error(KeyError)
