"""Images: what is copied, what is referred to, what is shared and what stays private. Without Ray.

An image is mostly opened in the process that made it, which is no different from any other; what only another process
can show is asked of one.
"""

import contextlib
import dataclasses
import gc
import multiprocessing.shared_memory
import os
import pickle
import re
import sys
import tempfile
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

import aliases
from rayloader.actors.image import Contents, Image, image_from_content, open_image
from rayloader.errors import ReplicaError, ReplicaMemoryError
from rayloader.transport import codec, memory_file
from rayloader.transport.memory_file import MemoryFileError, address_of_buffer
from rayloader.transport.replica import encode_for_worker, explain, shared_file

PAGE = os.sysconf("SC_PAGESIZE")
MIB = 1 << 20


def contents_of(obj):
    return Contents(encode_for_worker(obj))


def write(obj, old=None):
    """The image for the next epoch: the last one if nothing has changed."""
    contents = contents_of(obj)
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


# What is copied


def dataset():
    base = torch.arange(1000.0)
    return {
        "big": np.arange(300_000),
        "tensors": [base[10:20], base.view(10, 100)[:, 3]],
        "small": np.arange(3),
        "empty": (np.zeros(0), torch.zeros(0)),
        "text": "text",
    }


def test_what_was_written_is_read():
    obj = read(write(dataset()))
    assert obj["big"].tolist() == list(range(300_000))
    assert obj["tensors"][1].tolist() == list(range(3, 1000, 100))
    assert obj["small"].tolist() == [0, 1, 2]
    assert [part.shape for part in obj["empty"]] == [(0,), (0,)]
    obj["tensors"][0][0] = 7  # still one storage: element 10 of it is the first row's
    assert obj["tensors"][0].untyped_storage().data_ptr() == obj["tensors"][1].untyped_storage().data_ptr()


def test_a_write_stays_its_own():
    source = np.zeros(5 * PAGE, np.uint8)
    image = write(source)
    one, other = read(image), read(image)
    one[:] = 1
    assert not other.any()
    assert not source.any()
    source[:] = 2
    assert not other.any()
    assert not read(image).any()
    assert one.all()


def test_it_cannot_be_written_to_by_anybody():
    image = write(np.zeros(PAGE))
    file = image._file
    for change in (lambda: os.pwrite(file.fd, b"x", 0), lambda: os.ftruncate(file.fd, 1)):
        with pytest.raises(PermissionError):
            change()


def test_what_was_opened_outlives_the_image():
    before = descriptors()
    image = write({"kept": np.arange(1000), "dropped": np.arange(1000)})
    assert len(descriptors()) == len(before) + 1
    address, kept = image.address, read(image)["kept"]
    del image
    assert descriptors() == before
    gc.collect()
    assert kept.tolist() == list(range(1000))
    with pytest.raises(MemoryFileError):
        open_image(address)


def test_elsewhere_it_is_not_opened():
    image = write(np.arange(1000))
    file = dataclasses.replace(image.address.file, machine="another")
    with pytest.raises(MemoryFileError, match="must be opened where it was made"):
        open_image(dataclasses.replace(image.address, file=file))


def test_a_copy_elsewhere_is_equal(data_file):
    image = write({"copied": np.arange(300_000), "mapped": np.memmap(data_file)})
    content = bytes(image.content())
    there = image_from_content(image.address, content)
    assert there.address.name != image.address.name
    for obj in (read(there, here=False), codec.decode(*open_image(image.address, here=False, content=content))):
        assert obj["copied"].tolist() == list(range(300_000))
        assert obj["mapped"][255] == 255
        obj["copied"][0] = 1  # writable
    del there, content


# What has changed


def test_what_has_not_changed_is_not_written_again():
    obj = dataset()
    image = write(obj)
    assert write(obj, image) is image
    assert write(dataset(), image) is image  # equal, from other memory


@pytest.mark.parametrize("changed", ["a", "b", "text"])
def test_what_has_changed_is_written_anew(changed):
    """All of it: what workers of the last epoch have is another file."""
    obj = {"a": np.zeros(3 * MIB, np.uint8), "b": np.zeros(1000, np.uint8), "text": "one"}
    image = write(obj)
    old = read(image)
    if changed == "text":
        obj["text"] = "two"  # of the same length
    else:
        obj[changed][-1] = 1
    new = write(obj, image)
    assert new.address.name != image.address.name
    assert str(read(new)) == str(obj) != str(old)
    assert str(read(image)) == str(old)
    assert write(obj, new) is new
    before = descriptors()
    del image
    assert len(descriptors()) == len(before) - 1


def test_what_comes_goes_and_moves():
    arrays = [np.full(2000 + number, number) for number in range(5)]
    image = write(arrays)
    for changed in ([arrays[4], arrays[0]], [*arrays, arrays[1] + 1], [], arrays[::-1], "nothing", {"a": arrays[2]}):
        image = write(changed, image)
        found = read(image)
        assert str(found) == str(changed)
        assert write(changed, image) is image


def test_an_image_keeps_nothing_of_the_object(data_file):
    array = np.zeros(MIB)
    obj = {"array": array, "mapped": np.memmap(data_file)}
    image = write(obj)
    before = sys.getrefcount(array)
    again = write(obj, image)
    gc.collect()
    assert sys.getrefcount(array) == before
    assert again is image


# What is backed by a file


@pytest.mark.parametrize("shape", ["memmap", "asarray", "slice", "backwards", "column", "element", "pickled in band"])
@pytest.mark.parametrize("mode", ["r+", "c", "r"])
def test_memory_maps_are_mapped_again(data_file, mode, shape):
    mapped = np.memmap(data_file, mode=mode)
    view = {
        "memmap": lambda: mapped,
        "asarray": lambda: np.asarray(mapped),
        "slice": lambda: mapped[3 * PAGE + 5 : 4 * PAGE],
        "backwards": lambda: mapped[::-1],
        "column": lambda: mapped.reshape(-1, 32)[:, 5:7],
        "element": lambda: mapped[9:10],
        "pickled in band": lambda: mapped[:100],
    }[shape]()
    expected = view.tolist()
    image = write(view)
    assert len(image.address.regions) == (mode != "c")  # a private map is copied
    found = read(image)
    assert type(found) is type(view)
    assert found.strides == view.strides or mode == "c"
    assert found.tolist() == expected
    if mode == "r":
        assert not found.flags.writeable
        return
    found.flat[0] = 201
    assert (view.flat[0] == 201) == (mode == "r+")
    view.flat[0] = 55
    assert found.flat[0] == (55 if mode == "r+" else 201)


def test_a_torch_file_that_is_shared_is_mapped_again_and_another_one_copied(data_file):
    for shared in (True, False):
        tensor = torch.from_file(str(data_file), shared=shared, size=1000, dtype=torch.uint8)
        image = write(tensor)
        found = read(image)
        assert torch.equal(found, tensor)
        found[3] = 77 + shared
        assert (tensor[3] == found[3]) == shared
        assert len(image.address.regions) == shared


def test_parts_of_one_map_are_in_one_mapping(data_file):
    rows = np.memmap(data_file, mode="r+", offset=100)[:5000].reshape(50, 100)
    image = write([rows, *rows, rows[5:7]])
    assert len(image.address.regions) == 1
    whole, *each, part = read(image)
    whole[5] = 1
    assert [each[5][9], part[0, 9], rows[5, 9], each[4][9]] == [1, 1, 1, (100 + 409) % 256]


def test_what_the_driver_has_written_to_a_private_map_is_copied(data_file):
    mapped = np.memmap(data_file, mode="c")
    mapped[5 * PAGE] = 98
    image = write(mapped)
    found = read(image)
    assert found.tolist() == mapped.tolist()
    mapped[5 * PAGE] = 97
    assert read(write(mapped, image))[5 * PAGE] == 97
    assert found[5 * PAGE] == 98


def test_a_replaced_content_of_the_file_is_seen(data_file):
    mapped = np.memmap(data_file, mode="r")
    image = write(mapped)
    with data_file.open("r+b") as file:
        file.write(b"\x09")
    assert read(image)[0] == 9
    assert write(mapped, image) is image


def test_a_missing_file_is_named(data_file):
    mapped = np.memmap(data_file, mode="r")
    image = write(mapped)
    data_file.rename(data_file.with_name("elsewhere"))
    for here in (True, False):
        with pytest.raises(ReplicaError, match=rf"{re.escape(str(data_file))}.*does not have.*No such file.*same path"):
            read(image, here=here)


def test_another_file_under_the_name_is_refused(data_file):
    mapped = np.memmap(data_file, mode="r")
    image = write(mapped)
    data_file.unlink()
    data_file.write_bytes(b"short")
    for here in (True, False):
        with pytest.raises(ReplicaError, match=r"another file, of 5 bytes; the driver's had 65536"):
            read(image, here=here)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_has_lost_its_name_is_an_error_if_it_is_shared(data_file, replaced):
    private, shared = np.memmap(data_file, mode="c"), np.memmap(data_file, mode="r+")
    data_file.unlink()
    if replaced:
        data_file.write_bytes(bytes(1 << 16))
    assert read(write(private)).tolist() == private.tolist()
    with pytest.raises(ReplicaError, match=rf"{re.escape(str(data_file))}, which can't be opened any more; keep"):
        write(shared)


@pytest.mark.parametrize("mode", ["r+", "c", "r"])
def test_of_two_files_that_had_the_name_neither_is_taken_for_the_other(data_file, mode):
    mapped = np.memmap(data_file, mode=mode)
    data_file.unlink()
    data_file.write_bytes(bytes(1 << 16))
    with data_file.open("rb"):
        if mode == "r+":
            with pytest.raises(ReplicaError, match=rf"{re.escape(str(data_file))}, which can't be opened any more"):
                write(mapped)
        else:
            assert read(write(mapped)).tolist() == mapped.tolist()


def test_a_file_without_a_name_is_an_error_if_it_is_shared(tmp_path):
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1000))
        file.flush()
        assert read(write(np.memmap(file, mode="r"))).tolist() == [0] * 1000
        with pytest.raises(ReplicaError, match=r'of no name, which can.*workers="fork"'):
            write(np.memmap(file, mode="r+"))


def test_torchs_shared_memory_stays_shared():
    tensor = torch.zeros(1000).share_memory_()
    image = write({"flags": tensor, "part": tensor[10:12]})
    found = read(image)
    found["flags"] += 1
    assert tensor.sum() == 1000
    tensor[10] = 5
    assert found["part"].tolist() == [5, 1]
    with pytest.raises(ReplicaError, match=r"shared memory, /dev/shm/torch_.*keep the workers on the driver's"):
        read(image, here=False)


@contextlib.contextmanager
def sharing(strategy):
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class SharesAgain:
    """As Hugging Face's streams do."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.part = tensor[10:12]
        self.array = tensor.numpy()
        self.row = tensor.numpy()[20:30]

    def __setstate__(self, state):
        vars(self).update(state)
        self.tensor = self.tensor.share_memory_()


@pytest.mark.parametrize("kind", ["file_descriptor", "from_file", "queue"])
def test_what_torch_has_shared_is_shared_for_torch_again(tmp_path, kind):
    if kind == "from_file":
        tensor = torch.from_file(str(tmp_path / "cells"), shared=True, size=1000).zero_()
    else:
        tensor = torch.zeros(1000).share_memory_()
    if kind == "queue":
        tensor = ForkingPickler.loads(bytes(ForkingPickler.dumps(tensor)))
    found = read(write(SharesAgain(tensor)))
    assert found.tensor.is_shared()
    assert found.tensor.untyped_storage().nbytes() == tensor.untyped_storage().nbytes()
    assert found.tensor.data_ptr() != tensor.data_ptr()
    found.part += 1
    found.array[5] = 2
    found.row[0] = 3
    tensor[999] = 4
    assert found.tensor[[5, 10, 11, 20, 999]].tolist() == [2, 1, 1, 3, 4]
    assert torch.equal(found.tensor, tensor)
    if kind != "from_file":  # torch can't send those of files on
        sent = ForkingPickler.loads(bytes(ForkingPickler.dumps(found.tensor)))
        sent[0] = 5
        assert tensor[0] == 5


def test_what_is_shared_by_name_is_copied_and_the_copy_is_noticed():
    with sharing("file_system"):
        tensor = torch.zeros(100_000).share_memory_()
    encoded = encode_for_worker([tensor, tensor.numpy()])
    assert not encoded.mapped
    assert shared_file(map(address_of_buffer, encoded.buffers)).startswith("/dev/shm/torch_")
    assert tensor.is_shared()


def test_many_shared_tensors():
    tensors = [torch.full((3,), float(number)).share_memory_() for number in range(300)]
    found = read(write(tensors))
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    for tensor in found:
        tensor += 1
    assert [tensor[0] for tensor in tensors] == list(range(1, 301))


def test_what_was_mapped_in_a_worker_is_mapped_again_from_there(data_file):
    """A loader that is shared is sent to its producer, and its dataset from there to the workers."""
    shared = torch.zeros(1000).share_memory_()
    obj = [np.memmap(data_file, mode="r+")[7:], shared, shared.numpy()[5:]]
    image = write(obj)
    first = read(image)
    del image
    second = write(first)
    assert second.address.file.nbytes < 4096
    for array in read(second):
        array[3] = 99
    assert [int(array[3]) for array in obj] == [99] * 3


def test_a_copy_of_shared_memory_is_noticed(data_file, tmp_path):
    """Whatever hides it: torch forgets the array that a tensor is over, and a memoryview its name."""
    writable, private = np.memmap(data_file, mode="r+"), np.memmap(data_file, mode="c")
    memory = multiprocessing.shared_memory.SharedMemory(create=True, size=100)
    try:
        over = np.ndarray(1, np.uint8, memory.buf)
        of_ctypes = np.frombuffer(multiprocessing.RawArray("B", 1000), np.uint8)
        assert shared_file(map(address_of_buffer, encode_for_worker(of_ctypes).buffers)) is not None
        for obj, path in ((torch.from_numpy(writable), str(data_file)), (over, f"/dev/shm/{memory.name}")):
            (buffer,) = encode_for_worker(obj).buffers
            assert shared_file([address_of_buffer(buffer)]) == path
        others = [torch.from_numpy(private), np.zeros(1000), torch.zeros(1000)]
        assert shared_file(map(address_of_buffer, encode_for_worker(others).buffers)) is None
    finally:
        del over
        memory.close()
        memory.unlink()


def test_arrow_tables_are_shared():
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"number": np.arange(10_000), "text": [str(number) for number in range(10_000)]})
    image = write(table)
    assert image.address.file.nbytes > 100_000
    assert read(image).equals(table)


# Memory


def test_too_little_memory_is_said_before_anything_is_written(monkeypatch):
    monkeypatch.setattr(memory_file, "available", lambda: 20_000_000)
    obj = np.zeros(30_000_000, np.uint8)
    before = descriptors()
    with pytest.raises(
        ReplicaMemoryError, match=r"0\.03 GB are needed.*0\.02 GB are available.*np\.memmap.*SharedList"
    ):
        write(obj)
    assert descriptors() == before
    write(np.zeros(1000))


def test_the_control_groups_count(tmp_path):
    (tmp_path / "job" / "task").mkdir(parents=True)
    for folder, limit, current in (("job", "max", 5), ("job/task", "1000", 900)):
        (tmp_path / folder / "memory.max").write_text(f"{limit}\n")
        (tmp_path / folder / "memory.current").write_text(f"{current}\n")
        (tmp_path / folder / "memory.stat").write_text("anon 3\ninactive_file 50\n")
    names = "memory.max", "memory.current", "inactive_file"
    assert list(memory_file._groups(tmp_path, "/job/task", *names)) == [150]
    assert list(memory_file._groups(tmp_path, "/nowhere", *names)) == []
    assert memory_file.available() > 0


# What can't travel


def test_a_pipe_is_refused_and_the_remedy_named():
    ours, theirs = Pipe()
    with ours, theirs:
        with pytest.raises(TypeError, match="Connection"):
            codec.encode({"pipe": ours})
        text = explain({"pipe": ours}, "dataset")
    assert text.startswith("dataset['pipe']: multiprocessing.connection.Connection")
    assert "share_memory_()" in text


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (multiprocessing.Lock, "use that of a manager, such as multiprocessing.Manager().Lock(), instead"),
        (multiprocessing.Event, "use that of a manager"),
        (multiprocessing.Queue, "use multiprocessing.Manager().Queue() instead"),
        (lambda: multiprocessing.Value("i"), "use a tensor after share_memory_() instead"),
    ],
)
def test_the_remedy_is_one_for_that_kind_of_object(make, instead):
    text = explain({"it": make()}, "dataset")
    assert text.startswith("dataset['it']")
    assert instead in text


def test_an_open_text_file_in_a_batch_is_refused(tmp_path):
    """A StringIO, which cloudpickle would send, has other offsets than the file."""
    (tmp_path / "lines.txt").write_text("one\n")
    with (tmp_path / "lines.txt").open() as file, pytest.raises(TypeError, match="TextIOWrapper"):
        codec.encode({"file": file})


# What shares memory


def test_what_pickling_keeps_as_one_is_one_and_all_else_is_separate_in_each_epoch():
    """All pairs: of objects over one memory, those that a write to each shows in, as between torch's processes."""
    held, image = aliases.made(), None
    between_processes = ForkingPickler.loads(bytes(ForkingPickler.dumps(aliases.made())))
    want = {written: aliases.seen(between_processes, written) for written in aliases.WRITTEN}
    assert want["array"] == ["array", "same", "shallow copy"]
    assert want["tensor"] == ["tensor", "part of the tensor"]
    for _ in range(3):
        image = write(held, image)
        opened = read(image)
        assert {written: aliases.seen(opened, written) for written in aliases.WRITTEN} == want
    assert write(held, image) is image
    assert (held["array"] == np.arange(2000)).all()
