"""Heads of Ray clusters on this machine, whose autoscaler starts nodes: each of them is a raylet here."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)

HERE = Path(__file__).parent
HEAD = FAKE_HEAD_NODE_TYPE  # the name that the head's type must have
EXIT_LIMIT = 60  # seconds; on expiry the test fails


class HeldBack(FakeMultiNodeProvider):
    """Nodes that are asked for, and come when the file `come` is in the folder of the configuration."""

    def create_node_with_resources_and_labels(self, *asked: Any) -> None:
        while not (Path(self.provider_config["folder"]) / "come").exists():
            time.sleep(0.1)  # in the autoscaler's process, and not in the test's
        super().create_node_with_resources_and_labels(*asked)


def free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody does, on this machine."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def configuration(gcs_port: int, types: dict[str, Any], provider: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What `--autoscaling-config` names: for these types of nodes, of which `HEAD` is one."""
    lists = "initialization_commands setup_commands head_setup_commands worker_setup_commands cluster_synced_files"
    lists += " head_start_ray_commands worker_start_ray_commands rsync_exclude rsync_filter"
    return {
        "cluster_name": "of a test",
        **{key: [] for key in lists.split()},
        "provider": {
            "type": "fake_multinode",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": f"127.0.0.1:{gcs_port}",
            "launch_multiple": True,
            "use_node_id_as_ip": True,  # all have this machine's address
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            **provider,
        },
        "head_node_type": HEAD,
        "available_node_types": types,
        "upscaling_speed": 1.0,
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **more,
    }


@contextlib.contextmanager
def short_folder() -> Iterator[Path]:
    """Short, because Ray puts sockets below it."""
    folder = Path(tempfile.mkdtemp(prefix="rl", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def environment_of(folder: Path, *modules: Path) -> dict[str, str]:
    """For the programs of such a cluster, which keep what they write in that folder."""
    return {
        **{key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
        "RAY_TMPDIR": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, [HERE, HERE.parent, HERE.parents[1], *modules])),
    }


@contextlib.contextmanager
def head_of(command: str, environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command that starts a head, and ends it with all that it has started; its log is the file `head.log`."""
    fake = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
    fake |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID, "RAY_NODE_TYPE_NAME": HEAD}
    with (folder / "head.log").open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", command], env={**environment, **fake}, stdout=output, stderr=output, cwd=folder
        )
    try:
        yield process
    finally:
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        process.wait(EXIT_LIMIT)
        for left in psutil.wait_procs(started, timeout=5)[1]:
            left.kill()
        psutil.wait_procs(started, timeout=EXIT_LIMIT)
