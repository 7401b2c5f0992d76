"""Epochs of forked workers that end in every way, in a program without Ray: after each, nothing of theirs is left.

    python script_forks.py

What is compared are the process's descriptors, its children, and its mappings of our memory files.
"""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path

import psutil
import torch

import rayloader
from rayloader.workers import zygote
from rayloader.workers.janitor import janitor

EXIT_LIMIT = 500.0  # seconds for processes to end; on expiry the program fails


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 14:
            raise ValueError("sample 14")
        return index, torch.full((100_000,), index), os.getpid()  # each batch has a slot of its own in the arena


def left():
    """What there is now, once all processes that are about to end have ended."""
    gc.collect()
    janitor.start()  # `shutdown()` has ended it
    janitor.wait()
    while ending := list(zygote._ending):
        for pid in ending:
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it is for the library to wait for it
        janitor.wait()
    janitor.end()  # until then its thread may hold the bell that it has just rung
    descriptors = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
    children = [(child.pid, child.status()) for child in psutil.Process().children(recursive=True)]
    mapped = [
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:rayloader" in line
    ]
    return descriptors, children, mapped


def load(**options):
    return rayloader.DataLoader(Numbers(), 2, num_workers=2, workers="fork", **options)


def until_the_end(**options):
    batches = list(load(sampler=range(12), **options))
    assert [batch[0].tolist() for batch in batches] == [[n, n + 1] for n in range(0, 12, 2)]


def three_epochs(**options):
    loader = load(sampler=range(12), **options)
    processes = [{int(batch[2][0]) for batch in loader} for _ in range(3)]
    assert len(set.union(*processes)) == (2 if options else 6)


def broken_off(**options):
    for _ in load(**options):
        break


def left_by_an_exception(**options):
    with contextlib.suppress(ZeroDivisionError):
        for _ in load(**options):
            raise ZeroDivisionError


def ended_by_an_error_of_a_sample(**options):
    with contextlib.suppress(ValueError):
        list(load(**options))


def deleted_at_once(**options):
    iter(load(**options))


def left_in_a_cycle(**options):
    loader = load(**options)
    cycle = [loader, iter(loader)]
    cycle.append(cycle)


def shut_down(**options):
    iterator = iter(load(**options))
    next(iterator)
    rayloader.shutdown()


def interrupted(**options):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        for _ in load(**options):
            os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def worker_killed(**options):
    for number, batch in enumerate(rayloader.DataLoader(range(40), 2, num_workers=2, workers="fork", **options)):
        assert batch.tolist() == [2 * number, 2 * number + 1]
        if number == 2:
            forks = [child for child in psutil.Process().children(recursive=True) if child.ppid() != os.getpid()]
            assert len(forks) == 2
            forks[1].kill()


def thread_that_ends_first(**options):
    iterators = []
    thread = threading.Thread(target=lambda: iterators.append(iter(load(sampler=range(12), **options))))
    thread.start()
    thread.join()
    assert [batch[0].tolist() for batch in iterators.pop()] == [[n, n + 1] for n in range(0, 12, 2)]


def in_a_daemonic_process(**options):
    process = multiprocessing.get_context("fork").Process(target=until_the_end, kwargs=options, daemon=True)
    process.start()
    process.join()
    assert process.exitcode == 0
    process.close()


class Nesting(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        inner = rayloader.DataLoader(range(10 * index, 10 * index + 4), 2, num_workers=1, workers="fork")
        return torch.cat(list(inner))


def forks_of_forks(**options):
    loader = rayloader.DataLoader(Nesting(), 1, num_workers=2, workers="fork", **options)
    assert [batch[0].tolist() for batch in loader] == [[10 * n + i for i in range(4)] for n in range(4)]


ENDS = [
    until_the_end,
    three_epochs,
    broken_off,
    left_by_an_exception,
    ended_by_an_error_of_a_sample,
    deleted_at_once,
    left_in_a_cycle,
    shut_down,
    interrupted,
    worker_killed,
    thread_that_ends_first,
    in_a_daemonic_process,
    forks_of_forks,
]

if __name__ == "__main__":
    until_the_end()  # what the process keeps for good is there now
    before = left()
    for end in ENDS:
        for options in ({}, {"persistent_workers": True}):
            end(**options)
            after = left()
            assert after == before, (end.__name__, options, *zip(before, after, strict=True))
    assert "ray" not in sys.modules
    print("the end")
