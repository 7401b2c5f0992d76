"""`rayloader doctor`: checks whether rayloader can work here, and says what to do if it can't.

Promise: changes nothing. A Ray that is started for the checks ends with the process.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from rayloader.cli import given
from rayloader.cli.given import CommandError, Subject
from rayloader.loader import DataLoader
from rayloader.observe.recorder import cpus
from rayloader.options import Workers, lacking
from rayloader.transport.lanes import switched_off
from rayloader.transport.memory_file import available

LoaderName = Annotated[
    str, typer.Argument(help="module:name or file.py:name of a loader of yours, to be tried too", show_default=False)
]
# Somewhat more than a worker takes for torch alone; see README, "When not to use it".
WORKER_BYTES = 1 << 29
# With less, Ray keeps its objects in files that are not in memory, or in too little memory.
SHM_BYTES = 1 << 30
# Each worker costs the driver a few descriptors, and Ray many.
DESCRIPTORS = 4096
ROWS, COLUMNS = 64, 4096  # large enough for batches to travel in an arena


@dataclass(frozen=True)
class Check:
    """One line of the answer."""

    name: str  # what was checked.
    ok: bool  # whether it is as it should be.
    found: str  # what was found.
    advice: str = ""  # what to do if it is not.


def doctor(
    loader: LoaderName = "",
    num_workers: Annotated[int, typer.Option(help="workers to try with", min=1)] = 2,
    workers: Annotated[Workers, typer.Option(help="what they are; both by default")] = "auto",
    as_json: given.AsJson = False,
) -> None:
    """Check versions, cores, memory, Ray, and each way for batches to travel. Exits with 1 if something is wrong."""
    found = []
    try:
        with given.prints_to_standard_error():
            subject = Subject(given.made(loader)) if loader else None
    except CommandError as error:
        given.fail(error)
    for check in checks(num_workers, workers, subject):
        found.append(check)
        if not as_json:
            mark = "[green]ok[/]    " if check.ok else "[red]failed[/]"
            given.out.print(mark, f"[bold]{check.name}[/]:", escape(check.found))
            if not check.ok:
                given.out.print("       ", escape(check.advice))
    if as_json:
        given.print_json([asdict(check) for check in found])
    raise typer.Exit(not all(check.ok for check in found))


def checks(num_workers: int, workers: Workers, subject: Subject | None) -> Iterator[Check]:
    """All checks, one after the other; the later ones start Ray and `num_workers` workers.

    Args:
        num_workers: of the loaders that are tried.
        workers: what these are; "auto" tries both.
        subject: a loader of the user's, which is tried too.
    """
    yield Check("Python", True, platform.python_version())
    for name in ("rayloader", "torch", "ray", "numpy", "cloudpickle"):
        yield Check(name, True, importlib.metadata.version(name))
    why = lacking()
    yield Check("system", not why, f"{platform.system()} {platform.release()}", f"{why}; use num_workers=0")
    if subject is not None:
        yield _given(subject, 0)
    if why:
        return
    yield from _machine(num_workers)
    if workers != "ray":
        yield _tried("forks", lambda: _load(num_workers, workers="fork"), 'workers="ray" makes them actors')
        if subject is not None:
            yield _given(subject, num_workers, "fork")
    if workers != "fork":
        started = _tried("Ray", lambda: _ray(num_workers), "the text above says what to do; Ray's log says more")
        yield started
        if started.ok:
            yield _tried(
                "lines and arenas",
                lambda: _lines(num_workers),
                "workers must run on this machine, as the same user, in the same PID and network namespaces; without "
                "that all goes through Ray, which is slower",
            )
            calls = "Ray's log says more; /dev/shm may be too small"
            yield _tried("Ray calls", lambda: _load(num_workers, arenas=False), calls)
            if subject is not None:
                yield _given(subject, num_workers, "ray")


def busy() -> str:
    """That other programs keep this machine busy, if they do: by the load of the last minute."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"this machine is busy (load {load:.0f} on {cores} cores)" if load >= cores else ""


def _machine(num_workers: int) -> Iterator[Check]:
    cores = cpus()
    shared = f"{num_workers} workers and the trainer will share {cores:g}"
    found = "; ".join(filter(None, [f"{cores:g} usable of {os.cpu_count()}", busy()]))
    yield Check("cores", cores >= min(num_workers, 2), found, shared)

    free, needed = available(), num_workers * WORKER_BYTES
    found = "unknown" if free is None else f"{free / 1e9:.1f} GB available"
    takes = f"{num_workers} workers take about {needed / 1e9:.1f} GB, without the dataset"
    yield Check("memory", free is None or free >= needed, found, takes)

    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    more = "Ray keeps its objects there; give a container more: docker run --shm-size=2g"
    yield Check("/dev/shm", free >= SHM_BYTES, f"{free / 1e9:.1f} GB free", more)

    import resource  # which is not on every system

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = limit == resource.RLIM_INFINITY or limit >= DESCRIPTORS
    raised = f"ulimit -n {DESCRIPTORS if most == resource.RLIM_INFINITY else min(DESCRIPTORS, most)}"
    yield Check("open files", enough, f"at most {limit}", raised)


def _given(subject: Subject, num_workers: int, workers: Workers = "auto") -> Check:
    """A loader of the user's, with so many workers."""

    def load() -> str:
        with given.prints_to_standard_error():
            next(iter(subject.loader("rayloader", num_workers, workers)))
        return "its first batch came"

    how = {"auto": "without workers", "fork": "with forks", "ray": "with Ray actors"}[workers]
    return _tried(f"your loader {how}", load, "the error is that of your dataset, or says what to do")


def _ray(num_workers: int) -> str:
    came = _load(num_workers, workers="ray")
    from rayloader.actors import session

    return f"{'started here' if session.started_here() else 'joined the one that runs'}; {came}"


def _lines(num_workers: int) -> str:
    from rayloader.actors.pool import get_pool

    if switched_off():
        raise RuntimeError("RAYLOADER_ARENAS=0 in the environment has switched them off")
    _load(num_workers, workers="ray")
    here = [actor for actor in get_pool().actors if actor.address is not None]
    near = [actor for actor in here if actor.address is not None and actor.address.reaches_driver]
    refused = {actor.no_line for actor in near if actor.no_line}
    if refused or not near:
        raise RuntimeError("; ".join(refused) or "no worker can open the memory of this process")
    if not any(actor.lane.is_open for actor in near):
        raise RuntimeError("no worker has built a batch in shared memory")
    return f"{len(near)} of {len(here)} workers are reached over a local socket, and share memory with this process"


def _load(num_workers: int, **options: Any) -> str:
    rows = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    dataset: Any = rows
    batches = list(DataLoader(dataset, ROWS // 4, num_workers=num_workers, **options))
    if not torch.equal(torch.cat(batches), rows):
        raise RuntimeError("the batches are not those of the dataset")
    return "all batches came"


def _tried(name: str, attempt: Callable[[], str], advice: str) -> Check:
    began = time.monotonic()
    try:
        found = attempt()
    except Exception as error:  # any error is the answer
        return Check(name, False, given.in_full(error), advice)
    return Check(name, True, f"{found} ({time.monotonic() - began:.1f} s)")
