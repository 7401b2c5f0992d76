"""Iterators and their workers: when these begin and end, who shares them, threads, loaders inside workers."""

import os
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
from torch.utils.data import get_worker_info

import rayloader.actors.pool
from inside import has_workers
from latches import Gate, Mail
from probes import Calls, in_each_worker, load
from rayloader import DataLoader

pytestmark = pytest.mark.usefixtures("ray_session")

EXIT_LIMIT = 500.0  # seconds for a process to end; on expiry the test fails


# ---- iterators


@pytest.mark.parametrize("workers", ["ray", "fork"])
def test_an_iterator_gives_its_workers_back_with_its_last_batch(workers):
    """Nobody need ask it for another one; and its position can be saved."""
    loader, resumed = (DataLoader(range(8), 2, num_workers=2, workers=workers) for _ in range(2))
    iterator = iter(loader)
    batches = [next(iterator).tolist() for _ in range(4)]
    assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert not has_workers(iterator)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == list(iterator) == []
    assert len(list(resumed)) == 4


def test_a_worker_that_goes_on_with_what_nobody_wants_is_not_waited_for_for_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(rayloader.actors.pool, "UNWANTED_S", 0.1)
    gate, mail = Gate(tmp_path / "gate"), Mail(tmp_path / "mail")

    def get(index):
        mail.send(os.getpid())
        gate.wait()
        return index

    iterator = iter(load(get))
    stuck = set(map(int, mail.receive(2)))
    del iterator
    busy = set(in_each_worker(lambda index: os.getpid()))
    assert not busy & stuck  # others took over
    said = "a warm worker process is ended, which has not answered for 0.1 s; a new one takes its place"
    assert [said in message for message in caplog.messages].count(True) >= 1
    gate.open()
    mail.close()


def test_a_worker_that_does_not_stop_is_killed_when_its_time_has_come(tmp_path, monkeypatch):
    for limit in ("GRACE_S", "STOP_TIMEOUT_S"):
        monkeypatch.setattr(rayloader.actors.pool, limit, 0.1)
    gate, mail = Gate(tmp_path / "gate"), Mail(tmp_path / "mail")

    def get(index):
        mail.send(os.getpid())
        gate.wait()

    iterator = iter(load(get, 1))
    process = psutil.Process(int(mail.receive()[0]))
    del iterator
    assert psutil.wait_procs([process], EXIT_LIMIT)[1] == []
    gate.open()
    mail.close()


# ---- actors


def pids(loader):
    return {int(batch) for batch in loader}


def test_loaders_and_their_epochs_share_warm_actors_which_end_when_nobody_has_used_them_for_a_while(monkeypatch):
    own = {"ray_remote_args": {"num_cpus": 0, "memory": 2}}
    training, validation = (load(lambda index: os.getpid(), 2, num_workers=1, **own) for _ in range(2))
    first = pids(training)
    assert len(first) == 1
    assert pids(validation) == pids(training) == first
    processes = [psutil.Process(pid) for pid in first]
    del training
    monkeypatch.setattr(rayloader.actors.pool, "GRACE_S", 0.1)
    assert pids(validation) == first
    assert psutil.wait_procs(processes, EXIT_LIMIT)[1] == []


def test_actors_of_an_iterator_that_outlived_its_loader_end_after_it(monkeypatch):
    monkeypatch.setattr(rayloader.actors.pool, "GRACE_S", 0.1)
    own = {"ray_remote_args": {"num_cpus": 0, "memory": 4}}
    iterator = iter(load(lambda index: os.getpid(), 4, num_workers=1, persistent_workers=True, **own))
    process = psutil.Process(next(iterator))
    assert {*iterator} == {process.pid}
    assert process.is_running()
    del iterator
    assert psutil.wait_procs([process], EXIT_LIMIT)[1] == []


def test_ray_remote_args_reach_the_actors():
    runtime_env = {"env_vars": {"RAYLOADER_TEST_ACTOR": "yes"}}
    options = {"num_cpus": 0, "runtime_env": runtime_env}
    assert in_each_worker(lambda index: os.environ["RAYLOADER_TEST_ACTOR"], 1, ray_remote_args=options) == ["yes"]


# ---- threads, tasks, loaders inside workers


def test_loaders_run_side_by_side_in_threads():
    def run(name):
        loader = DataLoader(Calls(lambda index: index * name, 20), 4, num_workers=1)
        return [value for _ in range(3) for batch in loader for value in batch.tolist()]

    with ThreadPoolExecutor(3) as threads:
        for name, found in zip((1, 2, 3), threads.map(run, (1, 2, 3)), strict=True):
            assert found == [index * name for _ in range(3) for index in range(20)]


def test_a_loader_inside_a_worker_of_another():
    def get(index):
        rayloader.actors.pool.GRACE_S = 0.0  # of this process, whose actors need not outlive the test
        inner = DataLoader(range(4), 2, num_workers=1, persistent_workers=index == 1)
        batches = [batch.tolist() for _ in range(2) for batch in inner]
        return index, batches, get_worker_info().id

    expected = [[0, 1], [2, 3]] * 2
    assert list(load(get, num_workers=1)) == [(0, expected, 0), (1, expected, 0)]


@pytest.mark.full
def test_it_works_in_a_ray_task():
    def batches():  # by value: Ray's own workers cannot import this file
        return [batch.tolist() for batch in DataLoader(range(4), 2, num_workers=2)]

    assert ray.get(ray.remote(num_cpus=0)(batches).remote()) == [[0, 1], [2, 3]]
