"""The ranks of torchrun and the keeper of their Ray, with a stand-in for Ray itself, which leaves files behind."""

import os
import select
import socket
import threading
import uuid

import psutil
import pytest

from rayloader import RaySessionError
from rayloader.start import torchrun
from rayloader.start.torchrun import Membership, meeting_point

HANG_LIMIT = 60  # seconds for what another process or thread is to do; on expiry the test fails

RAY = """
import os
from types import SimpleNamespace

folder = os.environ["FAKE_RAY"]

def init(**settings):
    if "fail" in settings:
        raise ValueError("Ray does not want to")
    if "wait" in settings:
        with open(os.path.join(folder, "starting"), "w") as pipe:
            pipe.write(str(os.getpid()))
        with open(os.path.join(folder, "gate")) as pipe:
            pipe.read()
    with open(os.path.join(folder, f"started-{os.getpid()}"), "w") as file:
        file.write(os.environ["MARK"])

def get_runtime_context():
    return SimpleNamespace(gcs_address=str(os.getpid()))

class RayParams:
    pass

_raylet = SimpleNamespace()
services = SimpleNamespace(start_api_server=None, start_raylet=None, start_ray_process=os.getpid)
_private = SimpleNamespace(parameter=SimpleNamespace(RayParams=RayParams), services=services)

def shutdown():
    os.rename(os.path.join(folder, f"started-{os.getpid()}"), os.path.join(folder, f"ended-{os.getpid()}"))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "ray.py").write_text(RAY)
    (tmp_path / "torch.py").touch()  # the fork server imports it
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_RAY", str(tmp_path))
    monkeypatch.setenv("MARK", "of the first")  # what is in the environment reaches Ray
    return tmp_path


@pytest.fixture
def pipes(folder):
    """Where a Ray that is told to wait says that it starts, and is let go on."""
    os.mkfifo(folder / "starting")
    os.mkfifo(folder / "gate")


@pytest.fixture
def name():
    return f"rayloader-test-{uuid.uuid4()}"


@pytest.fixture
def ranks(name):
    """Makes members of the meeting point, and ends what is left of them."""
    made = []

    def make():
        made.append(Membership(name))
        return made[-1]

    yield make
    for member in made:
        leave(member)


def leave(member):
    member.leave()
    assert not member.wait()


def keeper_of(address):
    return psutil.Process(int(address))


def check_ended(folder, keeper):
    keeper.wait(HANG_LIMIT)
    assert (folder / f"ended-{keeper.pid}").exists()


def test_ray_ends_after_the_last_whatever_the_order(folder, ranks, monkeypatch):
    first, second, late = ranks(), ranks(), ranks()
    address = first.begin({})
    keeper = keeper_of(address)
    assert keeper.ppid() != os.getpid()
    assert keeper.terminal() is None
    monkeypatch.setenv("MARK", "of another")
    assert second.begin({}) == address
    leave(first)
    assert late.begin({}) == address
    leave(second)
    (started,) = folder.glob("*-*")
    assert (started.name, started.read_text()) == (f"started-{keeper.pid}", "of the first")
    leave(late)
    check_ended(folder, keeper)


@pytest.mark.usefixtures("pipes")
def test_who_comes_while_ray_starts_waits_for_the_same(folder, ranks):
    found = []
    threads = [threading.Thread(target=lambda: found.append(ranks().begin({"wait": 1}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    starting = (folder / "starting").read_text()
    (folder / "gate").write_text("go")
    for thread in threads:
        thread.join(HANG_LIMIT)
    assert found == [starting] * 8


def test_after_the_last_one_a_new_ray_is_started(folder, ranks):
    keepers = []
    for _ in range(3):
        member = ranks()
        keepers.append(keeper_of(member.begin({})))
        leave(member)
        keepers[-1].wait(HANG_LIMIT)
    assert len(set(keepers)) == 3


def test_who_comes_as_the_last_one_leaves_gets_a_ray_that_lives(folder, ranks):
    """Each of four comes and goes as it likes: nobody is told of a Ray that has ended, and none is left."""
    errors, keepers = [], set()

    def come_and_go():
        try:
            for _ in range(25):
                member = ranks()
                keeper = keeper_of(member.begin({}))
                assert (folder / f"started-{keeper.pid}").exists()
                keepers.add(keeper)
                leave(member)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_LIMIT)
    assert errors == []
    for keeper in keepers:
        check_ended(folder, keeper)
    assert list(folder.glob("started-*")) == []


def test_a_forked_child_of_a_rank_is_no_member(folder, ranks):
    member = ranks()
    keeper = keeper_of(member.begin({}))
    gate, key = os.pipe()
    child = os.fork()
    if not child:
        member.forget()
        os.close(key)
        os.read(gate, 1)
        os._exit(0)
    try:
        assert select.select([member._connection], [], [], 0)[0] == []  # the child has not ended it for its parent
        member._connection.close()  # as the kernel does with a process that dies
        check_ended(folder, keeper)
    finally:
        os.close(gate)
        os.close(key)
        os.waitpid(child, 0)


def test_what_ray_says_as_it_fails_to_start_is_told_and_the_next_try_is_a_new_one(folder, ranks):
    for _ in range(2):
        with pytest.raises(RaySessionError, match="Ray does not want to"):
            ranks().begin({"fail": 1})
    assert keeper_of(ranks().begin({})).is_running()


@pytest.mark.usefixtures("pipes")
def test_a_keeper_that_dies_before_ray_runs_is_an_error_for_the_rank_that_started_it_alone(folder, ranks):
    found = []

    def fail():
        with pytest.raises(RaySessionError, match="the process that was to start it has ended"):
            ranks().begin({"wait": 1})
        found.append("")

    threads = [threading.Thread(target=fail), threading.Thread(target=lambda: found.append(ranks().begin({})))]
    threads[0].start()
    keeper = keeper_of((folder / "starting").read_text())
    threads[1].start()  # it waits for that keeper, or comes after it
    keeper.kill()
    for thread in threads:
        thread.join(HANG_LIMIT)
    assert len(found) == 2
    assert keeper_of("".join(found)).pid != keeper.pid


def test_a_keeper_that_dies_later_is_noticed(folder, ranks):
    member = ranks()
    keeper = keeper_of(member.begin({}))
    keeper.kill()
    assert member.wait()
    assert keeper_of(ranks().begin({})).pid != keeper.pid


def test_a_default_timeout_of_the_programs_does_not_count(folder, ranks):
    member = ranks()
    socket.setdefaulttimeout(1e-9)
    try:
        member.begin({})
    finally:
        socket.setdefaulttimeout(None)
    assert member._connection.gettimeout() is None


def test_another_users_socket_is_not_believed(folder, name, ranks, monkeypatch):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(f"\0{name}")
        stranger.listen()
        monkeypatch.setattr(torchrun, "peer", lambda _: (1, os.getuid() + 1))
        with pytest.raises(RaySessionError, match=f"another user's process has the local socket {name}"):
            ranks().begin({})


OF_TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "GROUP_RANK": "0",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
}
OF_LIGHTNING = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "NODE_RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
}
OF_ALL = OF_TORCHRUN.keys() | OF_LIGHTNING.keys()


@pytest.fixture(params=[OF_TORCHRUN, OF_LIGHTNING], ids=["torchrun", "Lightning"])
def told(request, monkeypatch):
    """What a launcher tells its ranks."""
    for variable in OF_ALL:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in request.param.items():
        monkeypatch.setenv(variable, value)
    return request.param


def test_the_ranks_of_one_job_meet_and_those_of_another_do_not(told, monkeypatch):
    here = meeting_point()
    assert here.startswith("rayloader-ray-")
    assert told["MASTER_ADDR"] not in here
    for variable in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.setenv(variable, "1")
        assert meeting_point() == here
    for variable in told.keys() & set(torchrun.VARIABLES):
        with monkeypatch.context() as other:
            other.setenv(variable, "7")
            assert meeting_point() != here


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"])
def test_a_process_that_no_launcher_has_started_meets_nobody(variable, told, monkeypatch):
    monkeypatch.delenv(variable)
    assert meeting_point() is None


def test_a_single_rank_meets_nobody(told, monkeypatch):
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if variable in told:
            monkeypatch.setenv(variable, "1")
    assert meeting_point() is None


def test_ranks_that_are_not_told_their_number_meet(monkeypatch):
    """Lightning's, after the first `fit()`."""
    for variable in OF_ALL:
        monkeypatch.delenv(variable, raising=False)
    for variable in OF_LIGHTNING.keys() - {"WORLD_SIZE"}:
        monkeypatch.setenv(variable, OF_LIGHTNING[variable])
    assert meeting_point() is not None


def test_a_single_rank_of_several_machines_meets_nobody(monkeypatch):
    for variable, value in {**OF_TORCHRUN, "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    assert meeting_point() is None
