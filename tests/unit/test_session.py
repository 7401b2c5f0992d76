"""A Ray that cannot be joined or started: what happened, and what to do."""

import contextlib
import itertools
import os
import threading

import pytest
import ray

import rayloader
from handlers import interrupted
from rayloader import RaySessionError, interrupts
from rayloader.actors import pool, session
from rayloader.workers import ray_use

HANG_LIMIT = 500  # seconds


class Failed(Exception):
    """In place of what Ray raises."""


@pytest.fixture
def no_ray(monkeypatch):
    """Whatever other tests have started."""
    monkeypatch.setattr(session, "current", lambda: None)
    monkeypatch.setattr(session, "_starter", None)
    monkeypatch.setattr(ray_use, "_is_connected", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


SLOW = "The current node timed out during startup."


@pytest.fixture
def start_fails(no_ray, monkeypatch):
    """Sets what starting Ray raises, one error for each try; gives the threads that have tried."""

    def prepare(*errors):
        left, threads = [*errors], []

        def fail(**_):
            threads.append(threading.current_thread())
            raise Exception(left.pop(0))

        monkeypatch.setattr(ray, "init", fail)
        return threads

    return prepare


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        (None, None, r"could not be started on this machine: run `ray start --head`"),
        ("local", None, "could not be started on this machine"),
        ("127.0.0.1:1", None, r"RAY_ADDRESS=127\.0\.0\.1:1 names could not be joined; name a running one, or unset it"),
        (None, {"num_cpus": -1}, r"or check the options num_cpus\. Ray said"),
    ],
)
def test_a_ray_that_does_not_come_up_is_an_error_that_says_what_to_do(
    address, options, message, start_fails, monkeypatch
):
    start_fails(SLOW, SLOW)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RaySessionError, match=message) as caught:
        session.ensure(options)
    assert str(caught.value).endswith(f"Ray said: {SLOW}")
    assert str(caught.value.__cause__) == SLOW


@pytest.mark.parametrize("later", [SLOW, "another reason"])
def test_a_ray_whose_daemon_was_slow_is_started_once_more(later, start_fails):
    """As on a busy machine; by another thread, because its daemons end with the one that has started them."""
    threads = start_fails(SLOW, later)
    with pytest.raises(RaySessionError, match=f"Ray said: {later}"):
        session.ensure()
    assert len({*threads}) == 2


def test_what_a_ray_that_has_failed_had_started_is_ended(start_fails, monkeypatch):
    ended = []
    start_fails("as planned")
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(threading.current_thread().name))
    monkeypatch.setattr(session, "connection_of", lambda _: None)
    with pytest.raises(RaySessionError, match="as planned"):
        session.ensure()
    assert ended == ["rayloader-session"]


def test_whoever_is_interrupted_while_ray_starts_it_is_started_by_the_thread_that_is_known(no_ray, monkeypatch):
    """Else the next use would start another one beside it, and neither Ray would come up, or end."""
    known = []

    def begin(self):
        known.append(self is session._starter)
        raise Failed

    files = {threading.__file__, interrupts.__file__, session.__file__}
    monkeypatch.setattr(session.Starter, "_init", begin)
    for number in itertools.count():
        monkeypatch.setattr(session, "_starter", None)
        fired = False
        with contextlib.suppress(Failed):
            fired = interrupted(files, number, session.ensure)
        with pytest.raises(Failed):
            session.ensure()
        if not fired:
            break
    assert number > 1
    assert all(known)


@pytest.fixture
def slow_start(no_ray, monkeypatch):
    """Ray starts until this event is set."""
    ends = threading.Event()

    def start(_):
        ends.wait(HANG_LIMIT)
        raise Failed

    monkeypatch.setattr(session, "START_TICK_S", 0.01)
    monkeypatch.setattr(session.Starter, "_init", start)
    yield ends
    ends.set()
    session._starter.join()


@pytest.mark.parametrize(
    ("address", "told"),
    [("", "Ray, which is still starting"), ("192.0.2.1:9", "the Ray at 192.0.2.1:9: is it running?")],
)
def test_a_start_of_ray_that_takes_long_is_told_and_one_that_never_ends_is_an_error(
    slow_start, monkeypatch, caplog, address, told
):
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(session, "START_NOTICE_S", 0.0)
    monkeypatch.setattr(session, "START_LIMIT_S", 0.0)
    with pytest.raises(RaySessionError, match=r"has not started on this machine within 0 s.*`ray start --head`"):
        session.ensure()
    assert caplog.messages == [f"rayloader: after 0 s still waiting for {told}"]


@pytest.mark.parametrize("address", [None, "local"])
def test_a_ray_that_is_started_here_has_the_programs_options_beside_our_own(address, no_ray, monkeypatch):
    started = []

    def note(**options):
        started.append((options, dict(os.environ)))
        raise Failed

    monkeypatch.setattr(ray, "init", note)
    monkeypatch.setenv("RAY_worker_niceness", "7")
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    before = dict(os.environ)
    with pytest.raises(RaySessionError):
        session.ensure({"num_cpus": 3, "resources": {"mine": 2}})
    ((options, environment),) = started
    resources = {"mine": 2, session.OVERSUBSCRIBE_RESOURCE: 1}
    assert options == {"address": "local", "include_dashboard": False, "num_cpus": 3, "resources": resources}
    assert environment == session.LOCAL_RAY_ENVIRONMENT | before, "the program's own variables stay"
    assert dict(os.environ) == before


def test_a_ray_that_init_was_asked_for_is_used_until_the_shutdown(no_ray, monkeypatch):
    failing = [Failed()]

    def ensure(options):
        if failing:
            raise failing.pop()
        return "a session", "a job"

    monkeypatch.setattr(session, "ensure", ensure)
    monkeypatch.setattr(pool, "_pool", None)
    assert ray_use.is_own is session.started_here
    rayloader.shutdown()
    with pytest.raises(Failed):
        rayloader.init()
    assert not ray_use.is_used()
    rayloader.init()
    assert ray_use.is_used()
    rayloader.shutdown()
    assert not ray_use.is_used()


@pytest.mark.parametrize(("value", "on"), [(None, False), ("0", False), ("1", True), ("true", True), ("False", False)])
def test_whether_ray_encrypts_is_what_ray_reads(value, on, monkeypatch):
    if value is None:
        monkeypatch.delenv("RAY_USE_TLS", raising=False)
    else:
        monkeypatch.setenv("RAY_USE_TLS", value)
    assert session.uses_tls() is on
