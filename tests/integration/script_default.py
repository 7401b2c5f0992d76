"""What a program without Ray is like in the midst of an epoch that has lasted for more than a second, as JSON."""

import json
import sys
import threading
import time

import psutil

from rayloader import DataLoader


def imports(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def facts_now():
    """What of this process and its children is not as it is with torch's loader; all but the first should be empty."""
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]
    frames = {thread.name: sys._current_frames().get(thread.ident) for thread in threading.enumerate()}
    return {
        "forks": len(processes) - 1,
        "other programs": [process.cmdline() for process in processes if process.cmdline() != own.cmdline()],
        "listens": [
            (process.pid, *connection.laddr)
            for process in processes
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ],
        # What a container needs to allow; torch's own libraries and the program take most of it.
        "memory above 360 MB": max(0, sum(process.memory_full_info().pss for process in processes) - 360e6),
        "modules of Ray": [name for name in sys.modules if name.split(".")[0] == "ray"],
        "threads that import": [name for name, frame in frames.items() if imports(frame)],
    }


if __name__ == "__main__":
    ends = time.monotonic() + 1.2
    for _ in DataLoader(range(10**7), 2, num_workers=2):
        if time.monotonic() > ends:
            print(json.dumps(facts_now()))
            break
