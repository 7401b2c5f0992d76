"""Programs of others beside the Ray that a loader has started: `ray.init()` of theirs does not join it.

python script_other_program.py
"""

import subprocess
import sys

import ray

import rayloader

# On a busy machine the start of its Ray may take longer than the 30 s after which `ray.init` gives up.
OTHER = """
import time

import ray
from ray._private import services


def patient(*arguments, once=services.get_node):
    while True:
        try:
            return once(*arguments)
        except RuntimeError:
            time.sleep(0.1)  # as Ray does


services.get_node = patient
ray.init(include_dashboard=False, num_cpus=1)
print(ray.get_runtime_context().get_session_name())
"""
HANG_LIMIT = 500  # seconds for the other program; on expiry it is killed and this one fails

if __name__ == "__main__":
    loader = rayloader.DataLoader(range(4), num_workers=1, persistent_workers=True, workers="ray")
    assert len(list(loader)) == 4
    ours = ray.get_runtime_context().get_session_name()
    done = subprocess.run(
        [sys.executable, "-c", OTHER], stdout=subprocess.PIPE, text=True, timeout=HANG_LIMIT, check=True
    )
    (theirs,) = (line for line in done.stdout.splitlines() if line.startswith("session_"))
    assert theirs != ours
    assert len(list(loader)) == 4, "the end of the other program has ended our Ray"
    rayloader.shutdown()
    print("the end")
