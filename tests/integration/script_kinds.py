"""All kinds of datasets by one kind of workers, in a program of its own.

    python script_kinds.py SIDE OUT FOLDER [NAME...]

SIDE is "torch" for torch's loader with forked workers, "fork" or "ray" for ours. What came of each kind is pickled into
OUT, by its name; FOLDER is for their files.
"""

import atexit
import os
import pickle
import sys
from pathlib import Path

import torch.multiprocessing
import torch.utils.data

import rayloader
from kinds import KINDS, Program


def result(kind, program):
    torch.manual_seed(0)
    try:
        return kind.run(program)
    except Exception as error:
        return {"error": type(error).__name__, "text": "\n".join([str(error), *getattr(error, "__notes__", ())])}


def main(side, out, folder, *names):
    is_ours = side in ("fork", "ray")
    loader_class = rayloader.DataLoader if is_ours else torch.utils.data.DataLoader
    options = {"workers": side} if is_ours else {}
    torch.multiprocessing.set_start_method("fork")
    ended = Path(folder) / "ended"
    driver = os.getpid()
    atexit.register(lambda: ended.open("a").write(f"{os.getpid() == driver}\n"))
    results = {}
    for kind in KINDS:
        if names and kind.name not in names:
            continue
        (place := Path(folder) / kind.name).mkdir()
        results[kind.name] = result(kind, Program(loader_class, options, place))
    assert (side == "ray") == ("ray" in sys.modules)
    assert not ended.exists()
    Path(out).write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
