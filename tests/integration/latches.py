"""Latches between a test and its workers: files, so that they mean the same in every process, whoever started it.

Nothing here polls. What a worker waits for is over at the latest when the process of the test has ended.
"""

import fcntl
import os
import select

HANG_LIMIT = 500.0  # seconds that a test waits for news; on expiry it fails


class Gate:
    """Closed from the start: `wait` blocks, in any process, until the test calls `open`."""

    def __init__(self, path):
        self.path = str(path)
        self._closed = open(path, "w")  # noqa: SIM115  # the lock is held as long as the file is open
        fcntl.flock(self._closed, fcntl.LOCK_EX)

    def open(self):
        if not self._closed.closed:
            fcntl.flock(self._closed, fcntl.LOCK_UN)  # forks may have copies of the descriptor
            self._closed.close()

    def wait(self):
        with open(self.path) as file:
            fcntl.flock(file, fcntl.LOCK_SH)

    def __getstate__(self):
        return {"path": self.path}


class Mail:
    """Workers send lines, the test receives them."""

    def __init__(self, path):
        self.path = str(path)
        os.mkfifo(path)
        self._file = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._unread = b""

    def send(self, line):
        descriptor = os.open(self.path, os.O_WRONLY)
        os.write(descriptor, f"{line}\n".encode())  # short lines are written in one piece
        os.close(descriptor)

    def receive(self, count=1):
        """Waits for so many lines."""
        lines = []
        while len(lines) < count:
            if b"\n" not in self._unread:
                assert select.select([self._file], [], [], HANG_LIMIT)[0], f"no mail; so far: {lines}"
                self._unread += os.read(self._file, 65536)
                continue
            line, _, self._unread = self._unread.partition(b"\n")
            lines.append(line.decode())
        return lines

    def waiting(self):
        """The lines that are there already."""
        if select.select([self._file], [], [], 0)[0]:
            self._unread += os.read(self._file, 65536)
        *lines, self._unread = self._unread.split(b"\n")
        return [line.decode() for line in lines]

    def close(self):
        os.close(self._file)

    def __getstate__(self):
        return {"path": self.path}
