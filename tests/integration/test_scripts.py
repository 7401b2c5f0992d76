"""Scripts in processes of their own, `script_*.py` beside this file: how they end, and what is left of them."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import ray

from probes import in_each_worker
from programs import Program

FOLDER = Path(__file__).parent
HANG_LIMIT = 500  # seconds for a script; on expiry it is killed and the test fails
EXIT_LIMIT = 500  # seconds for Ray's processes to end after their driver; on expiry the test fails


def start(name, *arguments, joined=False, **options):
    """Starts a script; with `joined` in the Ray of this session, else outside any."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    if joined:
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    return subprocess.Popen(
        [sys.executable, FOLDER / name, *map(str, arguments)],
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def finish(script, limit=HANG_LIMIT):
    """Its output, once it has ended by itself."""
    try:
        output, errors = script.communicate(timeout=limit)
    finally:
        kill_group(script)
    return output.splitlines(), errors


def kill_group(script):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(script.pid, signal.SIGKILL)


def processes(line):
    """Those that a line `name: pid pid ...` names and that still run."""
    return [psutil.Process(int(pid)) for pid in line.split(":")[1].split() if psutil.pid_exists(int(pid))]


def check_gone(left):
    assert psutil.wait_procs(left, EXIT_LIMIT)[1] == []


@pytest.fixture(scope="module")
def sessions_script():
    """It waits most of its time, for a Ray that starts or ends: other scripts run beside it."""
    script = start("script_sessions.py")
    yield script
    finish(script)


@pytest.mark.parametrize("asked", [(), ("ray",)], ids=["forks", "actors"])
def test_a_script_ends_by_itself_whatever_is_still_alive(sessions_script, tmp_path, asked):
    script = start("script_exit.py", tmp_path, *asked) if asked else Program(FOLDER / "script_exit.py", tmp_path)
    output, errors = finish(script)
    assert (script.returncode, output[-1]) == (0, "the end"), errors
    assert "Traceback" not in errors
    check_gone(processes(output[0]))


def test_a_script_ends_by_itself_while_copies_to_a_device_are_pending():
    output, errors = finish(script := Program(FOLDER / "script_to_device.py"))
    assert (script.returncode, output[-1]) == (0, "done 3 3 0 True"), errors
    assert "Traceback" not in errors


@pytest.mark.full
def test_a_script_that_joins_a_running_ray_ends_and_takes_its_actors_along(ray_session, tmp_path):
    output, errors = finish(script := start("script_exit.py", tmp_path, joined=True))
    assert (script.returncode, output[-1]) == (0, "the end"), errors
    assert "Started a local Ray instance" not in errors
    check_gone(processes(output[0]))
    assert in_each_worker(lambda index: index) == [0, 1]  # Ray, and the session's own actors, are as they were


@pytest.fixture(params=["ray", "fork"])
def waiting_script(tmp_path, request, monkeypatch):
    """A script that waits in next(), and the processes that it started.

    Its folder for temporary files is `temporary` in `tmp_path`; Ray's is the usual one, whose name is short.
    """
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", os.environ.get("RAY_TMPDIR", tempfile.gettempdir()))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    script = start("script_wait.py", tmp_path, request.param)
    workers, everything = script.stdout.readline(), script.stdout.readline()
    assert everything, script.communicate()[1]
    workers, everything = processes(workers), processes(everything)
    assert len(workers) == 1
    assert len(everything) > 4 if request.param == "ray" else len(everything) == 2  # the zygote is the other one
    assert set(workers) < set(everything)
    yield script, everything
    kill_group(script)
    script.communicate()
    for process in everything:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_ctrl_c_ends_a_waiting_script_and_nothing_is_left(waiting_script):
    script, everything = waiting_script
    os.killpg(script.pid, signal.SIGINT)  # as a terminal sends it: to all of the process group
    _, errors = script.communicate(timeout=HANG_LIMIT)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert [Path(file).name for file in re.findall(r'File "(.*)", line', errors)] == ["script_wait.py", "iterator.py"]
    assert script.returncode == -signal.SIGINT  # as without us: a shell sees why it ended
    assert "INFO worker.py" not in errors  # what Ray says of a Ray of ours
    assert "authentication" not in errors
    check_gone(everything)


@pytest.mark.full
def test_a_killed_driver_takes_everything_along_and_leaves_no_files(waiting_script, tmp_path):
    """But for Ray's own folder, with its logs, as after any end of a Ray."""
    script, everything = waiting_script
    agents = [process for process in everything if process.name().endswith("Agent")]
    assert len(agents) == 2 * (len(everything) > 2)  # where there is a Ray
    script.kill()
    script.wait()
    # Ray's two agents notice it too, but take more than a minute, whoever started them.
    check_gone([process for process in everything if process not in agents])
    assert [*(tmp_path / "temporary").iterdir()] == []


@pytest.mark.full
def test_signal_handlers_stay_the_programs_and_ray_outlives_the_thread_that_iterated_first(tmp_path):
    """In its second Ray the script has no handler for SIGTERM, which ends it while it waits in next()."""
    script = start("script_signals.py", tmp_path)
    everything = script.stdout.readline()
    assert everything, script.communicate()[1]
    everything = processes(everything)
    assert len(everything) > 4
    agents = [process for process in everything if process.name().endswith("Agent")]
    script.terminate()
    output, errors = finish(script)
    assert (script.returncode, output) == (-signal.SIGTERM, []), errors
    assert "Traceback" not in errors
    assert "SIGTERM" not in errors  # Ray warns that it could not set a handler
    check_gone([process for process in everything if process not in agents])  # as after SIGKILL


def test_fork_with_a_live_iterator(ray_session):
    output, errors = finish(script := start("script_fork.py", joined=True))
    assert (script.returncode, output) == (0, ["the end"]), errors
    assert "an iterator works in the process that made it" in errors
    assert "Traceback" not in errors


@pytest.mark.full
def test_batches_in_arenas_outlive_the_workers_and_are_held_at_exit(ray_session):
    output, errors = finish(script := start("script_arenas.py", joined=True))
    assert (script.returncode, output) == (0, ["the end"]), errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("where", [pytest.param("parent", marks=pytest.mark.full), "child"])
def test_a_fork_of_a_program_that_uses_ray_has_forks(ray_session, where):
    """Also if its parent has not iterated, or not even imported rayloader, before."""
    program = (
        "import multiprocessing, os, sys, ray\n"
        "if sys.argv[1] == 'parent':\n"
        "    import rayloader\n"
        "ray.init(address=os.environ['RAY_ADDRESS'])\n"
        "def load():\n"
        "    import rayloader\n"
        "    loader = rayloader.DataLoader(range(4), None, num_workers=2)\n"
        "    assert list(loader) == [0, 1, 2, 3]\n"
        "    print(sorted({worker.process for worker in loader.stats().epoch.workers}), flush=True)\n"
        "process = multiprocessing.get_context('fork').Process(target=load)\n"
        "process.start()\n"
        "process.join()\n"
        "load()\n"
    )
    script = subprocess.run(
        [sys.executable, "-c", program, where],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert script.stdout.splitlines() == ["['fork']", "['Ray actor']"], script.stderr


def test_ray_and_rayloader_may_be_shut_down_under_live_iterators(sessions_script):
    output, errors = finish(sessions_script)
    assert (sessions_script.returncode, output) == (0, ["the end"]), errors
    assert "Traceback" not in errors


def test_without_actors_neither_ray_nor_what_the_program_has_not_is_imported():
    output, errors = finish(script := Program(FOLDER / "script_no_ray.py"))
    assert (script.returncode, output, errors) == (0, ["the end"], "")


@pytest.mark.full
def test_ray_and_workers_are_started_ahead():
    output, errors = finish(script := start("script_init.py"))
    assert script.returncode == 0, errors
    assert output == [
        "refused: True",
        "random: True",
        "heard: ['signal', 'end']",
        "workers: 2 ['rayloader:worker:0', 'rayloader:worker:1']",
        "cpus: 7.0 1.0",
        "workers: 3 ['rayloader:worker:0', 'rayloader:worker:1', 'rayloader:worker:2']",
        "Ray is running already, so its options num_cpus would have no effect; call rayloader.init() before anything "
        "else starts Ray, or leave them out",
        "left: 0",
    ]
    unexpected = [line for line in errors.splitlines() if "rayloader: waiting for" not in line]
    assert unexpected == []
