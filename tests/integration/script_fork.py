"""Forks while an iterator is live, and while actors are warm: the child is told that it cannot go on, the parent does.

Loaders that are collected in a child, one of torch's DataLoader too, do not hang there.

python script_fork.py
"""

import gc
import os
import sys
import traceback

import torch.utils.data

import rayloader

torch_loader = torch.utils.data.DataLoader  # the same class, unless a user patched it


class Collecting:
    """Its samples collect what is garbage in their process."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        gc.collect()
        return index


def garbage():
    """Loaders with actors of their own, one warm and one at work, in a cycle that only the collector ends."""
    cycle = [
        rayloader.DataLoader(range(4), None, num_workers=1, ray_remote_args={"num_cpus": 0, "memory": memory})
        for memory in (1, 2)
    ]
    assert list(cycle[0]) == [0, 1, 2, 3]
    cycle.append(iter(cycle[1]))
    assert next(cycle[2]) == 0
    cycle.append(cycle)


gc.disable()
garbage()
loader = rayloader.DataLoader(range(6), None, num_workers=1)
iterator = iter(loader)
assert next(iterator) == 0
pid = os.fork()
if pid == 0:
    status = 1
    try:
        next(iterator)
    except rayloader.RaySessionError as error:
        print(error, file=sys.stderr)
        status = 3 if isinstance(error, RuntimeError) and "forked" in str(error) else 2
    except BaseException:
        traceback.print_exc()
    del iterator, loader  # the parent's workers must not notice
    gc.collect()
    os._exit(status)  # as multiprocessing's children end; Ray's own exit handlers hang in a fork
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 3, status
assert list(iterator) == [1, 2, 3, 4, 5]
assert list(loader) == [0, 1, 2, 3, 4, 5]
assert list(torch_loader(Collecting(), None, num_workers=2, multiprocessing_context="fork")) == [0, 1, 2, 3]
print("the end")
