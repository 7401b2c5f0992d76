"""What Prometheus finds in a Ray that exports metrics, one that rayloader starts and one that it joins.

`test_prometheus.py` runs this with the packages of `ray[default]`.
"""

import gc
import re
import sys
import threading
import time
import urllib.request

import ray

import rayloader

REPORTS = {"metrics_report_interval_ms": 500}  # of Ray's: 10 s otherwise
HANG_LIMIT = 500.0  # seconds; on expiry what was found is shown
SAMPLE = re.compile(r'^ray_rayloader_(\w+)\{.*\bloader="(\w+)".*\} (\S+)$', re.MULTILINE)


def scraped():
    """The metrics of loaders, by name and label, as Prometheus would get them."""
    (node,) = ray.nodes()
    with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics") as page:
        return {(name, label): float(value) for name, label, value in SAMPLE.findall(page.read().decode())}


def wait_for(expected):
    """Scrapes until all of this is found."""
    deadline, pause = time.monotonic() + HANG_LIMIT, threading.Event()
    while not expected.items() <= (found := scraped()).items():
        assert time.monotonic() < deadline, found
        pause.wait(0.2)
    return found


def check():
    loaders = {name: rayloader.DataLoader(range(40), batch_size=4, num_workers=1, name=name) for name in ("a", "b")}
    for _ in range(3):
        assert len(list(loaders["a"])) == 10
    kept = iter(loaders["b"])
    next(kept)
    counts = {("batches_total", "a"): 30.0, ("samples_total", "a"): 120.0, ("bytes_total", "a"): 960.0}
    found = wait_for({**counts, ("batches_total", "b"): 1.0, ("workers", "b"): 1.0})
    for name in ("wait_seconds_total", "step_seconds_total", "first_wait_seconds_total", "worker_busy_seconds_total"):
        assert found[name, "a"] > 0.0, found
    assert "restarts" not in str(found)
    del kept, loaders
    gc.collect()
    wait_for({**counts, ("workers", "b"): 0.0})


if __name__ == "__main__":
    {"started": rayloader.init, "joined": ray.init}[sys.argv[1]](
        num_cpus=4, include_dashboard=False, log_to_driver=False, _system_config=REPORTS
    )
    check()
    rayloader.shutdown()
    print("scraped", sys.argv[1])
