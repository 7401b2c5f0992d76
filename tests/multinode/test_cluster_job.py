"""The cluster of cluster.yaml on this machine: its head and its data nodes, each one sixteenth as large, run a job.

The head is started with the file's own command. Ray's autoscaler starts the data nodes, as raylets on this machine, and
`ray job submit` sends the example as docs/howto/cluster.md shows. Jobs need the packages of `ray[default]`, which pip
fetches into a folder of the test's: the other tests run with plain `ray`.
"""

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from autoscaling import HEAD, configuration, environment_of, free_port, head_of, listens, short_folder
from multinode_waiting import START_LIMIT, wait_until

pytestmark = [pytest.mark.multinode, pytest.mark.full]

ROOT = Path(__file__).parents[2]
CLUSTER = yaml.safe_load((ROOT / "cluster.yaml").read_text())
JOB_LIMIT = 300  # seconds; on expiry the test fails


def autoscaling(gcs_port):
    """The file as Ray's autoscaler reads it, for nodes of which each is a raylet here."""
    types = {HEAD if name == CLUSTER["head_node_type"] else name: kind for name, kind in small_types()}
    kept = {key: CLUSTER[key] for key in ("cluster_name", "max_workers", "idle_timeout_minutes")}
    return configuration(gcs_port, types, {}, **kept)


def small_types():
    """The node types: one CPU each, and one of each resource that the file names."""
    for name, kind in CLUSTER["available_node_types"].items():
        resources = {"CPU": 1, **dict.fromkeys(kind["resources"], 1)}
        bounds = {key: kind[key] for key in ("min_workers", "max_workers") if key in kind}
        yield name, {"resources": resources, "node_config": {}, "max_workers": 0, **bounds}


@pytest.fixture(scope="module")
def head(default_packages):
    """The running head: its ports, and the environment of whoever has the token."""
    with short_folder() as folder:
        gcs, dashboard = free_port(), free_port()
        variables = dict(option.removeprefix("--env ").split("=") for option in CLUSTER["docker"]["run_options"])
        home = {"HOME": str(folder)}  # where Ray looks for the token
        environment = {**environment_of(folder, default_packages), **variables, **home}
        subprocess.run(["ray", "get-auth-token", "--generate"], env=environment, check=True, capture_output=True)
        config = folder / "bootstrap.yaml"
        config.write_text(json.dumps(autoscaling(gcs)))
        replaced = {
            "--port=6379": f"--port={gcs}",
            "--object-manager-port=8076": "--node-ip-address=127.0.0.1",
            "~/ray_bootstrap_config.yaml": str(config),
            "ray start": "exec ray start",
        }
        command = CLUSTER["head_start_ray_commands"][-1]
        for theirs, ours in replaced.items():
            assert theirs in command
            command = command.replace(theirs, ours)
        command += f" --block --num-cpus=1 --dashboard-port={dashboard} --ray-client-server-port={free_port()}"
        with head_of(command, environment, folder) as process:
            wait_until(lambda: listens(dashboard) or process.poll() is not None, "the dashboard listens", START_LIMIT)
            assert process.poll() is None, (folder / "head.log").read_text()
            yield SimpleNamespace(dashboard=dashboard, environment=environment)


def submit(head, *program, folder="examples", **environment):
    """Submits a program as the page says; gives what `ray job submit` says."""
    command = ["ray", "job", "submit", "--address", f"http://localhost:{head.dashboard}", "--working-dir", folder]
    return subprocess.run(
        [*command, "--", "python", *program],
        env={**head.environment, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=JOB_LIMIT,
    )


def test_a_job_without_the_token_is_refused(head):
    refused = submit(head, "cluster.py", RAY_AUTH_MODE="disabled")
    assert refused.returncode != 0
    assert re.search("401|[Uu]nauthorized|[Aa]uthentication", refused.stdout + refused.stderr)


def test_the_dashboard_listens_on_localhost_only(head):
    listening = [one.laddr for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert {address.ip for address in listening if address.port == head.dashboard} == {"127.0.0.1"}


def test_the_job_trains_with_workers_on_nodes_that_the_autoscaler_starts(head):
    """Two workers, of which each fills one of these small nodes."""
    job = submit(head, "cluster.py", "--workers", "2", "--samples", "640")
    assert job.returncode == 0, job.stdout + job.stderr
    assert re.search(r"^loss \d+\.\d\d after 10 batches$", job.stdout, re.MULTILINE), job.stdout
    assert "nodes that built them: 2, this one not among them" in job.stdout


MAIN = """
import samples
from rayloader import DataLoader

loader = DataLoader(samples.Words(), 2, num_workers=2, ray_remote_args={"resources": {"data_worker": 1}})
print(list(loader), {worker.process for worker in loader.stats().total.workers})
"""
SAMPLES = """
class Words:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return open("words.txt").read().split()[index]
"""


def test_modules_and_files_of_the_job_reach_the_workers(head, tmp_path):
    for name, content in {"main.py": MAIN, "samples.py": SAMPLES, "words.txt": "one two three four"}.items():
        (tmp_path / name).write_text(content)
    done = submit(head, "main.py", folder=tmp_path)
    assert "[['one', 'two'], ['three', 'four']] {'Ray actor'}" in done.stdout, done.stdout + done.stderr
