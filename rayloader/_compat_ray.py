"""Every private name of Ray that rayloader uses: where to look when a new version of it differs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import operator
import random
import re
import socket
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from rayloader.errors import private_names_of

# Ray's loggers that report at its start what is of no interest to a program that has not asked for Ray.
RAY_START_LOGGERS = "ray._private.worker", "ray._private.authentication.authentication_token_setup"
# The ports of the dashboard's agent. The last has a default, which is the same for every Ray of a machine.
DASHBOARD_PORTS = "metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"
# The ports of all agents of a node: the arguments of `services.start_raylet`, and the names of the files with them.
AGENT_PORTS = "runtime_env_agent_port", *DASHBOARD_PORTS


# What the functions here need, as paths from the module; they do without what is not listed.
_NEEDED = (
    "ObjectRef._on_completed",
    "_private.worker.global_worker.connected",
    "_private.worker.global_worker.node",
    "_private.state.actors",
    "_private.state.state.available_resources_per_node",
    "_private.state.state.get_draining_nodes",
    "_private.state.state.get_max_resources_from_cluster_config",
    "_private.parameter.RayParams",
    "_private.services.start_api_server",
    "_private.services.start_raylet",
    "_private.services.start_ray_process",
    "_private.ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT",
)


def check(ray: ModuleType) -> None:
    """Raises an ImportError if this version of Ray lacks a name that is needed here."""
    with private_names_of("ray"):
        operator.attrgetter(*_NEEDED)(ray)


def on_completed(ref: Any, callback: Callable[[Any], None]) -> None:
    """Makes one of Ray's threads call this with the answer of a call, or with Ray's error."""
    ref._on_completed(callback)


def connection_of(ray: ModuleType | None) -> Any:
    """An object that represents this process's connection to a cluster, and ends with it; None if there is none.

    There is none either while Ray is not imported, or only in part. The object's `session_name` is what newer versions
    of Ray return from `get_runtime_context().get_session_name()`.
    """
    worker = getattr(getattr(getattr(ray, "_private", None), "worker", None), "global_worker", None)
    return worker.node if worker is not None and worker.connected else None


def has_process(ray: ModuleType, actor: Any) -> bool:
    """Whether Ray has found a place for an actor and a process there, which need not run the actor yet."""
    return bool(ray._private.state.actors(actor._actor_id.hex()).get("Pid"))


def said_of_end(text: str) -> str:
    """What Ray says of the end of an actor: without the actor's fields and advice; "" if it has only seen the end."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith("\t")]
    said = re.split(r" (?:Some common causes|There are some potential root causes)\b", " ".join(filter(None, lines)))[0]
    return "" if re.search(r"exits with a connection error code \d+\. End of file\.?$", said) else said


_DEATH = re.compile(r"A worker died or was killed while.*? Node ID: (\w+) .*? Worker PID: (\d+) ", re.DOTALL)


def leave_out_deaths(ray: ModuleType, of: Callable[[tuple[str, int]], bool]) -> None:
    """Keeps Ray from printing in this process that certain processes have died: `of` is asked with node and pid."""
    before = getattr(ray._private.worker, "print_to_stdstream", None)
    if before is None:
        return

    @functools.wraps(before)
    def print_others(data: dict[str, Any], *args: Any, **options: Any) -> None:
        deaths = [_DEATH.match(line) for line in data["lines"]] if data["pid"] == "raylet" else [None]
        if not all(found is not None and of((found[1], int(found[2]))) for found in deaths):
            before(data, *args, **options)

    ray._private.worker.print_to_stdstream = print_others


def set_process_title(ray: ModuleType, title: str) -> None:
    """Sets what `ps` and `top` show of this process; Ray sets it again when a call of an actor begins or ends."""
    change = getattr(ray._private.worker, "_changeproctitle", None)
    if change is not None:
        with change(title, title):  # the function it calls has moved between versions
            pass


def may_autoscale(ray: ModuleType) -> bool:
    """Whether the cluster that Ray is connected to has an autoscaler."""
    return ray._private.state.state.get_max_resources_from_cluster_config() is not None


def draining_nodes(ray: ModuleType) -> dict[str, int]:
    """The nodes that will leave, and when, in milliseconds since 1970; 0 if that is open."""
    nodes: dict[str, int] = ray._private.state.state.get_draining_nodes()
    return nodes


def node_first(ray: ModuleType, node_id: str) -> Any:
    """The scheduling strategy of actors that should run on this node if it has room, otherwise on another one.

    Ray's public argument, `soft`, makes an actor wait for the node as long as it could ever have room.
    """
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    known = "_spill_on_unavailable" in inspect.signature(affinity).parameters
    return affinity(node_id, soft=True, _spill_on_unavailable=True) if known else affinity(node_id, soft=True)


def give_own_random(ray: ModuleType) -> None:
    """Makes Ray's processes and connections draw from a generator of their own, not from the program's `random`."""
    for name, module in list(sys.modules.items()):
        if (
            name.startswith(("ray._private.", "ray._common.", "ray._raylet"))
            and getattr(module, "random", None) is random
        ):
            module.random = _random_of_ray()  # type: ignore[attr-defined]


@functools.cache
def _random_of_ray() -> ModuleType:
    """A second instance of the module `random`."""
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def authenticate(ray: ModuleType) -> None:
    """Does what `ray.init` does first when it starts a local Ray, for a process that joins one by its address.

    In versions of Ray that do not enable token authentication by default, that is nothing.
    """
    setup = getattr(getattr(ray._private, "authentication", None), "authentication_token_setup", None)
    enable = getattr(setup, "enable_token_auth_by_default", None)
    if enable is not None:
        enable()


@contextlib.contextmanager
def own_start(
    ray: ModuleType, worker_path: str | None, starting: contextlib.AbstractContextManager[Any], *, dashboard: bool
) -> Iterator[list[socket.socket]]:
    """A Ray of one machine and one program that starts in this block starts no processes that are useless to it.

    Args:
        ray: the module.
        worker_path: the script for its worker processes; None: Ray's own.
        starting: to be entered around the start of each process.
        dashboard: whether the dashboard was requested. Otherwise Ray would still start its process, with
            nothing to serve, and wait for it; and that of the autoscaler.

    Yields:
        A list for the sockets that reserve ports for the agents of that Ray, which may bind them much later. The
        code that ends that Ray closes them.
    """
    parameters, services = ray._private.parameter.RayParams, ray._private.services
    before, start_dashboard, start_raylet = parameters.__init__, services.start_api_server, services.start_raylet
    start_process = services.start_ray_process
    known = inspect.signature(before).parameters
    wanted = {"worker_path": worker_path, "no_monitor": not dashboard}
    parameters.__init__ = functools.partialmethod(before, **{key: wanted[key] for key in wanted if key in known})
    if not dashboard:
        services.start_api_server = lambda *_, **__: (None, None)

    @functools.wraps(start_process)
    def start_alone(*args: Any, **options: Any) -> Any:
        with starting:
            return start_process(*args, **options)

    services.start_ray_process = start_alone
    reserved: list[socket.socket] = []
    if hasattr(ray._raylet, "persist_port"):  # versions without it do not wait for these files
        services.start_raylet = functools.partial(_start_raylet_with_ports, ray, start_raylet, reserved)
    try:
        yield reserved
    finally:
        parameters.__init__ = before
        services.start_api_server, services.start_raylet = start_dashboard, start_raylet
        services.start_ray_process = start_process


def _start_raylet_with_ports(
    ray: ModuleType, start_raylet: Callable[..., Any], reserved: list[socket.socket], *args: Any, **options: Any
) -> Any:
    """Starts a node's raylet with ports for its agents, in the files in which it looks for them.

    Without these files it waits until the agents have written them, and aborts after 15 s. On a busy machine the agents
    need longer than that for their imports.
    """
    call = inspect.signature(start_raylet).bind(*args, **options)
    chosen = call.arguments
    missing = getattr(ray._private.utils, "get_dashboard_dependency_error", lambda: None)
    unused = DASHBOARD_PORTS if missing() is not None else ()
    open_ = None, 0, ray._private.ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
    for name in AGENT_PORTS:
        if name not in unused and chosen.get(name) in open_:
            reserved.append(socket.socket())
            reserved[-1].bind(("", 0))
            reserved[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # agents bind with this option as well
            chosen[name] = reserved[-1].getsockname()[1]
        port = -1 if name in unused else chosen[name]  # what the dashboard's agent writes if its packages are missing
        ray._raylet.persist_port(chosen["session_dir"], chosen["node_id"], name, port)
    return start_raylet(*call.args, **call.kwargs)


def wrapped_loader_classes() -> tuple[type, ...]:
    """The class of the loaders that Ray Train's `prepare_data_loader` returns, if that is imported."""
    wrapped = getattr(sys.modules.get("ray.train.torch.train_loop_utils"), "_WrappedDataLoader", None)
    return () if wrapped is None else (wrapped,)
