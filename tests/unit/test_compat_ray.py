"""What Ray says of the end of processes, and what of it reaches the user."""

from types import SimpleNamespace

import pytest

from rayloader._compat_ray import leave_out_deaths, said_of_end

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


@pytest.mark.parametrize("advice", ["", *ADVICE])
def test_that_a_process_is_gone_is_nothing_new(advice):
    assert said_of_end(DIED + FIELDS + SEEN + advice) == ""


def test_what_else_ray_knows_remains():
    why = "The actor is dead because its node has died. Node Id: 1e9e6ce2"
    assert said_of_end(f"{DIED}{FIELDS}{why}\n") == f"{DIED} {why}"


def line(pid, text="A worker died or was killed while executing a task by an unexpected system error. "):
    return (
        f"{text}Lease ID: 01 Worker ID: 45fa Node ID: 1e9e Worker IP address: ::1 Worker port: 7 Worker PID: {pid} Wo"
    )


def test_that_a_process_of_ours_has_died_is_not_printed_and_everything_else_is():
    printed = []
    worker = SimpleNamespace(print_to_stdstream=lambda data, ignore_prefix: printed.extend(data["lines"]))
    leave_out_deaths(SimpleNamespace(_private=SimpleNamespace(worker=worker)), {("1e9e", 3027)}.__contains__)
    others = [line(3028), line(3027, "Out of memory. "), "", line(3027) + "\n"]
    for pid, text in [("raylet", line(3027)), *(("raylet", text) for text in others[:3]), (17, others[3])]:
        worker.print_to_stdstream({"pid": pid, "lines": [text]}, ignore_prefix=False)
    assert printed == others


def test_without_the_private_name_ray_prints_all():
    leave_out_deaths(SimpleNamespace(_private=SimpleNamespace(worker=SimpleNamespace())), lambda _: True)
