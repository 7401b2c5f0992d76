"""Caches in folders to which others may write: nothing of theirs is read, run or written over, or it is no pickle."""

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
from rayloader.random.generators import global_generators
from rayloader.transport.pickler import ByValuePickler, dumped

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
    return cached(dataset, "100MB", folder, key="the same", **options)


def file_in(folder):
    (file,) = folder.glob("*.rayloader-cache")
    return file


def planted(folder, bomb, **options):
    """A cache whose samples are bombs, under the name that everybody can compute."""
    kept = opened(folder, **options)
    for number in range(3):
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
        (to_a_link, "symbolic links"),
        (to_a_link_to_nothing, "symbolic links"),
        (to_a_second_name, "and 2 names; delete it"),
        (to_a_fifo, "got mode 10600,"),
        (lambda file: file.chmod(0o606), "got mode 100606,"),
        (lambda file: file.chmod(0o660), "got mode 100660,"),
    ],
)
def test_a_file_that_others_could_have_written_is_not_read(change, why, folder, tmp_path):
    folder.mkdir()
    change(planted(folder, tmp_path / "bomb"))
    before = [(file.lstat().st_size, file.lstat().st_mtime_ns) for file in sorted(folder.iterdir())]
    with pytest.raises(CacheError, match=f"the cache .*{why}"):
        opened(folder)
    assert [(file.lstat().st_size, file.lstat().st_mtime_ns) for file in sorted(folder.iterdir())] == before
    assert not (tmp_path / "bomb").exists()


def test_a_file_of_another_user_is_not_read(folder, tmp_path, monkeypatch):
    planted(folder, tmp_path / "bomb")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(CacheError, match=rf"tuple_the\S* must be .*, user {user} and 1 names; delete it"):
        opened(folder)
    assert not (tmp_path / "bomb").exists()


def test_a_copy_in_another_process_looks_again(folder):
    kept = opened(folder)
    copied = dumped(kept, ByValuePickler)
    file_in(folder).chmod(0o666)
    with pytest.raises(CacheError, match="to which nobody else may write, got mode 100666"):
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
        with pytest.raises(CacheError, match=r"symbolic links|and 2 names|it is of another format"):
            opened(folder)
        assert file.read_bytes() == content


def test_what_is_made_is_this_user_s_alone(tmp_path):
    before = os.umask(0)
    try:
        opened(tmp_path / "one" / "two")
    finally:
        os.umask(before)
    made = [tmp_path / "one" / "two", file_in(tmp_path / "one" / "two")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o600]


def test_a_file_of_another_user_is_not_taken_for_the_node_s(monkeypatch):
    """Its name can be seen in /proc."""
    fd = os.memfd_create("rayloader-cache-planted-0")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    try:
        assert module._oldest("rayloader-cache-planted-") is None
    finally:
        os.close(fd)


def test_opening_a_folder_moves_no_generator(folder):
    before = [torch.get_rng_state().tolist(), global_generators()[0][0].getstate(), np.random.get_state()[1].tolist()]
    for _ in range(2):
        opened(folder)
    after = [torch.get_rng_state().tolist(), global_generators()[0][0].getstate(), np.random.get_state()[1].tolist()]
    assert before == after
