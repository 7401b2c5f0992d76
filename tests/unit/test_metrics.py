"""What Ray is told of loaders for Prometheus, and when; with counters and gauges of the test's own."""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rayloader.observe import metrics
from rayloader.observe.metrics import COUNTERS, GAUGES, INTERVAL_S, Metrics
from rayloader.observe.recorder import Recorder
from rayloader.protocol import pack_spent


class Told:
    """Stands for Ray's classes: what was told to each metric, by label."""

    def __init__(self):
        self.values = {}

    def make(self, name, description, labels):
        assert description.endswith(".")
        assert labels == ("loader",)
        return SimpleNamespace(
            inc=lambda more, tags: self.add(name, more, tags), set=lambda value, tags: self.put(name, value, tags)
        )

    def add(self, name, more, tags):
        assert more > 0, "Ray refuses others"
        key = name.removeprefix("rayloader_"), tags["loader"]
        self.values[key] = self.values.get(key, 0) + more

    def put(self, name, value, tags):
        self.values[name.removeprefix("rayloader_"), tags["loader"]] = value

    def of(self, label):
        return {name: value for (name, of), value in self.values.items() if of == label and value}


class Loader:
    """As much of a loader as is asked here."""

    def __init__(self, label="train"):
        self._label = label
        self._recorder = Recorder()
        self._live_iterator = None

    def begin(self, processes=2):
        self._live_iterator = SimpleNamespaceWithRef(bytes_under_way=30, bytes_held=4)
        return self._recorder.begins(self._live_iterator, 2, processes)


class SimpleNamespaceWithRef(SimpleNamespace):
    pass


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

    monkeypatch.setattr(metrics.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def told():
    return Told()


def on(told):
    return Metrics(lambda: True, told.make, told.make)


def give(tally, batches):
    for batch in range(batches):
        worker = tally.workers[batch % 2]
        tally.answers.append(tally.settle(worker, pack_spent(batch % 2, 0.0, 0.0, 0.25, 0.25, 0.0)))
        tally.gave(0.0, batch, 4, 100)


def test_where_metrics_are_off_that_is_asked_once_and_nothing_is_told(clock):
    asked = []
    off = Metrics(lambda: bool(asked.append(1)), None, None)
    loaders = [Loader() for _ in range(3)]
    assert off.tell() is None
    assert asked == []  # nobody uses Ray yet
    for loader in loaders:
        off.watch(loader)
        assert off.tell() is None
        clock.now += 10.0
    assert asked == [1]
    assert not off.watch(Loader())


def test_what_is_new_is_told_once_in_a_while(clock, told):
    told_to, loader = on(told), Loader()
    tally = loader.begin()
    assert told_to.watch(loader)
    assert not told_to.watch(loader)  # it is known
    give(tally, 3)
    assert told_to.tell() == INTERVAL_S
    assert told.of("train").items() >= {"batches": 3, "samples": 12, "bytes": 300, "worker_busy_seconds": 1.5}.items()
    assert told.of("train").items() >= {"workers": 2, "bytes_under_way": 30, "bytes_held": 4}.items()
    give(tally, 2)
    clock.now += 0.25
    assert told_to.tell() == INTERVAL_S - 0.25
    assert told.of("train")["batches"] == 3
    clock.now += INTERVAL_S
    assert told_to.tell() == INTERVAL_S
    assert told.of("train")["batches"] == 5


def test_epochs_are_one_and_loaders_of_one_name_are_added_up(clock, told):
    told_to, loaders = on(told), [Loader(), Loader(), Loader("validation")]
    for number, loader in enumerate(loaders):
        told_to.watch(loader)
        for _ in range(2):
            give(loader.begin(), 1 + number)
            clock.now += INTERVAL_S
            told_to.tell()
    assert told.of("train")["batches"] == 2 * 1 + 2 * 2
    assert told.of("train")["workers"] == 4
    assert told.of("validation")["batches"] == 2 * 3


def test_the_last_batches_of_a_loader_are_told_though_it_is_gone(clock, told):
    told_to, loader = on(told), Loader()
    tally = loader.begin()
    told_to.watch(loader)
    told_to.tell()
    give(tally, 7)
    del loader, tally
    gc.collect()
    clock.now += INTERVAL_S
    assert told_to.tell() is None
    assert told.of("train")["batches"] == 7
    assert not {"workers", "bytes_under_way", "bytes_held"} & told.of("train").keys()


def test_the_end_of_a_session_does_not_wait_until_it_is_due(clock, told):
    told_to, loader = on(told), Loader()
    told_to.watch(loader)
    told_to.tell()
    give(loader.begin(), 1)
    told_to.tell(at_once=True)
    assert told.of("train")["batches"] == 1


def test_where_ray_refuses_that_is_said_once_and_no_more_is_told(clock, caplog):
    def refuse(*_):
        raise ValueError("no such metric")

    refused, loader = Metrics(lambda: True, refuse, refuse), Loader()
    refused.watch(loader)
    with caplog.at_level(logging.WARNING, logger="rayloader"):
        for _ in range(2):
            assert refused.tell() is None
            clock.now += INTERVAL_S
            refused.watch(loader)
    assert ["Ray has refused the metrics" in record.getMessage() for record in caplog.records] == [True]


def test_names_are_those_that_prometheus_and_ray_take():
    assert all(name.startswith("rayloader_") and name.replace("_", "").isalpha() for name in (*COUNTERS, *GAUGES))


def test_the_page_lists_each_metric_as_prometheus_has_it():
    page = (Path(__file__).parents[2] / "docs" / "loader-or-model.md").read_text()
    counters = {f"ray_{name}_total": text for name, (text, _) in COUNTERS.items()}
    gauges = {f"ray_{name}": text for name, text in GAUGES.items()}
    listed = dict(re.findall(r"^\| `(ray_\w+)` \| (.*) \|$", page, re.MULTILINE))
    assert listed == {name: text.removesuffix(".") for name, text in {**counters, **gauges}.items()}
