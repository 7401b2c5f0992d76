"""Replicas on nodes that the driver is not on: one image a node, and errors that name what is missing there."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from inside import image_files
from multinode_data import AWAY, as_is, origin
from rayloader import DataLoader, ReplicaError

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("warm")]

TOTAL = 299_999 * 150_000


class Holds:
    """Each of two workers is asked once: sample i is what `function(data)` returns in worker i."""

    def __init__(self, data, function):
        self.data, self.function = data, function

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.function(self.data)


def holding(data, function, where=AWAY):
    return DataLoader(Holds(data, function), None, num_workers=2, collate_fn=as_is, ray_remote_args=where)


def look(data):
    """The sum, the node, the process, and the names of the images that it has mapped."""
    names = re.findall(r"rayloader-image-\w+", Path("/proc/self/maps").read_text())
    return int(data.sum()), *origin(), frozenset(names)


def test_two_workers_of_another_node_share_one_image(nodes):
    loader = holding(np.arange(300_000), look)
    totals, places, pids, images = map(set, zip(*loader, strict=True))
    assert (totals, places, len(pids)) == ({TOTAL}, {nodes.away}, 2)
    (names,) = images
    assert len(names) == 1
    assert names.isdisjoint(image_files()), "the driver's image was opened from another node"
    assert {seen[-1] for seen in loader} == images, "it was shipped a second time"
    loader.dataset.data[0] = 1
    assert {(total, names in images) for total, *_, names in loader} == {(TOTAL + 1, False)}


def test_shared_memory_does_not_reach_another_node():
    with pytest.raises(ReplicaError, match=r"/dev/shm/torch_.*can't be opened on node.*another node.*clone"):
        list(holding(torch.zeros(1000).share_memory_(), look))
