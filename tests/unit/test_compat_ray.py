"""What Ray says of the end of processes, and what of it reaches the user; and a Ray that lacks a private name."""

import sys
from types import SimpleNamespace

import pytest
import ray
import ray.util.client
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply

from lacking import Changed, ray_without
from rayloader.actors import _compat_ray
from rayloader.actors._compat_ray import said_of_end

FIELDS = "\n\tclass_name: WorkerProcess\n\tactor_id: e61eb9\n\tpid: 3027\n"
DIED = "The actor died unexpectedly before finishing this task."
# Of Ray 2.46 and 2.60.
ADVICE = [
    " There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory "
    "usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV.",
    " Some common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop "
    "--force was called, or (3) the worker crashed unexpectedly due to SIGSEGV or another unexpected error. If the ...",
]
SEEN = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file."
)


NODE_DIED = "The actor is dead because its node has died. Node Id: 1e9e6ce2"


@pytest.mark.parametrize(
    ("said", "new"), [*((SEEN + more, "") for more in ["", *ADVICE]), (f"{NODE_DIED}\n", NODE_DIED)]
)
def test_that_a_process_is_gone_is_nothing_new_and_what_else_ray_knows_remains(said, new):
    assert said_of_end(DIED + FIELDS + said) == (f"{DIED} {new}" if new else "")


# --- a Ray that lacks a name

OF_TRAIN = _compat_ray._OF_TRAIN
NODE = "0" * 56


@pytest.fixture(autouse=True)
def nothing_said_yet():
    yield
    _compat_ray.tell_lacks.cache_clear()


def without(name):
    return ray_without(ray, name)


def connected(job="01", session="session_1", **members):
    """A Ray as `connection_of` sees it, and a function that shuts it down."""
    context = SimpleNamespace(get_session_name=lambda: session, get_job_id=lambda: job)
    worker = SimpleNamespace(connected=True, **members)
    module = SimpleNamespace(
        is_initialized=lambda: worker.connected,
        get_runtime_context=lambda: context,
        _private=SimpleNamespace(worker=SimpleNamespace(global_worker=worker)),
    )

    def shut_down():
        worker.connected = False
        if "node" in members:
            worker.node = None

    return module, shut_down


@pytest.mark.parametrize("other", [{"job": "02"}, {"session": "session_2"}])
def test_another_connection_is_another_object(other):
    before, after = (_compat_ray.connection_of(connected(**one)[0]) for one in ({}, other))
    assert before is not None
    assert after is not before


def test_a_connection_by_a_client_or_one_that_ends_meanwhile_is_none(monkeypatch):
    module, shut_down = connected()
    with monkeypatch.context() as patch:
        patch.setattr(ray.util.client, "ray", SimpleNamespace(is_connected=lambda: True))
        assert _compat_ray.connection_of(Changed(module, "_private")) is None

    def session_name():
        shut_down()
        raise RuntimeError("Ray has not been initialized")

    module.get_runtime_context().get_session_name = session_name
    assert _compat_ray.connection_of(module) is None


def answering(ray, **answers):
    """Ray, connected to a GCS with such methods."""
    return Changed(ray, "_private.worker.global_worker.gcs_client", SimpleNamespace(**answers))


STATUS = {"get_cluster_status": lambda timeout_s: REPLY.SerializeToString()}
REPORT = {"internal_kv_get": lambda key, namespace, timeout: b'{"time": 7}' if key == b"__autoscaling_status" else None}
REPLY = GetClusterStatusReply()
REPLY.cluster_resource_state.cluster_session_name = "as planned"


def test_the_cluster_is_what_the_gcs_and_the_autoscaler_say():
    reply, report = _compat_ray.cluster_status(answering(ray, **STATUS, **REPORT), 1.0)
    assert reply == REPLY
    assert report == {"time": 7}
    none = {"internal_kv_get": lambda key, namespace, timeout: None}
    assert _compat_ray.cluster_status(answering(ray, **STATUS, **none), 1.0) == (REPLY, {})
    without_key = without("_private.ray_constants.DEBUG_AUTOSCALING_STATUS")
    assert _compat_ray.cluster_status(answering(without_key, **STATUS, **REPORT), 1.0) == (REPLY, {})


def test_that_ray_train_hides_its_loaders_is_said_when_one_might_be_read(monkeypatch, caplog):
    module = f"ray.{OF_TRAIN.rpartition('.')[0]}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert _compat_ray.wrapped_loader_classes() == ()
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(_WrappedDataLoader=int))
    assert _compat_ray.wrapped_loader_classes() == (int,)
    assert caplog.messages == []
    monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    for _ in range(2):
        assert _compat_ray.wrapped_loader_classes() == ()
    assert [OF_TRAIN in message for message in caplog.messages] == [True]
