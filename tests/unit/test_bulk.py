"""Many small tensors and arrays of one kind: what goes in bulk, and that nobody can tell."""

import mmap
import pickle

import numpy as np
import pytest
import torch

from rayloader.actors.image import Image, open_image
from rayloader.transport import bulk, codec, raw
from rayloader.transport.mapped import Mappings

MANY = 150


def take(obj):
    mappings = Mappings()
    return codec.encode(obj, mapped=mappings), mappings


def write(obj, old=None):
    return Image.write(*take(obj), old)


def read(image):
    return codec.decode(*open_image(pickle.loads(pickle.dumps(image.address))))


def gathered(obj):
    """Bytes that travel in bulk."""
    return sum(buffer.nbytes for buffer in take(obj)[0].gathered)


def numbers(shape, dtype):
    """Each another."""
    count = torch.Size(shape).numel()
    return [(torch.arange(number, number + count) % 120).to(dtype).reshape(shape) for number in range(MANY)]


def describe(tensor):
    storage = tensor.untyped_storage()
    return type(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes()


@pytest.mark.parametrize("shape", [(), (1,), (24,), (1, 4), (4, 1), (2, 1, 3), (2, 3, 4)])
def test_tensors(shape):
    kinds = [numbers(shape, dtype) for dtype in (torch.float32, torch.bool, torch.uint16, torch.int64, torch.float16)]
    tensors = [tensor for kind in kinds for tensor in kind]
    assert gathered(tensors) == sum(tensor.nbytes for kind in kinds for tensor in kind[bulk._FEW :])
    image = write(tensors)
    found = read(image)
    for one, other in zip(found, tensors, strict=True):
        assert describe(one) == describe(other)
        assert torch.equal(one, other)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == len(tensors)
    found[47].zero_()  # private
    assert torch.equal(found[48], tensors[48])
    assert torch.equal(read(image)[47], tensors[47])
    assert write(tensors, image) is image


@pytest.mark.parametrize("shape", [(), (1,), (24,), (4, 1), (2, 3, 4)])
def test_arrays(shape):
    kinds = [
        [np.array(tensor.numpy(), dtype) for tensor in numbers(shape, torch.int64)]
        for dtype in ("f4", "?", "u2", "i8", "c16", "g", "f2")
    ]
    arrays = [array for kind in kinds for array in kind]
    for array in kinds[1]:
        array.flags.writeable = False
    assert gathered(arrays) == sum(array.nbytes for kind in kinds for array in kind[bulk._FEW :])
    image = write(arrays)
    found = read(image)
    for one, other in zip(found, arrays, strict=True):
        assert (type(one), one.dtype, one.shape, one.strides) == (type(other), other.dtype, other.shape, other.strides)
        assert one.flags.writeable == other.flags.writeable
        assert np.array_equal(one, other)
    found[47][...] = 1
    assert np.array_equal(found[48], arrays[48])
    assert np.array_equal(read(image)[47], arrays[47])
    assert write(arrays, image) is image


def test_little_is_pickled_for_each():
    """What costs time is counted: buffers, and bytes of the pickle."""
    tensors, arrays = [torch.ones(5) for _ in range(2000)], [np.ones(5) for _ in range(2000)]
    encoded, _ = take([{"tensor": tensor, "array": array} for tensor, array in zip(tensors, arrays, strict=True)])
    assert len(encoded.buffers) < 20
    assert len(encoded.gathered) == 2
    assert len(encoded.skeleton) < 2000 * 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize(
    ("order", "inference"),
    [("rows", False), ("rows", True), ("reversed", False), ("one distance", False), ("any", True)],
)
def test_views(dtype, order, inference):
    base = (torch.arange(20 * MANY) % 100).to(dtype).view(MANY, 20)
    views = {
        "rows": list(base),
        "reversed": list(base[:, 3:5])[::-1],
        "one distance": list(base[5::2, 1:4:2]),
        "any": [base[number * 7 % MANY, number % 3 :][:5] for number in range(MANY)],
    }[order]
    encoded, _ = take(views)
    assert (len(encoded.buffers), encoded.gathered) == (1, [])
    assert encoded.buffers[0].nbytes <= base.nbytes
    assert len(encoded.skeleton) < 20 * MANY
    image = write(views)
    with torch.inference_mode(inference):
        found = read(image)
    for one, other in zip(found, views, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)
        assert not one._is_view()
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1
    with torch.inference_mode(inference):
        found[47].zero_()
    assert torch.equal(found[48], views[48])
    assert write(views, image) is image
    assert not torch.equal(found[47], views[47])


def test_views_that_are_not_what_they_seem():
    negative = torch.full((MANY, 1), 1 + 2j).conj().imag
    shrunk = torch.ones(2 * MANY, 4)
    rows = list(shrunk)
    shrunk.untyped_storage().resize_(16 * MANY)
    found = read(write([list(negative), rows[:MANY], torch.ones(MANY, 4)[20:].unbind(0)]))
    assert all(tensor.item() == -2 and tensor.is_neg() for tensor in found[0])
    assert all(torch.equal(tensor, torch.ones(4)) for tensor in (*found[1], *found[2]))
    groups = bulk.Groups(Mappings())
    assert [groups.tensor(row) is None for row in rows] == [True] * 16 + [False] * (MANY - 16) + [True] * MANY


def test_views_of_files_are_theirs(tmp_path):
    cells = torch.from_file(str(tmp_path / "cells"), shared=True, size=4 * MANY).zero_()
    shared = torch.zeros(MANY, 4).share_memory_()
    found = read(write([list(cells.view(MANY, 4)), shared, list(shared)]))
    for row in (*found[0], *found[2]):
        row += 1
    assert (cells == 1).all()
    assert (shared == 1).all()
    assert torch.equal(found[1], shared)


def test_one_object_stays_one():
    tensor, array = torch.ones(3), np.ones(3)
    found = read(write([[torch.ones(3), np.ones(3)] for _ in range(MANY)] + [[tensor, array]] * 2))
    assert found[-1][0] is found[-2][0]
    assert found[-1][1] is found[-2][1]


def test_only_what_changed_is_written_anew():
    tensors = [torch.full((1000,), float(number)) for number in range(2000)]
    image = write(tensors)
    tensors[700][3] = -1
    changed = write(tensors, image)
    assert changed.address.files[:-1] == image.address.files
    assert changed.address.files[-1].nbytes < 1.2e6
    assert read(changed)[700][3] == -1
    for other in (tensors[::-1], tensors[:30], [*tensors, torch.zeros(7)], [*tensors[:9], torch.zeros(1000, 1)]):
        changed = write(other, changed)
        assert all(torch.equal(*pair) for pair in zip(read(changed), other, strict=True))


def test_storages_that_are_shared_stay_so():
    tensors = [torch.zeros(4) for _ in range(MANY)]
    obj = {
        "tensors": tensors,
        "part": tensors[100][1:3],
        "same": tensors[101].detach(),
        "reshaped": [tensor.view(2, 2) for tensor in tensors[102:130]],
        "parameter": torch.nn.Parameter(tensors[131], requires_grad=False),
        "storage": tensors[132].untyped_storage(),
    }
    found = read(write(obj))
    found["part"][0] = 1
    found["same"][1] = 2
    for tensor in found["reshaped"]:
        tensor[0, 1] = 3
    found["parameter"][1] = 4
    torch.empty(0).set_(found["storage"])[1] = 5
    got = [tensor[1].item() for tensor in found["tensors"]]
    assert got == [0] * 100 + [1, 2] + [3] * 28 + [0, 4, 5] + [0] * (MANY - 133)
    assert sum(tensor.sum() for tensor in found["tensors"]) == sum(got)
    assert not any(tensor.any() for tensor in tensors)


def test_what_lies_in_files_stays_there(tmp_path):
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(MANY, 4))
    shared = [torch.zeros(4).share_memory_() for _ in range(40)]
    obj = {
        "rows": list(np.asarray(mapped)),
        "tensors": [torch.from_numpy(row) for row in mapped],
        "shared": [*shared, *(torch.zeros(4) for _ in range(20))],
    }
    found = read(write(obj))
    for number in range(MANY):
        found["rows"][number][0] = number
        found["tensors"][number][1] = number
    assert mapped[:, 0].tolist() == mapped[:, 1].tolist() == list(range(MANY))
    for tensor in found["shared"]:
        tensor += 1
    assert all((tensor == 1).all() for tensor in shared)
    assert [tensor.is_shared() for tensor in found["shared"]] == [True] * 40 + [False] * 20


def odd_tensors():
    base = torch.arange(600.0)
    leaf = torch.ones(4, requires_grad=True)
    attributed = torch.ones(4)
    attributed.note = "n"
    return {
        "views": list(base.view(100, 6)),
        "transposed": [torch.ones(2, 3).t() for _ in range(20)],
        "strided by one": [torch.ones(4).as_strided((1, 4), (9, 1)) for _ in range(20)],
        "larger storages": [torch.ones(5)[1:] for _ in range(20)],
        "leaf": leaf,
        "attributed": attributed,
        "bfloat16": [torch.ones(4, dtype=torch.bfloat16) for _ in range(20)],
        "complex": [torch.ones(2, dtype=torch.complex64).conj() for _ in range(20)],
        "sparse": torch.ones(4).to_sparse(),
        "empty": [torch.ones(0) for _ in range(20)],
        "meta": torch.ones(4, device="meta"),
    }


def odd_arrays():
    return {
        "views": list(np.arange(600.0).reshape(100, 6)),
        "transposed": [np.ones((2, 3), order="F") for _ in range(20)],
        "other order": [np.arange(4).astype(">i4") for _ in range(20)],
        "dates": [np.arange(4).astype("M8[s]") for _ in range(20)],
        "text": [np.array(["a", "bc"]) for _ in range(20)],
        "objects": [np.array([1, None]) for _ in range(20)],
        "records": [np.zeros(2, [("a", "i4"), ("b", "f8")]) for _ in range(20)],
        "empty": [np.ones(0) for _ in range(20)],
        "metadata": [np.zeros(4, np.dtype("f8", metadata={"unit": "m"})) for _ in range(20)],
    }


def listed(value):
    return value if isinstance(value, list) else [value]


def test_others_take_their_own_way():
    """Beside so many of the same type and shape that those have a group."""
    tensors = odd_tensors()
    many = [torch.ones(shape) for shape in [(4,), (6,), (3, 2), (1, 4)] for _ in range(20)]
    found = read(write([many, tensors]))[1]
    for name, value in tensors.items():
        for one, other in zip(listed(found[name]), listed(value), strict=True):
            for attribute in ("dtype", "shape", "device", "layout", "requires_grad", "__dict__"):
                assert getattr(one, attribute) == getattr(other, attribute)
            assert one.is_conj() == other.is_conj()
            if other.layout is torch.strided:
                assert one.stride() == other.stride()
            if name != "meta":
                assert torch.equal(one.to_dense(), other.to_dense())
    found["views"][3][:] = 7
    assert torch.empty(0).set_(found["views"][0].untyped_storage())[18:24].tolist() == [7] * 6
    with pytest.raises(RuntimeError, match="Cowardly refusing"):
        take([many, tensors["leaf"] * 2])

    arrays = odd_arrays()
    many = [np.ones(shape) for shape in [(4,), (6,), (2, 3)] for _ in range(20)]
    found = read(write([many, arrays]))[1]
    for name, values in arrays.items():
        for one, other in zip(found[name], values, strict=True):
            metadata = pickle.loads(pickle.dumps(other.dtype)).metadata  # NumPy 2.0 makes an empty one for dates
            assert (one.dtype, one.shape, one.dtype.metadata) == (other.dtype, other.shape, metadata)
            assert one.tolist() == other.tolist()
            assert one.strides == other.strides or not other.size


@pytest.mark.parametrize("shift", [0, 1])
def test_bytes_are_gathered_from_wherever_they_are(shift):
    """In any order, at odd addresses, and from both ends of the memory that a process has."""
    heap, mapped = torch.arange(100, dtype=torch.uint8), np.frombuffer(mmap.mmap(-1, 1 << 18), np.uint8)
    mapped[:] = np.arange(len(mapped)) % 251
    storages = [heap.numpy(), mapped]
    places = [(0, 40), (1, 1 << 17), (0, 3 + shift), (1, 0), (1, 7 * shift), (0, 3 + shift)]
    addresses = np.array([storages[which].ctypes.data + offset for which, offset in places])
    expected = [storages[which][offset : offset + 5].tobytes() for which, offset in places]
    assert raw.gather(addresses, 5).tobytes() == b"".join(expected)
    assert raw.gather(addresses[:1], 5).tobytes() == expected[0]
    low, count = mapped.ctypes.data, 1 << 16
    large = raw.gather(np.array([low, low + count + shift]), count)
    assert large.tobytes() == mapped[:count].tobytes() + mapped[count + shift : 2 * count + shift].tobytes()


def test_changes_between_epochs_are_seen():
    """One change of each kind to one of many tensors, none of which moves the others."""
    tensors = [torch.full((4,), float(number)) for number in range(MANY)]
    parameter, negative = torch.nn.Parameter(torch.ones(4)), torch.ones(2, dtype=torch.complex64).conj().imag
    negative = negative.as_strided((4,), (1,), 0)  # all of its storage, with the sign in the tensor
    image = write(tensors)

    def written():
        tensors[20][1] = -1

    def replaced():
        tensors[30] = torch.full((4,), -2.0)

    def other_memory():
        tensors[40].data = torch.full((4,), -3.0)

    def other_shape():
        tensors[50].data = tensors[50].data.view(2, 2)

    def gradient():
        tensors[60].requires_grad_()

    def attribute():
        tensors[70].note = "n"

    def shares():
        tensors[80] = tensors[81].detach()

    def moved():
        tensors[90].share_memory_()

    def kinds():
        tensors[100], tensors[101], tensors[102] = parameter, negative, torch.ones(4).to_sparse()

    def grown():
        tensors[110].untyped_storage().resize_(64)

    changes = (written, replaced, other_memory, other_shape, gradient, attribute, kinds, grown, shares, moved)
    for change in changes:
        change()
        changed = write(tensors, image)
        assert changed is not image
        image = changed
        assert write(tensors, image) is image
        for one, other in zip(read(image), tensors, strict=True):
            assert (type(one), one.requires_grad, one.__dict__) == (type(other), other.requires_grad, other.__dict__)
            assert one.is_neg() == other.is_neg()
            assert one.layout == other.layout
            assert torch.equal(one.to_dense(), other.to_dense())
    found = read(image)
    found[81][2] = 9
    assert found[80][2] == 9
    found[90][2] = 8
    assert tensors[90][2] == 8
    assert found[110].untyped_storage().nbytes() >= 16


def test_a_storage_that_was_shrunk_is_not_read_past_its_end():
    shrunk = torch.ones(8)[4:]
    shrunk.untyped_storage().resize_(16)
    groups = bulk.Groups(Mappings())
    assert [groups.tensor(torch.ones(4)) is None for _ in range(20)] == [True] * 8 + [False] * 12
    assert groups.tensor(shrunk) is None


class Changes:
    """Calls something while it is pickled, as an object that drops its cache does."""

    def __init__(self, change):
        self.change = change

    def __getstate__(self):
        self.change()
        return {}


GIVEN = {
    "data": lambda tensor: setattr(tensor, "data", torch.empty(0)),
    "set": lambda tensor: tensor.set_(torch.zeros(1)),
    "moved": torch.Tensor.share_memory_,
    "grown": lambda tensor: tensor.resize_(4096),
}


@pytest.mark.parametrize("change", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("when", ["pickled", "encoded"])
def test_a_tensor_that_is_given_other_memory_arrives_as_it_was_pickled(change, when):
    tensors = [torch.full((512,), float(number)) for number in range(MANY)]
    views = list(torch.arange(4.0 * MANY).view(MANY, 4))
    expected = [tensor.clone() for tensor in (*tensors, *views)]
    changed = [tensors[70]] if change in (GIVEN["moved"], GIVEN["grown"]) else [tensors[3], tensors[70], views[71]]

    def change_all():
        for tensor in changed:
            change(tensor)

    encoded, mappings = take([tensors, views, Changes(change_all if when == "pickled" else bool)])
    if when == "encoded":
        change_all()
    found = read(Image.write(encoded, mappings))
    assert all(torch.equal(*pair) for pair in zip([*found[0], *found[1]], expected, strict=True))


@pytest.mark.parametrize("number", [3, 70])  # that is left to the codec, that goes in bulk
@pytest.mark.parametrize("make", [torch.ones, np.ones])
def test_what_is_resized_meanwhile_is_an_error(make, number):
    some = [make(512) for _ in range(MANY)]

    def resize():
        if make is np.ones:
            some[number].resize((1,), refcheck=False)
        else:
            some[number].untyped_storage().resize_(0)

    with pytest.raises(ValueError, match="was resized while it was being sent"):
        write([some, Changes(resize)])
