"""The fork server, asked as Ray's raylet has it asked, with arguments that have Ray's script do nothing but print."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

import programs
from rayloader.actors import fork_server
from rayloader.actors.default_worker import MADE, REPORT, VARIABLE, is_hash_seed_chosen
from rayloader.actors.fork_server import SCRIPT, ExitReports, ForkServer

LIMIT = 120  # seconds for a process to end; on expiry the test fails


@pytest.fixture(scope="module")
def server():
    """A fork server in the environment in which all will ask: without what pytest sets anew for each step of a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")
        server = ForkServer()
    yield server
    server.close()


def ask(name, *arguments, **more):
    """A process that Ray might start, and what it has printed."""
    environment = {**os.environ, VARIABLE: name, **more}
    del environment["PYTEST_CURRENT_TEST"]
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_rays_script_is_run_once_by_the_fork_and_prints_what_the_process_would_print(server):
    asked, plain = ask(server.environment[VARIABLE], "--no-such"), ask("no-such-server", "--no-such")
    assert plain.stderr.count("usage: default_worker.py") == 1
    assert "the following arguments are required" in plain.stderr
    assert (asked.stdout, asked.stderr) == (plain.stdout, plain.stderr)


def test_one_that_is_given_up_has_ended_and_changes_nothing_of_ray():
    server = ForkServer()
    process = psutil.Process(server._process.pid)
    server.give_up()
    assert not process.is_running()
    assert (server.environment, server.worker_path, server.reports.descriptor) == ({}, None, None)
    server.close()


def forks(server):
    return psutil.Process(server._process.pid).children()


def test_another_environment_is_not_served(server):
    """Whoever asks first says which one is."""
    ask(server.environment[VARIABLE], "--help")
    before = psutil.Process(server._process.pid).cpu_times()
    other = ask(server.environment[VARIABLE], "--help", OMP_NUM_THREADS="7")
    assert other.stdout.count("usage: default_worker.py") == 1
    assert psutil.Process(server._process.pid).cpu_times().children_user == before.children_user  # none has ended


def test_how_a_fork_has_ended_is_known(server):
    for arguments, status in ((), 2 << 8), (("--help",), 0):
        assert server.reports.exit_status(0) is None  # there is no such fork
        before = set(server.reports._reports)
        ask(server.environment[VARIABLE], *arguments)
        assert server.reports.exit_status(0) is None
        (pid,) = set(server.reports._reports) - before
        assert server.reports.exit_status(pid) == status


def test_what_ray_notices_first_is_waited_for_and_what_is_unknown_is_not(monkeypatch):
    read_end, write_end = os.pipe()
    reports = ExitReports(read_end)
    os.write(write_end, REPORT.pack(7, MADE) + REPORT.pack(8, MADE))
    late = threading.Timer(0.0, os.write, (write_end, REPORT.pack(7, signal.SIGKILL)))
    late.start()
    assert reports.exit_status(7) == signal.SIGKILL
    monkeypatch.setattr(fork_server, "REPORT_PATIENCE_S", 0.0)
    assert reports.exit_status(8) is None  # it lives
    os.close(write_end)
    assert reports.exit_status(8) is None  # the server has died
    reports.close()
    assert reports.exit_status(8) is None
    assert reports.exit_status(7) == signal.SIGKILL  # it was read before
    late.join()


def test_where_nobody_asks_any_more_no_fork_is_left(server):
    """A process that is killed before it is told of a fork."""
    asking = subprocess.Popen([sys.executable, SCRIPT, "--help"], env={**os.environ, **server.environment})
    asking.kill()
    asking.wait(LIMIT)
    ask(server.environment[VARIABLE], "--help")  # it has dealt with the first by now
    assert psutil.wait_procs(forks(server), LIMIT)[1] == []


def test_a_working_directory_that_was_removed_is_no_obstacle(server, tmp_path):
    ask(server.environment[VARIABLE], "--help")  # says which environment is served
    folder = tmp_path / "gone"
    folder.mkdir()
    command = ["sh", "-c", 'rmdir "$PWD" && exec "$0" "$@"', sys.executable, SCRIPT, "--help"]
    environment = {**os.environ, **server.environment}
    del environment["PYTEST_CURRENT_TEST"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.stdout.count("usage: default_worker.py") == 1, done.stderr


def test_it_ends_with_its_owner():
    program = """
import os
from rayloader.actors.fork_server import ForkServer
server = ForkServer()
print(server._process.pid, flush=True)
os._exit(0)
"""
    started = programs.run(program).stdout
    if psutil.pid_exists(int(started)):
        psutil.Process(int(started)).wait(LIMIT)


def test_it_is_closed_once_and_a_fork_of_its_owner_leaves_it_alone():
    server = ForkServer()
    process = server._process
    child = os.fork()
    if not child:
        server.forget()
        server.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert process.poll() is None
    server.close()
    assert process.returncode == -signal.SIGKILL
    server.close()


@pytest.mark.parametrize(("value", "chosen"), [("", False), ("random", False), ("0", True), ("7", True)])
def test_only_a_number_chooses_what_strings_hash_to(value, chosen, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", value)
    assert is_hash_seed_chosen() is chosen


def test_owner_and_server_mean_the_same_by_a_report():
    assert (fork_server.REPORT.format, fork_server.MADE) == (REPORT.format, MADE)
