"""The ranks of torchrun on one machine share one Ray, which ends after the last of them, however the ranks end."""

import contextlib
import os
import subprocess
import sys
import uuid
from functools import cache
from pathlib import Path

import psutil
import pytest
import torch

from latches import Gate

FOLDER = Path(__file__).parent
HANG_LIMIT = 240  # seconds for a script; on expiry it is killed and the test fails
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or ranks that are started again find addresses of the ones before
}
EXIT_LIMIT = 60  # seconds for Ray's processes to end after the last rank; on expiry the test fails


@pytest.fixture
def mark():
    """In the environment of everything that a test starts, and of nothing else; nothing of it may be left."""
    value = f"of {uuid.uuid4()}"
    yield {"RAYLOADER_TEST": value}
    try:
        assert psutil.wait_procs(marked(value), EXIT_LIMIT)[1] == []
    finally:
        for process in marked(value):
            with contextlib.suppress(psutil.Error):
                process.kill()


def marked(value):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAYLOADER_TEST") == value:
                found.append(process)
    return found


def start(command, environment):
    inherited = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env={**inherited, **ENVIRONMENT, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(mark, loader, folder, *options):
    command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options
    return start([*command, FOLDER / "script_torchrun.py", loader, folder], mark)


def results(launcher, folder, name):
    """What both ranks have left, once torchrun has ended."""
    output, errors = launcher.communicate(timeout=HANG_LIMIT)
    assert (launcher.returncode, output) == (0, ""), errors
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(2)]


def check_trained_alike(found, expected):
    for rank in range(2):
        assert len(found[rank]["batches"]) == len(expected[rank]["batches"]) == 14
        assert all(map(torch.equal, found[rank]["batches"], expected[rank]["batches"]))
        assert all(map(torch.equal, found[rank]["parameters"], expected[0]["parameters"]))
    assert not torch.equal(found[0]["batches"][0], found[1]["batches"][0])


def check_ray_was_one(found):
    assert found[0]["session"] == found[1]["session"]
    assert len(found[0]["processes"]) > 4
    assert (found[0]["keepers with torch"], found[0]["forks"]) == ([False], 2)
    check_gone(found[0]["processes"])


def check_gone(pids):
    left = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(left, EXIT_LIMIT)[1] == []


@pytest.fixture(scope="module")
def torchs(tmp_path_factory):
    """The results of the same training with torch's loader; it runs beside the first test."""
    folder = tmp_path_factory.mktemp("torchs")
    launcher = launch({}, "torch", folder)
    yield cache(lambda: results(launcher, folder, "torch-0"))
    launcher.communicate(timeout=HANG_LIMIT)


@pytest.mark.full
def test_two_ranks_train_as_with_torchs_loader_and_share_one_ray(torchs, mark, tmp_path):
    found = results(launch(mark, "rayloader", tmp_path), tmp_path, "rayloader-0")
    check_trained_alike(found, torchs())
    check_ray_was_one(found)


@pytest.mark.full
def test_ranks_that_torchrun_starts_again_share_one_ray_again(torchs, mark, tmp_path):
    """Rank 0 is killed in the midst of the first round."""
    found = results(launch(mark, "rayloader", tmp_path, "--max-restarts=1"), tmp_path, "rayloader-1")
    assert not (tmp_path / "rayloader-0-1.pt").exists()
    check_trained_alike(found, torchs())
    check_ray_was_one(found)


@pytest.mark.full
def test_two_torchruns_at_the_same_time_have_two_rays(mark, tmp_path):
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    launchers = [launch(mark, "rayloader", folder) for folder in folders]
    found = [results(*both, "rayloader-0") for both in zip(launchers, folders, strict=True)]
    for ranks in found:
        check_ray_was_one(ranks)
    assert found[0][0]["session"] != found[1][0]["session"]


class Rank:
    """A process that is told by its environment that it is one of two ranks of this machine."""

    def __init__(self, mark, number, gate):
        told = {"LOCAL_RANK": number, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0, "MASTER_ADDR": "localhost"}
        told |= {"MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": mark["RAYLOADER_TEST"]}
        variables = {key: str(value) for key, value in told.items()}
        self.process = start([FOLDER / "script_rank.py", gate.path], {**mark, **variables, "PYTHONUNBUFFERED": "1"})

    def tell(self, command):
        """Does not wait for what it says."""
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def says(self):
        """The answer to what it was told."""
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return line.strip()

    def do(self, command):
        self.tell(command)
        return self.says()

    def kill(self):
        self.process.kill()
        self.process.communicate()

    def finish(self):
        errors = self.process.communicate(timeout=HANG_LIMIT)[1]
        assert (self.process.returncode, "Traceback" in errors) == (0, False), errors
        return errors


@pytest.fixture
def gate(tmp_path):
    return Gate(tmp_path / "gate")


@pytest.fixture
def rank(mark, gate):
    made = []

    def make(number):
        made.append(Rank(mark, number, gate))
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.mark.full
def test_ranks_come_and_go_and_are_killed(rank, gate):
    gate.open()
    ranks = [rank(0), rank(1)]
    session = ranks[0].do("use")
    everything = list(map(int, ranks[0].do("ray").split()))
    assert ranks[1].do("begin") == "0"
    ranks[0].kill()  # the first, by which the keeper was started
    assert ranks[1].do("go on") == "[1, 2, 3]"
    ranks[0] = rank(0)
    assert ranks[0].do("use") == session
    assert ranks[1].do("shutdown") == "shut down"
    assert ranks[0].do("use") == session
    assert ranks[1].do("use") == session
    ranks[0].finish()
    assert ranks[1].do("use") == session
    everything += map(int, ranks[1].do("ray").split())
    ranks[1].kill()
    check_gone(everything)


@pytest.mark.full
def test_a_keeper_that_is_killed_takes_ray_along_and_the_next_epoch_has_another(rank, gate):
    ranks = [rank(0), rank(1)]
    for one in ranks:
        assert one.do("begin") == "0"
    everything = list(map(int, ranks[0].do("ray").split()))
    for one in ranks:
        one.tell("go on")
    psutil.Process(everything[0]).kill()
    for one in ranks:
        assert one.says().startswith("RaySessionError: Ray was shut down while this iterator was live; its workers are")
    gate.open()
    sessions = {one.do("use") for one in ranks}
    assert len(sessions) == 1
    assert sessions.pop().startswith("[0, 1, 2, 3] session_")
    for one in ranks:
        assert "rayloader: the process that kept Ray for the ranks of this machine has died" in one.finish()
