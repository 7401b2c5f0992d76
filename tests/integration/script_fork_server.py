"""Workers that the fork server makes, then workers that Ray starts by itself.

    python script_fork_server.py FILE

FILE gets a line of JSON for each step. (What Ray says of a worker that was killed goes to standard output.)
"""

import contextlib
import gc
import json
import logging
import os
import random
import readline  # noqa: F401  # it adds variables to the environment that Python does not see
import signal
import sys
import threading
import warnings

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset

import rayloader
from rayloader import DataLoader
from rayloader.actors import session
from rayloader.actors.default_worker import SERVE
from rayloader.actors.fork_server import SCRIPT


class Facts(Dataset):
    """What a worker process is like."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        names = set(os.environ) - {"RAYLOADER_FORK_SERVER", "RAY_JOB_ID"}
        handlers = [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP]
        links = []
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "draw": random.random(),
            "hash": hash("text"),
            "listens": sum("fork-server" in line for line in open("/proc/net/unix")),
            "environment": {name: os.environ[name] for name in sorted(names)},
            "path": sys.path,
            "script": sys.argv[0],
            "main": vars(sys.modules["__main__"]).get("__file__"),
            "flags": list(sys.flags),
            "folder": os.getcwd(),
            "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
            "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in handlers],
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "cpus": sorted(os.sched_getaffinity(0)),
            "out of memory": open("/proc/self/oom_score_adj").read(),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "main thread": threading.main_thread().ident == threading.get_ident(),
            "torch threads": torch.get_num_threads(),
            "seed": torch.initial_seed() - torch.utils.data.get_worker_info().seed,
            "collects": gc.isenabled(),
            "filters": len(warnings.filters),
            "files": sorted({link.split(":")[0] for link in links if link.startswith(("/dev", "/memfd:rayloader"))}),
            "numpy": np.get_printoptions()["precision"],
        }


def facts(**options):
    """Of two workers."""
    loader = DataLoader(Facts(), num_workers=2, batch_size=None, fresh_processes=True, workers="ray", **options)
    return list(loader)


def say(name, value):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({name: value}) + "\n")


def main():
    said = []
    logging.getLogger("rayloader").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    say("forked", facts())
    (server,) = (p for p in psutil.Process().children() if SERVE in p.cmdline())
    say("server", [server.pid, len(os.listdir(f"/proc/{server.pid}/fd"))])
    # The process that Ray has started for a worker ends with it.
    with contextlib.suppress(psutil.Error):
        psutil.wait_procs([p for p in psutil.Process().children(recursive=True) if p.ppid() == server.pid], 60)
    iterator = iter(DataLoader(Facts(), num_workers=1, batch_size=None, fresh_processes=True, workers="ray"))
    victim = next(iterator)["pid"]
    scripts = [p for p in psutil.Process().children(recursive=True) if SCRIPT in p.cmdline()]
    waiting = [p for p in scripts if p.ppid() != server.pid]
    with contextlib.suppress(StopIteration):
        next(iterator)
    os.kill(victim, signal.SIGKILL)
    say("left", [" ".join(p.cmdline()) for p in psutil.wait_procs(waiting, 300)[1]])
    del iterator
    say("own environment", facts(ray_remote_args={"runtime_env": {"env_vars": {"OF_THE_USER": "1"}}}))
    say("again", [fact["parent"] for fact in facts()])
    server.kill()
    session._starter.fork_server._process.wait()
    say("started", facts())
    say("said", [line for line in said if "fork server" in line])
    rayloader.shutdown()
    say("children", [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)])
    say("forked again", facts())
    processes = psutil.Process().children(recursive=True)
    rayloader.shutdown()
    say("gone", len(psutil.wait_procs(processes, 60)[1]))


if __name__ == "__main__":
    main()
