"""What is given to a command: a state anywhere in a file, a loader by its name, or an error that says what to do."""

import io
import pickle
import sys

import pytest
import torch

from rayloader import DataLoader
from rayloader.cli.given import CommandError, made, named
from rayloader.cli.states import load
from rayloader.resume.state import VERSION, State
from states import of_ranks, saved


class Unknown:
    """Something that only a trusted file may load."""


def is_same(packed, state):
    return repr(State.load(packed).pack()) == repr(state.pack())


@pytest.mark.parametrize(
    "within",
    [
        lambda state: state,
        lambda state: {"model": {"weight": torch.ones(3)}, "loader": state},
        # As Lightning and Accelerate save them.
        lambda state: {"loops": {"fit_loop": {"state_dict": {"combined_loader": [state]}}}, "callbacks": {1: ()}},
        lambda state: {**state, "_iterator_finished": False},
    ],
)
def test_a_state_is_found_wherever_it_is_in_a_file_of_torch(tmp_path, within):
    state, path = saved(), tmp_path / "checkpoint.pt"
    torch.save(within(state.pack()), path)
    assert is_same(*load(path), state)
    assert is_same(*load(str(path)), state)


SEVERAL = {"loaders": {"train": saved(1).pack(), "val.easy": saved(2).pack()}}
RANKS = [state.pack() for state in of_ranks(3)]


@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        (SEVERAL, None, r"holds 2 states; choose one by --key: loaders.train, loaders.val.easy$"),
        (SEVERAL, "loaders", r"holds 2 states; choose one by --key"),
        (SEVERAL, "loader", r"holds no state at loader; choose one by --key: loaders.train"),
        (RANKS[:2], None, r"holds 2 states; choose one by --key: 0, 1$"),
        (
            {"loader": saved().pack(), "arguments": Unknown()},
            None,
            r"only a trusted file may load: \w+\.Unknown\. If you",
        ),
        ([], None, r"holds no state of a rayloader\.DataLoader"),
        ({"format": "other"}, None, r"holds no state of a rayloader\.DataLoader"),
        (3, None, r"holds no state of a rayloader\.DataLoader"),
    ],
)
def test_a_file_without_one_state_or_with_more_than_data_is_refused(tmp_path, content, key, message):
    torch.save(content, tmp_path / "file")
    with pytest.raises(CommandError, match=message):
        load(tmp_path / "file", key)


def test_a_state_that_is_named_the_states_of_all_ranks_and_those_of_another_version_are_found(tmp_path):
    itself = {"loader": {**saved().pack(), "version": VERSION - 1}}
    itself["all"] = [itself]
    for name, content in ("several", SEVERAL), ("ranks", {"loader": tuple(RANKS[::-1])}), ("old", itself):
        torch.save(content, tmp_path / name)
    assert is_same(*load(tmp_path / "several", "loaders.train"), saved(1))
    assert is_same(*load(tmp_path / "several", "loaders.val"), saved(2))
    assert [State.load(one).fits.rank for one in load(tmp_path / "ranks")] == [2, 1, 0]
    [found] = load(tmp_path / "old")
    assert found["version"] == VERSION - 1


OLD = io.BytesIO()
torch.save(saved().pack(), OLD, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    "content",
    [b"", b"not this", b"\x00\x01\x02", pickle.dumps({"a": 1}), pickle.dumps(saved().pack())[:100], b"PK\x03\x04 and"],
)
def test_other_files_and_the_format_of_before_torch_1_6_are_refused(tmp_path, content):
    for one in (content, OLD.getvalue()):
        (tmp_path / "file").write_bytes(one)
        with pytest.raises(CommandError, match=r"is not a file of torch\.save"):
            load(tmp_path / "file")
    with pytest.raises(CommandError, match="can't be read: No such file"):
        load(tmp_path / "nothing")
    with pytest.raises(CommandError, match="can't be read: Is a directory; name a file"):
        load(tmp_path)


# ---- names

MODULE = """
from pathlib import Path
from rayloader import DataLoader
import beside_it

loader = DataLoader(range(4), batch_size=2)
dataset = [1, 2, 3]

class Squares:
    rate = 3

    def __getitem__(self, index):
        return index**2

def make(rank=None, num_replicas=None):
    return rank, num_replicas
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a module that imports another one, neither of which is imported afterwards."""
    (tmp_path / "of_mine.py").write_text(MODULE)
    (tmp_path / "beside_it.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("of_mine", "beside_it"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("by", ["module", "file", "path"])
def test_an_object_is_found_by_its_module_or_its_file(folder, monkeypatch, by):
    monkeypatch.chdir(folder.parent if by == "path" else folder)
    module = {"module": "of_mine", "file": "of_mine.py", "path": f"{folder.name}/of_mine.py"}[by]
    assert named(f"{module}:dataset") == made(f"{module}:dataset") == [1, 2, 3]
    assert named(f"{module}:Squares.rate") == 3
    assert isinstance(made(f"{module}:loader"), DataLoader)
    assert made(f"{module}:Squares")[3] == 9
    assert made(f"{module}:make", rank=1, num_replicas=2) == (1, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("of_mine", {}, r"must be named as module:name or file\.py:name, got 'of_mine'"),
        (":make", {}, "must be named as"),
        ("nowhere:make", {}, "nowhere:make can't be found: No module named 'nowhere'"),
        ("nowhere.py:make", {}, r"nowhere\.py:make can't be found: there is no file nowhere\.py"),
        ("of_mine:nothing", {}, "can't be found: module 'of_mine' has no attribute 'nothing'"),
        ("json.py:loads", {}, r"can't be found: there is another module json, .*json/__init__\.py"),
        ("of_mine:make", {"seed": 1}, r"of_mine:make\(seed=1\) raised TypeError: .* unexpected keyword"),
        ("of_mine:loader", {"rank": 1}, r"of_mine:loader\(rank=1\) raised TypeError: .* not callable"),
    ],
)
def test_what_is_not_there_or_not_taken_is_named(folder, monkeypatch, name, arguments, message):
    monkeypatch.chdir(folder)
    (folder / "json.py").touch()
    with pytest.raises(CommandError, match=message):
        made(name, **arguments)
