"""One side of the conformance suite in a process of its own: started, and its records read when they are needed."""

import pickle
import subprocess
import sys
from pathlib import Path

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
        with self.output.open("w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def read(self):
        """The records, once the script has ended."""
        assert self.process.wait(LIMIT) == 0, self.output.read_text()
        return pickle.loads(self.records.read_bytes())

    def end(self):
        """Ends the script if it still runs."""
        self.process.kill()
        self.process.wait()
