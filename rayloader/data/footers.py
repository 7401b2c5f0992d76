"""The footers of Parquet files, which say where each row group lies, kept for the row groups that are read next.

Promise: what is kept is bounded in bytes. A file that was replaced meanwhile is an error: some of its rows would be old
ones, and others new. One thread at a time uses it, so it has no lock, which a fork could find taken.
"""

from __future__ import annotations

from typing import NamedTuple

from pyarrow import dataset, fs

from rayloader.errors import RayloaderError

# Bytes of footers, as they are in their files, that are kept besides the newest; in memory they are 5 to 11 times as
# large. Parsing a footer took 1 to 3 ms of the 2 to 8 ms in which a row group was read.
_KEPT_BYTES = 4 * 2**20


class _Footer(NamedTuple):
    """A file whose footer was read, and the bytes of the footer."""

    file: dataset.ParquetFileFragment
    nbytes: int


class Footers:
    """Opens row groups of files in one filesystem."""

    def __init__(self, filesystem: fs.FileSystem) -> None:
        self._filesystem = filesystem
        options = dataset.ParquetFragmentScanOptions(pre_buffer=True)
        self._format = dataset.ParquetFileFormat(default_fragment_scan_options=options)
        self._kept: dict[str, _Footer] = {}  # by path, the one that was used last at the end
        self._seen: dict[str, tuple[int | None, int | None]] = {}  # size and time of each file when it was first read

    def row_group(
        self, path: str, number: int, partition: dataset.Expression | None = None
    ) -> dataset.ParquetFileFragment:
        """A row group, by its number in a file; `partition` says what the names of the file's folders do.

        Raises:
            RayloaderError: the file was replaced since it was first read.
            Exception: of pyarrow, or of a filesystem in Python: the file cannot be opened, or has no such row group.
        """
        size = self.check(path)
        kept = self._kept.pop(path, None)
        if kept is None:
            file = self._format.make_fragment(path, self._filesystem, partition, file_size=size)
            file.ensure_complete_metadata()
            kept = _Footer(file, file.metadata.serialized_size)
        self._kept[path] = kept
        excess = sum(other.nbytes for other in self._kept.values()) - kept.nbytes - _KEPT_BYTES
        while excess > 0:
            excess -= self._kept.pop(next(iter(self._kept))).nbytes
        return kept.file.subset(row_group_ids=[number])

    def check(self, path: str) -> int | None:
        """The size of a file in bytes, if its filesystem says it. To be called again once a row group has been read.

        Raises:
            RayloaderError: the file was replaced since it was first read.
        """
        now = self._filesystem.get_file_info(path)
        if self._seen.setdefault(path, version := (now.size, now.mtime_ns)) != version:
            raise RayloaderError(
                f"{path} was replaced while it is read, so an epoch would have old rows and new ones; write new files "
                "under other names, and make the stream again"
            )
        size: int | None = now.size
        return size
