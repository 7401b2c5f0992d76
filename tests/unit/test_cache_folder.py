"""Caches in folders: later runs find the samples; what others may have put there is neither read nor written over."""

import os
import pickle
import signal
import stat

import numpy as np
import pytest
import torch

from cache_data import Numbers, in_fork
from rayloader import CacheError, cached
from rayloader.data import cached as module
from rayloader.data import sample_store
from rayloader.random.generators import global_generators
from rayloader.transport.pickler import ByValuePickler, dumped

WHOLE = [0, 1, 2, 3, 4]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "caches"


def opened(folder, make=int, count=5, max_bytes="100MB", key="files"):
    return cached(Numbers(make, count), max_bytes, folder, key=key)


def file_in(folder):
    (file,) = folder.glob("*.rayloader-cache")
    return file


def test_a_later_run_finds_the_samples_of_the_same_key_class_and_length(folder):
    """Any order of runs, and the death of the machine, are in test_cached.py."""

    class Others(Numbers):
        pass

    assert [*opened(folder)] == WHOLE
    again = opened(folder)
    assert [*again] == WHOLE
    assert (again.stats().built, again.stats().hits) == (5, 5)
    assert file_in(folder).name.startswith("Numbers_files-5-")
    assert np.load(file_in(folder), mmap_mode="r").shape == (6, 2)
    index = again._store._index
    index[6] = index[10]  # another sample's record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_store, "_boot", lambda: 7)
        assert [*opened(folder)] == WHOLE
    assert [*opened(folder, repr, key="files!")] == [*"01234"]
    assert [*opened(folder, repr, 3)] == [*"012"]
    assert [*cached(Others(repr, 5), where=folder, key="files")] == [*"01234"]
    assert len([*folder.iterdir()]) == 4


def test_a_header_is_on_the_disk_before_its_file_grows(folder, monkeypatch):
    """So the machine may die at any time, and no file of ours begins with zeros."""
    done = []
    for name in ("pwrite", "fsync", "posix_fallocate"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, call=call, name=name: (done.append(name), call(*given))[1])
    opened(folder)
    assert done == ["pwrite", "fsync", "posix_fallocate"]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_a_process_that_is_killed_while_it_makes_a_file_leaves_no_damaged_one(folder, monkeypatch, call):
    def work():
        monkeypatch.setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        opened(folder)

    assert in_fork(work) == -signal.SIGKILL
    assert [*opened(folder)] == WHOLE
    assert opened(folder).stats().present == 5


def test_a_cache_may_grow_and_each_program_keeps_to_its_limit(folder):
    def make(i):
        return b"%04d" % i * 1000

    small, large = opened(folder, make, 20, 20_000), opened(folder, make, 20, "1MB")
    for kept, numbers in (small, range(20)), (large, range(15)), (small, range(20)), (large, range(20)):
        assert [kept[i] for i in numbers] == [make(i) for i in numbers]
        assert kept.stats().full == (kept is small)
    smaller = opened(folder, make, 20, 5_000)
    assert smaller.stats().present == 20
    assert [*smaller] == [make(i) for i in range(20)]


# ---- what others could have put there


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def bomb(tmp_path):
    yield tmp_path / "bomb"
    assert not (tmp_path / "bomb").exists()


def planted(folder, bomb):
    """A cache whose samples are bombs, under the name that everybody can compute."""
    kept = opened(folder)
    for number in range(3):
        kept._store.write(number, Bomb(bomb))
    return file_in(folder)


def to_a_link(file):
    os.replace(file, file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def to_a_link_to_nothing(file):
    file.unlink()
    file.symlink_to(file.with_name("elsewhere"))


def to_a_fifo(file):
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (to_a_link, "symbolic links"),
        (to_a_link_to_nothing, "symbolic links"),
        (lambda file: os.link(file, file.with_name("elsewhere")), "and 2 names; delete it"),
        (to_a_fifo, "got mode 10600,"),
        (lambda file: file.chmod(0o606), "got mode 100606,"),
        (lambda file: file.chmod(0o660), "got mode 100660,"),
    ],
)
def test_a_file_that_others_could_have_written_is_not_read(change, why, folder, bomb):
    def files():
        return [(file.lstat().st_size, file.lstat().st_mtime_ns) for file in sorted(folder.iterdir())]

    file = planted(folder, bomb)
    copied = dumped(opened(folder), ByValuePickler)
    change(file)
    before = files()
    with pytest.raises(CacheError, match=f"the cache .*{why}"):
        opened(folder)
    with pytest.raises(CacheError, match=f"the cache .*{why}"):
        pickle.loads(copied)
    assert files() == before


def test_a_file_of_another_user_is_not_read(folder, bomb, monkeypatch):
    """Nor taken for the node's: the name of one in memory can be seen in /proc."""
    planted(folder, bomb)
    user, fd = os.geteuid(), os.memfd_create("rayloader-cache-planted-0")
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    try:
        with pytest.raises(CacheError, match=rf"Numbers_fi\S* must be .*, user {user} and 1 names; delete it"):
            opened(folder)
        assert module._oldest("rayloader-cache-planted-") is None
    finally:
        os.close(fd)


@pytest.mark.parametrize("content", [bytes(100), bytes(1 << 20), b"important", bytes(4096) + b"important" * 10_000])
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


def test_what_is_made_is_this_user_s_alone_and_moves_no_generator(folder):
    def generators():
        own = global_generators()[0][0].getstate()
        return torch.get_rng_state().tolist(), own, np.random.get_state()[1].tolist()

    states, mask = generators(), os.umask(0)
    try:
        opened(folder / "below")
    finally:
        os.umask(mask)
    assert generators() == states
    made = [folder / "below", file_in(folder / "below")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o600]
