"""Runs of the conformance cases that something disturbs; the same batches must come as if it had not.

A run takes every epoch of a case whose script does nothing else. Before one of the batches something happens: each
function here is that, of the run. What happened is over when it returns, and the run goes on with what it has left:
the same iterator, or another loader.
"""

import contextlib
import io
import random
import re
import signal
import sys

import numpy as np
import torch
from torch.utils.data import IterableDataset

from conformance_record import describe, describe_error, describe_text
from inside import actors_of, await_more, has_started, has_workers, kill_worker

EVENT = re.compile(r"epoch (\d+): (batch|end|iter)")  # what a run notes, too


def run_of(events, epochs):
    """Of the events of a loader, those of a run of so many epochs."""
    return [event for event in events if (match := EVENT.match(event[0])) and int(match[1]) < epochs]


def in_any_order(events):
    """What came in each epoch, sorted."""
    found = [(int(EVENT.match(label)[1]), described) for label, described in events]
    return [
        (f"epoch {epoch}", described) for epoch, described in sorted(found, key=lambda event: (event[0], repr(event)))
    ]


class Run:
    """All epochs of a case, with our loader.

    Args:
        case: of `CASES`; its script takes `case.script.epochs` epochs.
        loader_class: makes the loader from the case's arguments.

    Attributes:
        loader: the one that goes on.
        iterator: of the current epoch.
        epoch: its number.
        step: the number of the batch that is the next.
        ended: whether the epoch has.
        events: what has come, as `record` notes it.
        compared: so many epochs are as torch's: all, unless what has happened says otherwise.
        before_each: what happens before each further batch.
    """

    def __init__(self, case, loader_class):
        self.case, self.loader_class = case, loader_class
        self.events, self.epoch, self.step, self.ended = [], 0, 0, False
        self.compared, self.before_each, self.kept = case.script.epochs, nothing, []
        seed(case.seed)
        self.loader, self.iterator = loader_class(**case.make()), None

    def play(self, happens, epoch, step):
        """Runs to the end; `happens` is called before the batch `step` of `epoch`, or after its last one."""
        for number in range(self.case.script.epochs):
            self.epoch, self.step, at = number, 0, step if number == epoch else None
            self.begin()
            while not self.ended:
                if self.case.again is None or self.step > 2:  # see LATER in test_disturbed.py
                    self.before_each(self)
                if self.step == at:
                    happens(self)
                    at = None
                self.take()
            if at is not None:
                happens(self)
        for label, batch, described in self.kept:
            assert describe(batch) == described, f"{label} has changed since it was taken"
        return run_of(self.events, self.compared)

    def begin(self):
        """Begins an epoch, or goes on with one."""
        self.ended = False
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(self.epoch)
        try:
            self.iterator = iter(self.loader)
        except Exception as error:
            self.events.append((f"epoch {self.epoch}: iter: error", describe_error(error)))
            self.ended = True

    def take(self):
        """Notes what `next` gives."""
        label = f"epoch {self.epoch}: batch {self.step}"
        try:
            batch = next(self.iterator)
            self.events.append((label, describe(batch)))
            if self.step % 2:  # the memory of the others is used again
                self.kept.append((label, batch, self.events[-1][1]))
        except StopIteration as stop:
            text = describe_text(str(stop))
            stop.__traceback__ = None
            self.events.append((f"epoch {self.epoch}: end after {self.step}", {"text": text}))
            self.ended = True
            return
        except Exception as error:
            self.events.append((f"{label}: error", describe_error(error)))
        self.step += 1

    def saved(self):
        """The state, as a file holds it."""
        file = io.BytesIO()
        torch.save(self.loader.state_dict(), file)
        return file.getvalue()

    def load(self, saved, into=None, **changed):
        """Goes on with another loader, in a program that has drawn other numbers, and perhaps has other objects.

        Args:
            saved: the state.
            into: the loader, if there is one.
            changed: arguments of the other loader.
        """
        if self.case.again is not None:  # what begins another epoch there is not torch's
            self.compared = min(self.compared, self.epoch + 1)
        self.iterator = None
        seed(self.case.seed + 1)
        if into is None:
            into = self.loader_class(**{**(self.case.again or self.case.make)(), **changed})
        self.loader = into
        self.loader.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
        if not self.ended:
            self.begin()


def seed(number):
    """Seeds the program's generators."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def nothing(run):
    """For comparison."""


def save(run):
    """The run is saved, and goes on."""
    run.saved()


def save_and_load(run):
    """The run is saved, and another program goes on."""
    run.load(run.saved())


def break_off_and_load(run):
    """The iterator is dropped before the run is saved, which is done once more before the first batch."""
    run.iterator = None
    run.load(run.saved())
    run.load(run.saved())


def back(run):
    """The same loader goes back by two batches."""
    saved, ended, step, count = run.saved(), run.ended, run.step, len(run.events)
    while not run.ended and run.step < step + 2:
        run.take()
    run.ended, run.step = ended, step
    del run.events[count:]
    run.load(saved, into=run.loader)


def another_number_of_workers(run):
    """The same with another number of workers, for the rest of the epoch."""
    run.load(run.saved(), num_workers=run.loader.num_workers % 3 + 1)
    if run.loader.seeding == "worker" or isinstance(run.loader.dataset, IterableDataset):  # which divides itself anew
        run.compared = run.epoch + 1


def kill(run, worker_id=None):
    """One of the workers is killed."""
    if has_workers(run.iterator):  # otherwise the epoch is over
        worker_id = run.step % len(actors_of(run.iterator)) if worker_id is None else worker_id
        while not has_started(run.iterator, worker_id):
            await_more(run.iterator)
        with contextlib.suppress(ProcessLookupError):  # it was killed before, and nobody knows it yet
            kill_worker(run.iterator, worker_id)


def kill_all_and_save(run):
    """All workers are killed, and the run saved before anybody has noticed; later, another program goes on."""
    if has_workers(run.iterator):
        for worker_id in range(len(actors_of(run.iterator))):
            kill(run, worker_id)
    saved = run.saved()
    if run.epoch:
        run.load(saved)


def chain(run):
    """From here on a new loader gives each batch."""
    run.before_each = save_and_load


def walk(run):
    """From here on anything may happen at any time."""
    chance = random.Random(f"{run.case.name} {run.epoch} {run.step}")
    choices = nothing, save, save_and_load, break_off_and_load, back, kill, kill_all_and_save
    run.before_each = lambda run: chance.choice(choices)(run)


class Raised(BaseException):
    """By the handler of a signal."""


def signal_in_next(run):
    """`next` is interrupted by a signal whose handler raises, somewhere on its way through the library."""
    if run.ended:
        return

    def handler(*_):
        raise Raised

    before = signal.signal(signal.SIGUSR1, handler)
    left = 7 * run.step + 11 * run.epoch + 3  # calls of functions

    def strike(frame, event, argument):
        nonlocal left
        if event == "call" and "/rayloader/" in frame.f_code.co_filename and frame.f_code.co_name != "__del__":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGUSR1)

    number = len(run.events)
    try:
        sys.setprofile(strike)
        with contextlib.suppress(Raised):
            run.take()
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR1, before)
    if len(run.events) == number:  # otherwise the batch had come
        run.load(run.saved())


EVERYWHERE = save, save_and_load, break_off_and_load, back, chain
WITH_WORKERS = *EVERYWHERE, another_number_of_workers, kill, kill_all_and_save, signal_in_next, walk
