"""Which Ray a process uses, and the processes of that Ray."""

import psutil
import ray


def session_name():
    """Of the Ray of this process."""
    return ray.get_runtime_context().get_session_name()


def raylet(session):
    """The one node of a session on this machine."""
    (found,) = [process for process in psutil.process_iter() if is_raylet(process) and session in arguments(process)]
    return found


def processes(session):
    """All of a Ray that a keeper holds, the keeper first."""
    keeper = raylet(session).parent()
    assert "rayloader/start/keeper" in arguments(keeper)
    return [keeper, *keeper.children(recursive=True)]


def is_raylet(process):
    try:
        return process.name() == "raylet"
    except psutil.Error:
        return False


def arguments(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
