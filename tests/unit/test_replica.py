"""Images: what is copied, what is referred to, what is shared and what stays private. Without Ray.

An image is mostly opened in the process that made it, which is no different from any other.
"""

import contextlib
import copy
import dataclasses
import gc
import multiprocessing.shared_memory
import os
import pickle
import re
import sys
import tempfile
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pandas
import pytest
import torch

from rayloader.actors.image import Contents, Image, image_from_content, open_image
from rayloader.errors import ReplicaError, ReplicaMemoryError
from rayloader.transport import codec, memory_file
from rayloader.transport.memory_file import MemoryFileError, address_of_buffer
from rayloader.transport.replica import encode_for_worker, shared_file

PAGE = os.sysconf("SC_PAGESIZE")


def write(obj, old=None):
    """The image for the next epoch: the last one if nothing has changed."""
    contents = Contents(encode_for_worker(obj))
    return old if old is not None and old.equals(contents) else Image.write(contents)


def read(image, **how):
    return codec.decode(*open_image(pickle.loads(pickle.dumps(image.address)), **how))


def descriptors():
    return sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))


@pytest.fixture
def data_file(tmp_path):
    path = tmp_path / "data file.bin"
    path.write_bytes(bytes(range(256)) * 256)
    return path


# ---- what is copied, and what is mapped again


def from_file(path, **options):
    return torch.from_file(str(path), size=1000, dtype=torch.uint8, **options)


def by_name():
    """Shared by the strategy that counts users in the memory itself."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        return torch.zeros(1000).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def sent(obj):
    """As it arrives in another process of torch's."""
    return ForkingPickler.loads(bytes(ForkingPickler.dumps(obj)))


OF_ONE_MAP = {
    "itself": lambda mapped: mapped,
    "as an array": np.asarray,
    "slice": lambda mapped: mapped[3 * PAGE + 5 : 4 * PAGE],
    "column": lambda mapped: mapped.reshape(-1, 32)[:, 5:7],
    "element": lambda mapped: mapped[9:10],
}
OBJECTS = {
    "array": (lambda path: np.zeros(5 * PAGE, np.uint8), "copied"),
    "tensor": (lambda path: torch.arange(1000), "copied"),
    "shared by name": (lambda path: by_name(), "copied"),
    "private file of torch's": (lambda path: from_file(path, shared=False), "copied"),
    "file of torch's": (lambda path: from_file(path, shared=True), "shared"),
    "shared tensor": (lambda path: torch.zeros(1000).share_memory_(), "shared"),
    "shared tensor of another process": (lambda path: sent(torch.zeros(1000).share_memory_()), "shared"),
    "array of a shared tensor": (lambda path: torch.zeros(1000).share_memory_().numpy()[5:], "shared"),
    **{
        f"{mode} map, {name}": ((lambda path, mode=mode, view=view: view(np.memmap(path, mode=mode))), fate)
        for mode, fate in [("r+", "shared"), ("c", "copied"), ("r", "read-only")]
        for name, view in OF_ONE_MAP.items()
    },
}


def first(obj):
    return np.asarray(obj).flat[0]


def set_first(obj, value):
    obj[(0,) * obj.ndim] = value


@pytest.mark.parametrize("name", OBJECTS)
def test_what_is_shared_stays_so_and_what_is_copied_is_the_readers_own(name, data_file):
    """Also where a worker reads what a worker had: the dataset of a shared loader goes through its producer."""
    make, fate = OBJECTS[name]
    source = make(data_file)
    image = write(source)
    assert len(image.address.regions) == (fate != "copied")
    one, other = read(image), read(write(read(image)))
    for found in (one, other):
        assert (type(found), found.dtype, found.tolist()) == (type(source), source.dtype, source.tolist())
        assert fate == "copied" or np.asarray(found).strides == np.asarray(source).strides
    if fate == "read-only":
        assert not one.flags.writeable
        data_file.write_bytes(b"\x09" * (1 << 16))
        assert [first(one), first(other), first(read(image))] == [9] * 3
        assert write(source, image) is image
        return
    if fate == "shared" and isinstance(one, torch.Tensor):
        assert one.is_shared()
        assert one.untyped_storage().nbytes() == source.untyped_storage().nbytes()
        one.share_memory_()  # again, as Hugging Face's streams do
    set_first(one, 201)
    assert [first(obj) == 201 for obj in (source, other, read(image))] == [fate == "shared"] * 3
    set_first(source, 55)
    assert [first(obj) == 55 for obj in (one, other, read(image))] == [fate == "shared"] * 3
    assert first(read(write(source, image))) == 55


AT = 150  # the number that is written, of the whole array
# Objects over one memory: how to make each from those before it, and where that number is.
OVER_ONE = {
    "array": (lambda held: np.arange(2000.0), lambda array: (array, AT)),
    "same": (lambda held: held["array"], lambda array: (array, AT)),
    "part view": (lambda held: held["array"][100:300], lambda array: (array, AT - 100)),
    "tensor": (lambda held: torch.from_numpy(held["array"]), lambda tensor: (tensor, AT)),
    "part of the tensor": (lambda held: held["tensor"][140:160], lambda tensor: (tensor, AT - 140)),
    "shallow copy": (lambda held: copy.copy(held), lambda holder: (holder["array"], AT)),
    "frame": (lambda held: pandas.DataFrame({"a": held["array"]}, copy=False), lambda frame: (frame.iloc, (AT, 0))),
    "series": (lambda held: held["frame"]["a"], lambda series: (series.iloc, AT)),
}


def over_one():
    held = {}
    for kind, (make, _) in OVER_ONE.items():
        held[kind] = make(held)
    return held


def seen(held):
    """For each object, those that show what is written to it."""
    found, places = {}, {kind: place(held[kind]) for kind, (_, place) in OVER_ONE.items()}
    for number, (kind, (target, at)) in enumerate(places.items()):
        target[at] = -1.0 - number
        found[kind] = [one for one, (obj, where) in places.items() if float(obj[where]) == -1.0 - number]
    return found


def test_what_pickling_keeps_as_one_is_one_and_all_else_is_separate_in_each_epoch():
    """All pairs: of objects over one memory, those that a write to each shows in, as between torch's processes."""
    held, image = over_one(), None
    want = seen(sent(over_one()))
    assert want["array"] == ["array", "same", "shallow copy"]
    assert want["tensor"] == ["tensor", "part of the tensor"]
    for _ in range(3):
        image = write(held, image)
        assert seen(read(image)) == want
    assert write(held, image) is image
    assert (held["array"] == np.arange(2000)).all()


def test_a_copy_of_shared_memory_is_noticed(data_file):
    """Whatever hides it: torch forgets the array that a tensor is over, and a memoryview its name."""

    def noticed(obj):
        return shared_file(map(address_of_buffer, encode_for_worker(obj).buffers))

    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=100)
    try:
        over = np.ndarray(1, np.uint8, memory.buf)
        assert noticed(over) == f"/dev/shm/{memory.name}"
        assert noticed(torch.from_numpy(np.memmap(data_file, mode="r+"))) == str(data_file)
        assert noticed(by_name()).startswith("/dev/shm/torch_")
        assert noticed(np.frombuffer(multiprocessing.RawArray("B", 1000), np.uint8)) is not None
        assert noticed([torch.from_numpy(np.memmap(data_file, mode="c")), np.zeros(1000), torch.zeros(1000)]) is None
    finally:
        del over
        memory.close()
        memory.unlink()


# ---- the image itself


def test_image_object_and_what_was_opened_live_without_each_other_and_nobody_can_write_to_the_image(data_file):
    before, array = descriptors(), np.arange(1000)
    references = sys.getrefcount(array)
    obj = {"kept": array, "dropped": np.arange(1000), "mapped": np.memmap(data_file)}
    image = write(obj)
    del obj
    gc.collect()
    assert sys.getrefcount(array) == references
    address, kept, file = image.address, read(image)["kept"], image._file.fd
    for change in (lambda: os.pwrite(file, b"x", 0), lambda: os.ftruncate(file, 1)):
        with pytest.raises(PermissionError):
            change()
    assert len(descriptors()) == len(before) + 1
    del image
    gc.collect()
    assert descriptors() == before
    assert kept.tolist() == list(range(1000))
    with pytest.raises(MemoryFileError):
        open_image(address)


def test_elsewhere_a_copy_of_it_is_opened(data_file):
    image = write({"copied": np.arange(300_000), "mapped": np.memmap(data_file)})
    content = bytes(image.content())
    there = image_from_content(image.address, content)
    assert there.address.name != image.address.name
    for obj in (read(there, here=False), codec.decode(*open_image(image.address, here=False, content=content))):
        assert obj["copied"].tolist() == list(range(300_000))
        assert obj["mapped"][255] == 255
        obj["copied"][0] = 1  # writable
    file = dataclasses.replace(image.address.file, machine="another")
    with pytest.raises(MemoryFileError, match="must be opened where it was made"):
        open_image(dataclasses.replace(image.address, file=file))


# ---- what has changed


def epochs():
    """A dataset that changes from one to the next, in each way."""
    big, small = np.zeros(3 << 20, np.uint8), [np.full(2000 + number, number) for number in range(3)]
    changed = big.copy()
    changed[-1] = 1
    yield {"big": big, "small": small, "text": "one", "empty": (np.zeros(0), torch.zeros(0))}
    yield {"big": changed, "small": small, "text": "one"}
    yield {"big": changed, "small": small, "text": "two"}  # of the same length
    yield {"big": changed, "small": [small[0], small[1] + 1], "text": "two"}
    yield [small[2], small[0]]
    yield [small[0], small[2]]


def test_what_has_changed_is_written_anew_and_nothing_else_is():
    """All of it: what workers of the last epoch have is another file."""
    image, texts, before = write(None), ["None"], descriptors()
    for obj, equal in zip(epochs(), epochs(), strict=True):
        last, image = image, write(obj, image)
        texts.append(str(obj))
        assert [str(read(one)) for one in (last, image)] == texts[-2:]
        assert write(obj, image) is write(equal, image) is image  # from other memory
        del last
        assert len(descriptors()) == len(before)


# ---- files that are not there


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not have.*No such file.*same path"),
        (b"short", "another file, of 5 bytes; the driver's had 65536"),
    ],
)
def test_a_file_that_a_worker_does_not_find_is_named(data_file, here, content, message):
    image = write(np.memmap(data_file, mode="r"))
    data_file.rename(data_file.with_name("elsewhere"))
    if content is not None:
        data_file.write_bytes(content)
    with pytest.raises(ReplicaError, match=f"{re.escape(str(data_file))}.*{message}"):
        read(image, here=here)


@pytest.mark.parametrize("mode", ["r+", "c", "r"])
@pytest.mark.parametrize("other", ["none", "closed", "open"])
def test_a_file_that_has_lost_its_name_is_an_error_if_it_is_shared(data_file, mode, other):
    """And another one that has got the name is not taken for it."""
    mapped = np.memmap(data_file, mode=mode)
    data_file.unlink()
    if other != "none":
        data_file.write_bytes(bytes(1 << 16))
    with data_file.open("rb") if other == "open" else contextlib.nullcontext():
        if mode != "r+":
            assert read(write(mapped)).tolist() == mapped.tolist()
            return
        with pytest.raises(ReplicaError, match=rf"{re.escape(str(data_file))}, which can't be opened any more; keep"):
            write(mapped)


def test_a_file_without_a_name_is_an_error_if_it_is_shared(tmp_path):
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1000))
        file.flush()
        assert read(write(np.memmap(file, mode="r"))).tolist() == [0] * 1000
        with pytest.raises(ReplicaError, match=r'of no name, which can.*workers="fork"'):
            write(np.memmap(file, mode="r+"))


def test_shared_memory_is_not_opened_on_another_node():
    image = write(torch.zeros(1000).share_memory_())
    with pytest.raises(ReplicaError, match=r"shared memory, /dev/shm/torch_.*keep the workers on the driver's"):
        read(image, here=False)


# ---- room


def test_too_little_memory_is_said_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(memory_file, "available", lambda: 20_000_000)
    before = descriptors()
    with pytest.raises(
        ReplicaMemoryError, match=r"0\.03 GB are needed.*0\.02 GB are available.*np\.memmap.*SharedList"
    ):
        write(np.zeros(30_000_000, np.uint8))
    assert descriptors() == before
    write(np.zeros(1000))


def test_the_control_groups_count(tmp_path):
    (tmp_path / "job" / "task").mkdir(parents=True)
    for folder, limit, current in (("job", "max", 5), ("job/task", "1000", 900)):
        for name, text in (("max", limit), ("current", current), ("stat", "anon 3\ninactive_file 50\n")):
            (tmp_path / folder / f"memory.{name}").write_text(f"{text}\n")
    names = "memory.max", "memory.current", "inactive_file"
    assert list(memory_file._groups(tmp_path, "/job/task", *names)) == [150]
    assert list(memory_file._groups(tmp_path, "/nowhere", *names)) == []
    assert memory_file.available() > 0
