"""The dataset in real workers: what they share with each other, what with the driver, and what is their own."""

import gc
import json
import multiprocessing
import os
import random
import re
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

import programs
from aliases import Aliases
from inside import image_files
from probes import as_is
from rayloader import DataLoader, ReplicaError, ReplicaMemoryError
from rayloader.actors.actor import Actor, RayAnswer
from rayloader.actors.actors import ActorCalls
from rayloader.actors.pool import get_pool

pytestmark = pytest.mark.usefixtures("ray_session")

MIB = 1 << 20
SUM = 299_999 * 150_000
EXIT_LIMIT = 500.0  # seconds for threads to let go; on expiry the test fails


class Holds:
    """Each worker is asked once: sample i is what `function(data)` returns in worker i."""

    def __init__(self, data, function, length=2):
        self.data, self.function, self.length = data, function, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(self.data)


def holding(data, function, num_workers=2, **options):
    return DataLoader(Holds(data, function, num_workers), None, num_workers=num_workers, collate_fn=as_is, **options)


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

    def ask(data):
        assert not data.any()  # touches every page
        before = image_memory(None)
        data[:MIB] += 1
        return before, image_memory(None), int(data.sum())

    one, other = holding(data, ask)
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


def test_what_is_kept_of_an_old_dataset_stays_and_the_rest_goes():
    kept = "rayloader_kept_array"  # in a module that all loaders of a warm process see

    def keep(data):
        setattr(os, kept, data)
        return os.getpid(), image_memory(None)[2]

    def look(data):
        return os.getpid(), getattr(os, kept).tolist()[:3], image_memory(None)[2]

    def forget(data):
        delattr(os, kept)
        return os.getpid(), image_memory(None)[2]

    loader = holding(np.arange(10_000), keep, 1)
    ((pid, (name,)),) = loader
    del loader
    gc.collect()
    ((same, content, names),) = holding(np.zeros(10_000), look, 1)
    assert same == pid
    assert content == [0, 1, 2]
    assert name in names
    ((same, _),) = holding(np.ones(10_000), forget, 1)
    assert same == pid
    ((_, names),) = holding(np.ones(10_000), lambda _: (os.getpid(), image_memory(None)[2]), 1)
    assert name not in names


# ---- what shares memory


def test_a_write_shows_where_it_does_under_torchs_spawn_in_each_epoch():
    """Objects over one memory are separate, as pickling makes them; with fresh workers and with persistent ones."""
    reference = programs.run(Path(__file__).with_name("script_aliases.py"))
    assert reference.returncode == 0, reference.stderr
    want = json.loads(reference.stdout)
    for persistent in (False, True):
        loader = DataLoader(Aliases(), None, num_workers=1, collate_fn=as_is, persistent_workers=persistent)
        assert [list(loader) for _ in range(3)] == want


# ---- what was shared stays so


def add_one(data):
    data[:] += 1
    return type(data), image_memory(None)[0] < 64


def add_one_shared_again(data):
    return add_one(data.share_memory_())


def test_what_is_shared_is_written_for_all(tmp_path):
    np.zeros(MIB, np.uint8).tofile(tmp_path / "data")
    mapped, shared = np.memmap(tmp_path / "data", mode="r+"), torch.zeros(MIB, dtype=torch.uint8).share_memory_()
    for data, kind in ((mapped, np.memmap), (shared, torch.Tensor)):
        assert list(holding(data, add_one, 1)) == [(kind, True)]
    assert list(holding(shared, add_one_shared_again, 1)) == [(torch.Tensor, True)]
    assert (set(mapped.tolist()), set(shared.tolist())) == ({1}, {2})
    assert (tmp_path / "data").read_bytes() == b"\1" * MIB


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


def test_no_descriptor_is_left():
    shared = torch.zeros(10).share_memory_()

    def load(times):
        for _ in range(times):
            list(holding([shared, np.zeros(1000)], lambda data: 0, 1))
        gc.collect()
        get_pool().wait()
        return len(os.listdir("/proc/self/fd"))

    before = load(2)
    after, deadline = load(10), time.monotonic() + EXIT_LIMIT
    while after > before + 4 and time.monotonic() < deadline:  # Ray opens some of its own
        get_pool().wait()  # a thread that has just ended its last job may still hold what it was given
        after = len(os.listdir("/proc/self/fd"))
    assert after <= before + 4


# ---- errors


def test_a_file_that_vanishes_before_a_worker_opens_it(tmp_path, monkeypatch):
    np.zeros(1000).tofile(tmp_path / "data")
    start = ActorCalls.start

    def rename_and_start(*args):
        os.rename(tmp_path / "data", tmp_path / "moved")
        return start(*args)

    monkeypatch.setattr(ActorCalls, "start", rename_and_start)
    with pytest.raises(ReplicaError, match=rf"{tmp_path}/data.*does not have") as caught:
        list(holding(np.memmap(tmp_path / "data"), as_is, 1))
    assert "Caught ReplicaError in DataLoader worker process 0" in str(caught.value)


def count_up(shared):
    values, lock = shared
    with lock:
        values["count"] += 1
    return values["inner"]["there"], bytes(multiprocessing.current_process().authkey)


def test_proxies_of_a_manager_work_as_in_forked_workers():
    key = bytes(multiprocessing.current_process().authkey)
    with multiprocessing.get_context("fork").Manager() as manager:
        values = manager.dict(count=0, inner=manager.dict(there=True))
        assert list(holding((values, manager.Lock()), count_up)) == [(True, key)] * 2
        assert values["count"] == 2


def test_what_a_worker_cannot_open_is_told_below_the_error(monkeypatch):
    module = types.ModuleType("only_in_the_trainer")
    exec("class Made: pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ModuleNotFoundError, match="No module named 'only_in_the_trainer'") as caught:
        list(holding({"part": module.Made()}, as_is, 1))
    told = f"{caught.value}{caught.value.__notes__}"
    assert "The dataset cannot be opened in the worker, which must be able to import" in told


def test_too_little_memory_is_an_error_of_iter(monkeypatch):
    monkeypatch.setattr("rayloader.transport.memory_file.available", lambda: 1000)
    with pytest.raises(ReplicaMemoryError, match="are available"):
        iter(holding(np.zeros(20_000_000, np.uint8), as_is, 1))


# ---- where the driver's files can't be opened


def sums(monkeypatch):
    """A loader all of whose actors say that they do not reach the driver: what it sums, and the image's name."""
    loader = holding(np.arange(300_000), lambda data: (int(data.sum()), image_memory(None)[2]), 2)
    list(loader)
    for actor in get_pool().actors:
        assert actor.has_started()
        assert actor.address.reaches_driver
        monkeypatch.setattr(actor, "address", replace(actor.address, reaches_driver=False))
    return loader


def test_workers_that_cannot_open_the_drivers_files_get_an_image_through_ray(monkeypatch):
    """One of them makes the image for both."""
    loader = sums(monkeypatch)
    first, second = list(loader), list(loader)
    assert [number for number, _ in first] == [SUM] * 2
    assert first[0][1] == first[1][1], "they have not the same image"
    assert first[0][1].isdisjoint(image_files())
    assert second == first, "an image that had not changed was shipped again"


def test_a_host_that_dies_is_done_without(monkeypatch):
    """The answer of the host is lost: each worker copies from Ray's object."""
    loader = sums(monkeypatch)
    lost = ray.remote(lost_host).options(num_cpus=0, max_retries=0).remote()

    def host(actor, image, contents):
        actor.hosted = image.address.name, RayAnswer(lost)

    monkeypatch.setattr(Actor, "host", host)
    assert list(loader) == [(SUM, set())] * 2


def lost_host():
    os._exit(1)
