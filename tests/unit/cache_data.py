"""Datasets that are cached, and processes that read them, for the tests of caches in memory and in folders."""

import os
import pickle
import resource

import torch
from torch.utils.data import Dataset

from rayloader.transport.pickler import ByValuePickler, dumped


class Numbers(Dataset):
    """Sample `i` is `make(i)`; counts how often it was asked."""

    def __init__(self, make, count=20):
        self.make, self.count, self.asked = make, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.asked += 1
        return self.make(index)


def labelled(index):
    return torch.full((3, 4), index, dtype=torch.uint8), index


def large(index):
    """With its head, just as large as is mapped."""
    return torch.full((1 << 18,), index, dtype=torch.int32)


def another(kept):
    """The same cache, as another process gets it."""
    return pickle.loads(dumped(kept, ByValuePickler))


def fork(work):
    """Begins it in a forked process; returns that process's number."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # a fork has none of the others
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def end_of(pid):
    """The exit status of a forked process, 0 if its work has returned; minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_fork(work):
    """Does it in a forked process; returns that one's exit status."""
    return end_of(fork(work))


def limited(nbytes, work):
    """Does it in a fork that can make no file of more bytes, which is like a full disk: a write ends in the middle."""

    def limits():
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
        work()

    assert in_fork(limits) == 0
