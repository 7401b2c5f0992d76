"""The sides of the conformance suite: ours by each way that batches take, and one in a process of its own."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

# How our batches travel: whether there are arenas, where even the smallest buffer has a slot; "tcp" as if the workers
# were on another machine; "fork" from forks of this process.
LANES = {"store": "0", "arena": "1", "tcp": "1", "fork": "1"}
ALWAYS = "store", "arena", "fork"  # not in full runs only
FOLDER = Path(__file__).parent
LIMIT = 920.0  # seconds for a side; reference.py gives up before and prints its stacks


class Records:
    """What a script writes down of the cases with these names: by name.

    Args:
        folder: for what it writes.
        script: beside this file.
        names: of the cases.
    """

    def __init__(self, folder, script, *names):
        self.records, self.output = folder / "records.pickle", folder / "output"
        command = [sys.executable, FOLDER / script, self.records, *names]
        path = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # there is stateful.py
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

    def read(self):
        """The records, once the script has ended."""
        assert self.process.wait(LIMIT) == 0, self.output.read_text()
        return pickle.loads(self.records.read_bytes())

    def end(self):
        """Ends the script if it still runs."""
        self.process.kill()
        self.process.wait()
