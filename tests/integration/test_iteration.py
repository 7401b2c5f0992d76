"""Epochs and iterators: order, abandoning, several at once, threads, loaders inside workers, who ends when."""

import os
import threading

import psutil
import pytest
import ray
import torch
from torch.utils.data import BatchSampler, Sampler, Subset, get_worker_info

import rayloader.actors.pool
from inside import has_workers
from latches import Gate, Mail
from probes import Calls, Stream, as_is, in_each_worker, load
from rayloader import DataLoader

pytestmark = pytest.mark.usefixtures("ray_session")

EXIT_LIMIT = 500.0  # seconds for a process to end; on expiry the test fails


def worker_id(index):
    return get_worker_info().id


# ---- who builds what, and in which order it comes


def test_batch_i_goes_to_worker_i_modulo_w():
    assert list(load(worker_id, 7, num_workers=2)) == [0, 1, 0, 1, 0, 1, 0]


def test_exhausted_workers_leave_the_rotation():
    lengths = [1, 4]
    dataset = Stream(lambda worker: [(worker, k) for k in range(lengths[worker])])
    for _ in range(2):
        loader = DataLoader(dataset, None, num_workers=2, collate_fn=as_is)
        assert list(loader) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [2, 2, 2, 1, 1]), (True, [2, 2, 2])])
def test_drop_last_counts_for_each_worker_of_an_iterable_dataset(drop_last, sizes):
    dataset = Stream(lambda worker: range(3 + 2 * worker))
    loader = DataLoader(dataset, 2, num_workers=2, drop_last=drop_last)
    assert sorted((len(batch) for batch in loader), reverse=True) == sizes


def test_in_order_the_head_is_waited_for_whatever_else_is_ready(tmp_path):
    gate, mail = Gate(tmp_path / "gate"), Mail(tmp_path / "mail")

    def get(index):
        if index == 0:
            gate.wait()
        else:
            mail.send(index)
        return index

    iterator = iter(load(get, 8, num_workers=2))
    assert mail.receive(2) == ["1", "3"]  # all that the other worker may build meanwhile
    gate.open()
    assert list(iterator) == list(range(8))
    mail.close()


@pytest.mark.parametrize("workers", ["ray", "fork"])
def test_workers_begin_before_the_first_batch_is_asked_for(tmp_path, workers):
    mail = Mail(tmp_path / "mail")
    iterator = iter(load(lambda index: mail.send(index), 2, num_workers=1, prefetch_factor=2, workers=workers))
    assert mail.receive(2) == ["0", "1"]
    assert list(iterator) == [None, None]
    mail.close()


def test_without_order_the_next_task_goes_to_whoever_has_room(tmp_path):
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 0:
            gate.wait()
        return index, get_worker_info().id

    iterator = iter(load(get, 8, num_workers=2, prefetch_factor=1, in_order=False))
    assert [next(iterator) for _ in range(7)] == [(index, 1) for index in range(1, 8)]
    gate.open()
    assert list(iterator) == [(0, 0)]


class Own(Sampler):
    """Yields what is no integer."""

    def __iter__(self):
        yield from ({"key": k} for k in "abc")


def test_the_users_sampler_may_yield_anything_and_batches_of_it():
    dataset = Calls(lambda index: index["key"])
    assert list(DataLoader(dataset, None, sampler=Own(), num_workers=2)) == ["a", "b", "c"]
    batches = DataLoader(dataset, num_workers=2, batch_sampler=BatchSampler(Own(), 2, False), collate_fn="".join)
    assert list(batches) == ["ab", "c"]


def test_a_subset_of_a_dataset_is_loaded_in_its_order():
    loader = DataLoader(Subset(Calls(as_is, 10), [7, 3, 5]), 2, num_workers=2)
    assert [batch.tolist() for batch in loader] == [[7, 3], [5]]


def test_shuffling_is_torchs():
    def order(num_workers):
        loader = DataLoader(range(20), 3, True, num_workers=num_workers, generator=torch.Generator().manual_seed(2))
        return [batch.tolist() for _ in range(2) for batch in loader]

    assert order(2) == order(0)
    assert sorted(index for batch in order(2)[:7] for index in batch) == list(range(20))


def test_an_empty_dataset_gives_nothing():
    assert list(DataLoader([], num_workers=2)) == []
    assert list(DataLoader(Stream(lambda worker: []), num_workers=2)) == []


# ---- iterators


@pytest.mark.parametrize("persistent", [False, True])
def test_break_and_again(persistent):
    loader = DataLoader(range(10), 2, num_workers=2, persistent_workers=persistent)
    for taken in (1, 3):
        for number, batch in enumerate(loader, 1):
            assert batch.tolist() == [2 * number - 2, 2 * number - 1]
            if number == taken:
                break
    assert [batch.tolist() for batch in loader] == [[k, k + 1] for k in range(0, 10, 2)]


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_at_its_end_stays_there(persistent):
    iterator = iter(DataLoader(range(2), num_workers=1, persistent_workers=persistent))
    assert len(list(iterator)) == 2
    for _ in range(2):
        assert next(iterator, "the end") == "the end"


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_outlives_its_loader(persistent):
    loader = DataLoader(range(6), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    next(iterator)
    del loader
    assert [batch.item() for batch in iterator] == [1, 2, 3, 4, 5]


def test_three_iterators_interleaved():
    loader = DataLoader(range(4), num_workers=1)
    assert [[value.item() for value in row] for row in zip(loader, loader, loader, strict=True)] == [
        [k, k, k] for k in range(4)
    ]


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
    results = {}

    def run(name):
        loader = DataLoader(Calls(lambda index: index * name, 20), 4, num_workers=1)
        results[name] = [value for _ in range(3) for batch in loader for value in batch.tolist()]

    threads = [threading.Thread(target=run, args=(name,)) for name in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [index * name for _ in range(3) for index in range(20)] for name in (1, 2, 3)}


def test_an_iterator_may_go_on_in_another_thread_and_end_there():
    iterator = iter(DataLoader(range(6), num_workers=2))
    found = [next(iterator).item()]
    thread = threading.Thread(target=lambda: found.extend(batch.item() for batch in iterator))
    thread.start()
    thread.join()
    assert found == list(range(6))


def test_a_loader_inside_a_worker_of_another():
    def get(index):
        rayloader.actors.pool.GRACE_S = 0.0  # of this process, whose actors need not outlive the test
        inner = DataLoader(range(4), 2, num_workers=1, persistent_workers=index == 1)
        batches = [batch.tolist() for _ in range(2) for batch in inner]
        return index, batches, get_worker_info().id

    expected = [[0, 1], [2, 3]] * 2
    assert list(load(get, num_workers=1)) == [(0, expected, 0), (1, expected, 0)]


def test_a_stock_loader_without_workers_inside_a_worker():
    assert in_each_worker(lambda index: [batch.tolist() for batch in torch.utils.data.DataLoader(range(2))], 1) == [
        [[0], [1]]
    ]


@pytest.mark.full
def test_it_works_in_a_ray_task_and_in_a_ray_actor():
    def batches():  # by value: Ray's own workers cannot import this file
        return [batch.tolist() for batch in DataLoader(range(4), 2, num_workers=2)]

    class Trainer:
        def train(self):
            return batches()

    task = ray.remote(num_cpus=0)(batches)
    trainer = ray.remote(num_cpus=0)(Trainer).remote()
    assert ray.get([task.remote(), trainer.train.remote()]) == [[[0, 1], [2, 3]]] * 2
    ray.kill(trainer)
