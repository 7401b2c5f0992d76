"""One rank that does what it is told, line by line, and says when that is done.

    python script_rank.py GATE

    use         an epoch: prints the batches and the Ray's session
    begin       the first batch of an epoch: prints it
    go on       the rest of that epoch: prints it, or the error that comes
    shutdown    rayloader.shutdown()
    ray         the processes of the Ray in use, the keeper first

Its worker waits at the gate, which is the test's, with the last sample.
"""

import sys

import rayloader
from latches import Gate
from rays import processes, session_name


class Waits:
    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            Gate.wait(self)
        return index


loader = rayloader.DataLoader(Waits(sys.argv[1]), None, num_workers=1)
iterator = None
for line in sys.stdin:
    match line.strip():
        case "use":
            print([*loader], session_name())
        case "begin":
            iterator = iter(loader)
            print(next(iterator))
        case "go on":
            try:
                print([*iterator])
            except rayloader.RaySessionError as error:
                print(f"RaySessionError: {error}")
        case "shutdown":
            rayloader.shutdown()
            print("shut down")
        case "ray":
            print(*(process.pid for process in processes(session_name())))
    sys.stdout.flush()
