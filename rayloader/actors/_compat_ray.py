"""Every private name of Ray that rayloader uses: where to look when a new version of it differs.

Promise: without any of them the loader works by Ray's public functions, more slowly or with less comfort, and a line in
the log says so.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import operator
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rayloader.errors import TESTED

# Ray's loggers that report at its start what is of no interest for a Ray of one program.
RAY_START_LOGGERS = "ray._private.worker", "ray._private.authentication.authentication_token_setup"

logger = logging.getLogger("rayloader")

_OF_TRAIN = "train.torch.train_loop_utils._WrappedDataLoader"
# Names are paths from the module. To which loggers Ray's modules write is looked up by their own names.
NAMES = (
    "_private.worker.global_worker.connected",
    "_private.worker.global_worker.node",
    "_raylet.InnerGcsClient.get_cluster_status",
    "_raylet.InnerGcsClient.internal_kv_get",
    "core.generated.autoscaler_pb2.GetClusterStatusReply",
    "_private.ray_constants.DEBUG_AUTOSCALING_STATUS",
)
# Those of which nothing is said at the start: before the first connection there are none, or it costs nothing that they
# are missing; and Ray imports Train when that is looked up.
OTHERS = (
    "_private.worker.global_worker.listener_thread",
    "_private.worker.global_worker.gcs_client",
    "_private.node.Node.session_name",
    _OF_TRAIN,
)


def _found(ray: ModuleType, name: str, otherwise: Any = None) -> Any:
    """What has this name, or the last argument if this version of Ray lacks it."""
    try:
        return operator.attrgetter(name)(ray)
    except AttributeError:
        return otherwise


def _member(owner: object, name: str) -> Any:
    """What has this name, of a class, in one of its objects; None if that lacks it."""
    return getattr(owner, name.rpartition(".")[2], None)


@functools.cache  # says it once
def tell_lacks(ray: ModuleType, names: tuple[str, ...] = NAMES) -> None:
    """Logs which of these names this version of Ray lacks."""
    lacks = object()
    if lacking := [name for name in names if _found(ray, name, lacks) is lacks]:
        logger.warning(
            "rayloader: Ray %s lacks private names that public ones replace, which are slower or tell less: %s. Tested "
            "were Ray %s",
            importlib.metadata.version("ray"),
            ", ".join(lacking),
            TESTED["ray"],
        )


class _Connection:
    """In place of Ray's own object: the connection to a session, for a job."""

    def __init__(self, session_name: str, job_id: str) -> None:
        self.session_name = session_name


_connection = functools.lru_cache(maxsize=1)(_Connection)  # the same object as long as the connection is the same


def has_lost_threads(ray: ModuleType) -> bool:
    """Whether this process was forked from a driver that was connected: the fork has the connection, but no thread.

    Ray's Python thread has ended, too, while another thread connects or shuts down; gRPC's threads live then.
    """
    listener = _found(ray, "_private.worker.global_worker.listener_thread")
    if listener is None or listener.is_alive():
        return False
    return not any(name.read_text().startswith("grpc") for name in Path("/proc/self/task").glob("*/comm"))


def connection_of(ray: ModuleType) -> Any:
    """An object that represents this process's connection to a cluster, and ends with it; None if there is none."""
    is_connected = _found(ray, "_private.worker.global_worker.connected")
    node = _found(ray, "_private.worker.global_worker.node") if is_connected else None
    if node is not None or is_connected is False:
        return node
    client = sys.modules.get("ray.util.client")
    if not ray.is_initialized() or (client is not None and client.ray.is_connected()):
        return None
    context = ray.get_runtime_context()
    try:
        return _connection(context.get_session_name(), context.get_job_id())
    except (RuntimeError, AttributeError):  # another thread shuts Ray down meanwhile
        return None


def session_name_of(ray: ModuleType, connection: Any) -> str:
    """The name of the session of such a connection."""
    name = _member(connection, "_private.node.Node.session_name")
    return str(ray.get_runtime_context().get_session_name() if name is None else name)


def said_of_end(text: str) -> str:
    """What Ray says of the end of an actor: without the actor's fields and advice; "" if it has only seen the end."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith("\t")]
    said = re.split(r" (?:Some common causes|There are some potential root causes)\b", " ".join(filter(None, lines)))[0]
    return "" if re.search(r"exits with a connection error code \d+\. End of file\.?$", said) else said


def cluster_status(ray: ModuleType, timeout: float) -> tuple[Any, dict[str, Any]]:
    """What Ray's GCS knows of the cluster, and the autoscaler of either version of itself.

    Args:
        ray: the module.
        timeout: how long to wait for each of two answers, in seconds.

    Returns:
        A `GetClusterStatusReply`: the state of each node, the demand that has no place, and what the autoscaler of
        version 2 does. And the report of that of version 1, which is empty if there is none.

    Raises:
        RpcError: the GCS has not answered.
        TypeError: it cannot be asked.
    """
    client = _found(ray, "_private.worker.global_worker.gcs_client")
    reply = _found(ray, "core.generated.autoscaler_pb2.GetClusterStatusReply")()
    reply.ParseFromString(_member(client, "_raylet.InnerGcsClient.get_cluster_status")(timeout_s=timeout))
    key = _found(ray, "_private.ray_constants.DEBUG_AUTOSCALING_STATUS")
    look_up = _member(client, "_raylet.InnerGcsClient.internal_kv_get")
    report = None if key is None else look_up(key.encode(), None, timeout=timeout)
    return reply, json.loads(report) if report else {}


def node_first(ray: ModuleType, node_id: str) -> Any:
    """The scheduling strategy of actors that should run on this node if it has room, otherwise on another one.

    Ray's public argument, `soft`, makes an actor wait for the node as long as it could ever have room.
    """
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    try:
        return affinity(node_id, soft=True, _spill_on_unavailable=True)
    except TypeError:  # this version of Ray has no such argument
        return affinity(node_id, soft=True)


def wrapped_loader_classes() -> tuple[type, ...]:
    """The class of the loaders that Ray Train's `prepare_data_loader` returns, if that is imported."""
    module = sys.modules.get(f"ray.{_OF_TRAIN.rpartition('.')[0]}")
    if module is None:
        return ()
    wrapped = _member(module, _OF_TRAIN)
    if wrapped is None:
        tell_lacks(sys.modules["ray"], (_OF_TRAIN,))
    return () if wrapped is None else (wrapped,)
