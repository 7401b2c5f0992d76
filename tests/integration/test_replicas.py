"""The dataset in real workers: what they share with each other, what with the driver, and what is their own."""

import functools
import gc
import os
import random
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from inside import image_files
from probes import as_is, load
from rayloader.actors.actor import Actor, RayAnswer
from rayloader.actors.pool import get_pool

pytestmark = pytest.mark.usefixtures("ray_session")

MIB = 1 << 20


def ask(data, function, index):
    return function(data)


def holding(data, function, num_workers=2, **options):
    """Each worker is asked once: what `function(data)` returns there."""
    return load(functools.partial(ask, data, function), num_workers, workers="ray", **options)


def image_memory(_):
    """KiB of this process's mappings of images, of them its own; and the names of the files."""
    resident, own, names = 0, 0, set()
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if found := re.search(r"rayloader-image-\w+", block.splitlines()[0]):
            names.add(found[0])
            resident += int(re.search(r"^Rss: +(\d+)", block, re.MULTILINE)[1])
            own += int(re.search(r"^Anonymous: +(\d+)", block, re.MULTILINE)[1])
    return resident, own, names


# ---- private memory: one copy for all, writes the worker's own


def test_workers_share_one_copy_and_writes_are_their_own():
    data = torch.zeros(8 * MIB, dtype=torch.uint8)

    def touch(data):
        assert not data.any()  # touches every page
        before = image_memory(None)
        data[:MIB] += 1
        return before, image_memory(None), int(data.sum())

    one, other = holding(data, touch)
    assert not data.any()
    assert one[0][2] == other[0][2]
    assert len(one[0][2]) == 1
    for before, after, total in (one, other):
        assert before[0] >= 8 * 1024
        assert before[1] <= 16  # the skeleton's page at most
        assert 1024 <= after[1] <= 1024 + 16
        assert total == MIB


random_of_this_module = random.Random(0)


def draws_from_its_module():
    return lambda _: random_of_this_module.random()


def test_a_function_that_travels_with_a_generator_of_its_module_is_warned_of():
    function = draws_from_its_module()
    with pytest.warns(
        UserWarning, match=r"copy of the random generator random_of_this_module for test_replicas\.draws"
    ):
        assert len(list(holding([1], function))) == 2


# ---- from epoch to epoch


def test_images_go_with_their_loaders():
    def images():
        gc.collect()
        get_pool().wait()
        return image_files()

    before = images()
    loader = holding(np.zeros(1000), as_is, 1, fresh_processes=True)
    assert len(list(loader)) == 1
    (name,) = images() - before
    list(loader)
    assert images() - before == {name}, "an unchanged dataset was written again"
    iterator = iter(loader)
    del loader  # before its worker has started
    assert len(list(iterator)) == 1
    del iterator
    assert images() == before


# ---- errors


def test_what_a_worker_cannot_open_is_told_below_the_error(monkeypatch):
    module = types.ModuleType("only_in_the_trainer")
    exec("class Made: pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ModuleNotFoundError, match="No module named 'only_in_the_trainer'") as caught:
        list(holding({"part": module.Made()}, as_is, 1))
    told = f"{caught.value}{caught.value.__notes__}"
    assert "The dataset cannot be opened in the worker, which must be able to import" in told


def test_a_host_that_dies_is_done_without(monkeypatch):
    """The answer of the one that makes an image for those that can't open the driver's is lost: each copies it."""
    loader = holding(np.arange(300_000), lambda data: (int(data.sum()), image_memory(None)[2]))
    list(loader)
    for actor in get_pool().actors:
        assert actor.has_started()
        monkeypatch.setattr(actor, "address", replace(actor.address, reaches_driver=False))
    lost = ray.remote(lost_host).options(num_cpus=0, max_retries=0).remote()

    def host(actor, image, contents):
        actor.hosted = image.address.name, RayAnswer(lost)

    monkeypatch.setattr(Actor, "host", host)
    assert list(loader) == [(299_999 * 150_000, set())] * 2


def lost_host():
    os._exit(1)
