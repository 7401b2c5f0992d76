"""A script whose workers print, warn and log in many ways.

    python script_output.py torch|rayloader FOLDER

With torch's loader and with ours its standard output, standard error and log file must hold the same lines.
"""

import logging
import os
import subprocess
import sys
import threading
import warnings

from torch.utils.data import get_worker_info

from output_module import log as module_log  # a module that makes a handler of its own where it is imported

if sys.argv[1] == "torch":
    from torch.utils.data import DataLoader
else:
    from rayloader import DataLoader


class OwnWarning(UserWarning):
    pass


class Unknown:
    """Of the worker alone: its class cannot be found in the program."""

    def __repr__(self):
        return "<unknown>"

    def __reduce__(self):
        raise TypeError("this is not to be pickled")


class Talks:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        worker = get_worker_info().id
        for _ in range(3):
            print("the same line")
        print(f"\033[1mbold {index}\033[0m ünïcode")
        print(f"to standard error {index}", file=sys.stderr)
        os.write(1, f"to descriptor 1: {index}\n".encode())
        subprocess.run([sys.executable, "-c", f"print('a child of sample {index}')"], check=True)
        warnings.warn(f"heard {index}", stacklevel=1)
        warnings.warn("ignored", OwnWarning, stacklevel=1)
        log = logging.getLogger(f"data.worker{worker}")
        log.debug("below the level")
        log.info("sample %d", index, extra={"index": index, "thing": Unknown()})
        module_log.info("from a module: %d", index)
        logging.getLogger("quiet").info("below that logger's level %d", index)
        logging.getLogger("quiet").error("above it %d", index)
        logging.getLogger("filtered").warning("secret")
        logging.getLogger("filtered").warning("public %d", index)
        logging.getLogger("apart").warning("to its own handler only: %d", index)
        logging.getLogger("off").critical("disabled")
        try:
            raise ValueError(index)
        except ValueError:
            log.exception("failed %d", index)
        log.log(25, "a level of the program's own")
        logging.getLogger("twice").warning("to two handlers, once each")
        logging.getLogger("structured").warning({"index": index, "name": f"sample {index}"})
        logging.getLogger(f"made.late{index}").success()
        if worker == 0 and index == 0:
            pid = os.fork()
            if not pid:
                log.info("from a fork")
                os._exit(0)
            os.waitpid(pid, 0)
        return index


class Logger(logging.Logger):
    def success(self):
        self.warning("success of %s", self.name)


class Odd(UserWarning):
    lock = threading.Lock()  # no process can have it from another


class Counts:
    """A filter that notes how often it has seen a record."""

    def filter(self, record):
        record.seen = getattr(record, "seen", 0) + 1
        return True


class Keys(logging.StreamHandler):
    def format(self, record):
        return f"keys: {sorted(record.msg)}" if isinstance(record.msg, dict) else "no keys"


def make_record(name, *arguments, **named):
    record = logging.LogRecord(name, *arguments, **named)
    record.short = name.split(".")[0]
    return record


def init(worker):
    own = logging.StreamHandler(sys.stdout)
    own.setFormatter(logging.Formatter("made in the worker: %(message)s"))
    logging.getLogger(f"data.worker{worker}").addHandler(own)
    logging.basicConfig(format="without effect: the root has a handler")


def main(folder):
    logging.basicConfig(level=logging.INFO, format="%(levelname)s|%(name)s|%(message)s")
    file = logging.FileHandler(os.path.join(folder, "log"))
    file.setLevel(logging.WARNING)
    file.setFormatter(logging.Formatter("file: %(message)s (%(index)s)", defaults={"index": None}))
    logging.root.addHandler(file)
    logging.getLogger("quiet").setLevel(logging.ERROR)
    logging.getLogger("filtered").addFilter(lambda record: record.getMessage() != "secret")
    apart = logging.getLogger("apart")
    apart.propagate = False
    apart.addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("off").disabled = True
    warnings.simplefilter("ignore", OwnWarning)
    warnings.simplefilter("ignore", Odd)
    warnings.simplefilter("error", DeprecationWarning)  # the module of the program that gives one is imported already
    logging.addLevelName(25, "NOTICE")
    logging.setLogRecordFactory(make_record)
    logging.setLoggerClass(Logger)
    twice = logging.getLogger("twice")
    own = logging.StreamHandler(sys.stdout)
    own.setFormatter(logging.Formatter("%(seen)s %(short)s %(message)s"))
    twice.addHandler(own)
    twice.addFilter(Counts())
    structured = logging.getLogger("structured")
    structured.propagate = False
    structured.addHandler(Keys(sys.stdout))
    print("begin")
    list(DataLoader(Talks(), 1, num_workers=1, worker_init_fn=init))  # of two, the lines would be mixed
    logging.captureWarnings(True)
    list(DataLoader(Talks(), 4, num_workers=1))
    print("end")


if __name__ == "__main__":
    main(sys.argv[2])
