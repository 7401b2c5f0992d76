"""Programs without Ray that leave it to the loader what its workers are: each returns what came of it.

    python script_default.py LOADER FOLDER

LOADER is torch or rayloader. The last line of the output is JSON: what came of each program, by its name, and what the
process was like in the midst of an epoch that had lasted for more than a second.
"""

import collections
import importlib
import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import psutil
from torch.utils.data import Dataset, IterableDataset, get_worker_info

PROGRAMS = []


def program(run):
    PROGRAMS.append(run)
    return run


def epoch(dataset, num_workers=2):
    return [batch.tolist() for batch in loader_class(dataset, 2, num_workers=num_workers)]


def imported(folder, name, source):
    """A module of the program's own."""
    (folder / f"{name}.py").write_text(source)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


LOGGED = """
import logging
import pathlib

FOLDER = pathlib.Path(__file__).parent
log = logging.getLogger(__name__)
log.setLevel(logging.INFO)
log.addHandler(logging.FileHandler(FOLDER / "log", mode="w"))
output = open(FOLDER / "output", "w")

class Numbers:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        log.info("sample %d", index)
        print(index, file=output, flush=True)
        return index
"""


@program
def a_module_that_opens_its_log_as_it_is_imported(folder):
    module = imported(folder, "logged", LOGGED)
    module.log.info("the program begins")
    print("the program begins", file=module.output, flush=True)
    batches = [epoch(module.Numbers()) for _ in range(2)]
    return batches, [sorted((folder / name).read_text().splitlines()) for name in ("log", "output")]


class Spool(IterableDataset):
    """Takes the files of its worker away as it reads them."""

    def __init__(self, folder):
        self.folder = folder

    def __iter__(self):
        worker = get_worker_info()
        for path in sorted(self.folder.iterdir()):
            if int(path.name) % worker.num_workers == worker.id:
                yield int(path.read_text())
                path.unlink()


@program
def a_stream_that_takes_its_work_away(folder):
    (spool := folder / "spool").mkdir()
    epochs = []
    for begin in (0, 100):
        for number in range(20):
            (spool / f"{number:02}").write_text(str(begin + number))
        epochs.append(epoch(Spool(spool)))
    return epochs, len(list(spool.iterdir()))


EDITED = """
class Numbers:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index + {offset}
"""


@program
def a_source_file_that_is_saved_anew(folder):
    module = imported(folder, "edited", EDITED.format(offset=100))
    dataset, epochs = module.Numbers(), []
    for offset in (200, 300):
        (folder / "edited.py").write_text(EDITED.format(offset=offset))
        epochs.append(epoch(dataset))
    return epochs


class Remembering(Dataset):
    """Samples that depend on what was read before: on the last three, and on what had to be read again."""

    def __init__(self):
        self.recent, self.failed, self.reads = collections.deque(maxlen=3), set(), 0

    def __len__(self):
        return 20

    def read(self, index):
        self.reads += 1
        if index % 3 == 0 and index not in self.failed:
            self.failed.add(index)
            raise OSError("it is not there yet")
        return index

    def __getitem__(self, index):
        try:
            number = self.read(index)
        except OSError:
            number = self.read(index)
        self.recent.append(number)
        return number + 100 * sum(self.recent) + 100_000 * self.reads


@program
def samples_that_depend_on_what_was_read_before(_):
    loaders = [
        loader_class(Remembering(), 2, num_workers=2, persistent_workers=persistent) for persistent in (False, True)
    ]
    return [[batch.tolist() for batch in loader] for loader in loaders * 2]


class ImportsLate(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        import sqlite3
        import xmlrpc.server

        return index + (sqlite3.threadsafety > 0) + len(xmlrpc.server.__name__)


@program
def a_library_that_workers_import_after_an_epoch_of_more_than_a_second(_):
    ends = time.monotonic() + 1.2
    for _ in loader_class(range(10**7), 2, num_workers=2):
        if time.monotonic() > ends:
            facts.update(facts_now())
            break
    return epoch(ImportsLate())


class Lines(Dataset):
    def __init__(self, file):
        self.file = file

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.file.seek(2 * index)
        return int(self.file.readline())


@program
def a_dataset_with_an_open_file(folder):
    (folder / "lines").write_text("".join(f"{number}\n" for number in range(8)))
    with open(folder / "lines") as file:
        return epoch(Lines(file), num_workers=1)


facts = {}


def facts_now():
    """What of this process and its children is not as it is with torch's loader; each should be empty."""
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


def imports(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        multiprocessing.set_start_method("fork")
    loader_class = importlib.import_module({"torch": "torch.utils.data"}.get(sys.argv[1], sys.argv[1])).DataLoader
    found = {}
    for run in PROGRAMS:
        (place := Path(sys.argv[2]) / run.__name__).mkdir()
        os.chdir(place)
        found[run.__name__] = run(place)
    print(json.dumps({"found": found, "facts": facts}))
