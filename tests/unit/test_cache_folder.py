"""Caches in folders to which others may write: nothing of theirs is read, run or written over, or it is no pickle."""

import logging
import os
import pickle
import stat
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from rayloader import CacheError, cached
from rayloader.data import cached as module
from rayloader.data import plain_samples
from rayloader.random.generator_kinds import global_generators
from rayloader.transport.pickler import dumps_by_value

Pair = namedtuple("Pair", "image label")


class Numbers(Dataset):
    """Sample `i` is `make(i)`."""

    def __init__(self, make, count=5):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "caches"


def opened(folder, dataset=(1, 2, 3), **options):
    return cached(dataset, "100MB", folder, fingerprint="the same", **options)


def file_in(folder):
    (file,) = folder.glob("*.rayloader-cache")
    return file


def planted(folder, bomb, **options):
    """A cache whose samples are bombs, under the name that everybody can compute."""
    kept = opened(folder, **options)
    for number in range(3):
        kept._store._plain = False
        kept._store.write(number, Bomb(bomb))
    return file_in(folder)


# ---- what others could have put there


def to_a_link(file):
    os.replace(file, file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def to_a_link_to_nothing(file):
    file.unlink()
    file.symlink_to(file.with_name("elsewhere"))


def to_a_second_name(file):
    os.link(file, file.with_name("elsewhere"))


def to_a_fifo(file):
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (to_a_link, "is a symbolic link"),
        (to_a_link_to_nothing, "is a symbolic link"),
        (to_a_second_name, "has 2 hard links instead of one"),
        (to_a_fifo, "is no regular file"),
        (lambda file: file.chmod(0o606), "may be written to by others, with mode 606"),
        (lambda file: file.chmod(0o660), "may be written to by others, with mode 660"),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_others_could_have_written_is_not_read(change, why, shared, folder, tmp_path):
    folder.mkdir()
    change(planted(folder, tmp_path / "bomb", shared=shared))
    before = [(file.lstat().st_size, file.lstat().st_mtime_ns) for file in sorted(folder.iterdir())]
    if shared and "660" in why:
        opened(folder, shared=True)
        return
    with pytest.raises(CacheError, match=rf"the cache file .*/tuple-3-\S* {why}.*; nothing of it was read. Delete it"):
        opened(folder, shared=shared)
    assert [(file.lstat().st_size, file.lstat().st_mtime_ns) for file in sorted(folder.iterdir())] == before
    assert not (tmp_path / "bomb").exists()


def test_a_file_of_another_user_is_not_read(folder, tmp_path, monkeypatch):
    planted(folder, tmp_path / "bomb")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(CacheError, match=f"belongs to user {user}, and this process to user {user + 1}.* Delete it"):
        opened(folder)
    assert not (tmp_path / "bomb").exists()


def test_a_copy_in_another_process_looks_again(folder):
    kept = opened(folder)
    copied = dumps_by_value(kept)
    file_in(folder).chmod(0o666)
    with pytest.raises(CacheError, match="may be written to by others"):
        pickle.loads(copied)


@pytest.mark.parametrize("content", [bytes(100), bytes(1 << 20), b"important"])
def test_a_victim_s_file_is_neither_emptied_nor_written_to(content, folder, tmp_path):
    opened(folder)
    victim = tmp_path / "victim"
    victim.write_bytes(content)
    victim.chmod(0o600)
    file = file_in(folder)
    for plant in (os.symlink, os.link, os.rename):
        file.unlink()
        plant(victim, file)
        with pytest.raises(CacheError, match=r"symbolic link|hard links|it is of another format"):
            opened(folder)
        assert file.read_bytes() == content


def test_a_file_of_other_samples_is_not_read(folder, tmp_path):
    planted(folder, tmp_path / "bomb").rename(tmp_path / "other")
    cached((1, 2, 3), "1MB", folder, fingerprint="another")
    (tmp_path / "other").rename(file_in(folder))
    with pytest.raises(CacheError, match="it is of another dataset"):
        cached((1, 2, 3), "1MB", folder, fingerprint="another")
    assert not (tmp_path / "bomb").exists()


def test_what_is_made_is_this_user_s_alone(tmp_path):
    before = os.umask(0)
    try:
        opened(tmp_path / "one" / "two")
    finally:
        os.umask(before)
    made = [tmp_path / "one", tmp_path / "one" / "two", file_in(tmp_path / "one" / "two")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o700, 0o600]


def test_a_file_of_another_user_is_not_taken_for_the_node_s(monkeypatch):
    """Its name can be seen in /proc."""
    fd = os.memfd_create("rayloader-cache-planted-0")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    try:
        assert module._found("rayloader-cache-planted-") is None
    finally:
        os.close(fd)


# ---- those of a group

PLAIN = {
    "labelled": lambda i: (torch.full((3, 4), i, dtype=torch.uint8), i),
    "nested": lambda i: {
        "ids": np.arange(i),
        "text": f"sample {i}",
        3: None,
        "list": [{"x": torch.ones(i, 2)}],
        "y": (),
    },
    "transposed": lambda i: np.arange(24.0).reshape(4, 6).T + i,
    "bfloat16": lambda i: torch.full((5,), i, dtype=torch.bfloat16),
    "large": lambda i: torch.full((1 << 18,), i, dtype=torch.int32),
    "scalars": lambda i: (np.float32(i), np.datetime64("2020-01-01"), i / 3, float("inf"), True, 1 << 80, b"bytes", ""),
    "empty": lambda i: (torch.empty(0, 3), np.empty((0, 2)), b"", [], {}, np.array("x"), torch.tensor(i)),
    "conjugate": lambda i: torch.tensor([1 + 2j, i]).conj(),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_group_s_samples_are_those_of_the_dataset_and_hold_no_pickles(kind, folder, monkeypatch):
    folder.mkdir()
    dataset = Numbers(PLAIN[kind])
    [*opened(folder, dataset, shared=True)]
    monkeypatch.setattr(pickle, "loads", None)  # nobody needs it
    kept = opened(folder, dataset, shared=True)
    for index in range(5):
        sample = kept[index]
        expected = dataset[index]
        torch.testing.assert_close(of_arrays(sample), of_arrays(expected), rtol=0, atol=0, equal_nan=True)
        assert kinds(sample) == kinds(expected)
    assert kept.stats().hits == 5


def kinds(sample):
    if isinstance(sample, dict):
        return [(key, kinds(value)) for key, value in sample.items()]
    if isinstance(sample, (list, tuple)):
        return type(sample), [*map(kinds, sample)]
    return type(sample), getattr(sample, "dtype", None), getattr(sample, "shape", sample)


def of_arrays(sample):
    """The tensors and numbers in it."""
    if isinstance(sample, dict):
        return of_arrays([*sample.values()])
    if isinstance(sample, (list, tuple)):
        return [one for part in sample for one in of_arrays(part)]
    if isinstance(sample, (np.ndarray, np.generic)):
        return [torch.from_numpy(np.frombuffer(sample.tobytes(), np.uint8).copy())]
    return [sample] if isinstance(sample, torch.Tensor) else []


def test_a_group_s_file_is_open_to_the_group(folder, monkeypatch):
    folder.mkdir()
    before = os.umask(0o077)
    try:
        [*opened(folder, shared=True)]
    finally:
        os.umask(before)
    assert stat.S_IMODE(file_in(folder).stat().st_mode) == 0o660
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # another of them
    kept = opened(folder, shared=True)
    assert [*kept] == [1, 2, 3]
    assert kept.stats().built == 3


def test_a_group_s_file_is_no_other_file(folder):
    folder.mkdir()
    opened(folder)
    opened(folder, shared=True)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "sample",
    [
        Pair(1, 2),
        {1, 2},
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(2).to_sparse(),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([object()]),
        np.ma.array([1]),
        [{"x": (1, 2j)}],
        np.random.RandomState,
    ],
)
def test_what_a_group_s_cache_can_t_hold_is_an_error(sample, folder):
    folder.mkdir()
    kept = opened(folder, Numbers(lambda index: sample), shared=True)
    for _ in range(2):
        with pytest.raises(CacheError, match=r"keeps dense tensors.*got \w+; make one of these of it in the"):
            kept[1]
    assert kept.stats().present == 0


def test_a_pickle_that_a_member_of_a_group_plants_is_not_run(folder, tmp_path):
    folder.mkdir()
    planted(folder, tmp_path / "bomb", shared=True)
    with pytest.raises(CacheError, match=r"a record of the cache is damaged: .*; delete the cache"):
        opened(folder, shared=True)[1]
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize(
    "record",
    [
        b'["tensor"]',
        b'["tensor", "int64", [9]]',
        b'["tensor", "qint8", [8]]',
        b'["array", "O", [1]]',
        b'["array", "<f4", [-7, 3]]',
        b'["dict", 1]',
        b'["dict", [["list"], 1]]',
        b'["other"]',
        b"[",
        b"[]",
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_damaged_records_are_an_error(record):
    with pytest.raises(CacheError, match="a record of the cache is damaged"):
        plain_samples.decode(record, [memoryview(bytearray(8))])


def test_a_group_s_folder_must_be_there(folder):
    with pytest.raises(CacheError, match=r"and there is no /\S*/caches; make it, for instance by mkdir -m 2770"):
        opened(folder, shared=True)
    assert not folder.exists()


def test_sharing_is_of_folders():
    with pytest.raises(ValueError, match="shared= is of a folder"):
        cached([1], shared=True)


# ---- older ones


def test_older_caches_of_the_dataset_are_told_when_another_one_is_made(folder, caplog):
    with caplog.at_level(logging.WARNING, "rayloader"):
        for fingerprint in ("1", "1", "2", "2"):
            [*cached([1, 2], "1MB", folder, fingerprint=fingerprint)]
        cached([1, 2, 3], "1MB", folder, fingerprint="3")
        cached((1, 2), "1MB", folder, fingerprint="4")
    (said,) = [record.getMessage() for record in caplog.records]
    older, newer = sorted(folder.glob("list-2-*"), key=os.path.getctime)
    assert str(folder) in said
    assert "its folder holds 1 other ones of a dataset of this class and length, " in said
    assert sum(str(path) in said for path in (older, newer)) == 1


def test_opening_a_folder_moves_no_generator(folder):
    before = [torch.get_rng_state().tolist(), global_generators()[0][0].getstate(), np.random.get_state()[1].tolist()]
    for _ in range(2):
        opened(folder)
    after = [torch.get_rng_state().tolist(), global_generators()[0][0].getstate(), np.random.get_state()[1].tolist()]
    assert before == after
