"""The page of a batch: complete in itself, of bounded size, with all text escaped."""

import base64
import collections
import dataclasses
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from rayloader.cli import picture
from rayloader.cli.picture import write_html

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    inputs: torch.Tensor
    names: list


class Hidden:
    def __repr__(self):
        raise RuntimeError("no")


class _Page(HTMLParser):
    """What a page holds: its text, its images, the cells of its table and its cards."""

    def __init__(self):
        super().__init__()
        self.open, self.images, self.rows, self.cards, self.text = [], [], [], [], ""

    def handle_starttag(self, tag, attributes):
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        elif tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag == "td":
            self.rows[-1].append("")
        elif tag == "article":
            self.cards.append("")

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "td" in self.open:
            self.rows[-1][-1] += data
        elif "article" in self.open:
            self.cards[-1] += f"{data} "


@pytest.fixture
def page(tmp_path):
    """Draws a batch, and reads the page."""

    def page(batch, indices=None, details=None, decode=None):
        path = tmp_path / "page.html"
        write_html(path, batch, indices, "A <title>", {} if details is None else details, decode)
        read = _Page()
        read.content = path.read_text()
        read.feed(read.content)
        assert read.open == []
        read.table = {row[0]: row[1:] for row in read.rows[1:]}
        return read

    return page


def words(text):
    return " ".join(text.split())


def pixels(source):
    head, content = source.split(",")
    assert head == "data:image/png;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


# ---- the page


def test_a_page_is_complete_in_itself(page):
    found = page(torch.rand(2, 3, 8, 8), [5, 7], {"worker": 3, "rank <b>": "1 of 4"})
    assert "<script" not in found.content
    assert not re.search(r"https?:|@import|url\(", found.content)
    assert "A <title>" in found.text
    assert "1 of 4" in found.text
    assert "rank <b>" in found.text
    assert "5, 7" in found.text
    assert [words(card)[:24] for card in found.cards] == ["sample 5 float32, 8 x 8,", "sample 7 float32, 8 x 8,"]


@pytest.mark.parametrize("place", ["title", "detail", "string", "key", "object", "decoded", "error", "path"])
def test_all_text_is_escaped(tmp_path, place):
    bad = "<script>alert('&')</script>"

    def decode(numbers):
        if place == "error":
            raise ValueError(bad)
        return bad

    batch = {
        "string": {"x": [bad, bad]},
        "key": {bad: torch.rand(2, 5)},
        "object": {"x": {bad}},
        "path": {"x": [f"{bad}/" * 30] * 2},
    }.get(place, {"ids": torch.tensor([[4, 5], [6, 7]])})
    title, details = (bad if place == "title" else "x"), ({bad: bad} if place == "detail" else {})
    write_html(tmp_path / "page.html", batch, [0, 1], title, details, decode)
    content = (tmp_path / "page.html").read_text()
    assert "<script" not in content
    assert "&lt;script&gt;" in content


def test_a_title_may_be_any_text(tmp_path):
    write_html(tmp_path / "page.html", {"x": [1]}, [0], "$body ${title}", {})
    assert "<h1>$body ${title}</h1>" in (tmp_path / "page.html").read_text()


def test_text_that_is_no_unicode_is_written_too(page):
    assert "lone \\ud800" in page(["lone \ud800", "b"], [0, 1]).text


# ---- images


@pytest.mark.parametrize("kind", ["tensor", "array", "list", "images of PIL's"])
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("last", [True, False])
def test_images_of_bytes_are_shown_as_they_are(page, kind, channels, last):
    images = torch.randint(256, (2, 6, 9, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if kind == "images of PIL's":
        batch = [Image.fromarray(one.squeeze(2).numpy()) for one in images]
    else:
        batch = images if last else images.permute(0, 3, 1, 2)
        batch = {"tensor": batch, "array": batch.numpy(), "list": [*batch]}[kind]
    found = page(batch, [0, 1])
    for source, image in zip(found.images, images, strict=True):
        assert np.array_equal(pixels(source), image.squeeze(2).numpy() if channels == 1 else image.numpy())


def test_gray_images_and_masks_without_channels_are_images(page):
    gray = torch.arange(2 * 8 * 8, dtype=torch.uint8).reshape(2, 8, 8)
    found = page({"gray": gray, "mask": gray > 70, "scores": torch.rand(2, 8, 8)}, [0, 1])
    assert len(found.images) == 4
    assert np.array_equal(pixels(found.images[2]), gray[1].numpy())
    assert np.array_equal(pixels(found.images[3]), (gray[1] > 70).numpy() * 255)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, (0, 255)), (0.0, 0.5, (0, 128)), (0.0, 255.0, (0, 255)), (0.0, 51.0, (0, 51)), (-2.0, 3.0, (0, 255))],
)
def test_images_of_floats_are_shown_by_their_range(page, low, high, expected):
    image = torch.full((1, 3, 4, 4), low)
    image[..., 2:] = high
    found = page(image, [0])
    assert (pixels(found.images[0]).min(), pixels(found.images[0]).max()) == expected
    assert ("stretched" in found.text) is (low < 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_images_of_other_types_are_shown(page, dtype):
    assert len(page(torch.ones(2, 3, 4, 4, dtype=dtype), [0, 1]).images) == 2


def test_pixels_that_are_no_numbers_are_marked(page):
    image = torch.zeros(1, 1, 4, 4)
    image[0, 0, 1, 2], image[0, 0, 3, 3] = float("nan"), float("inf")
    found = page(image, [0])
    shown = pixels(found.images[0])
    assert {tuple(place) for place in np.argwhere((shown == (255, 0, 255)).all(2))} == {(1, 2), (3, 3)}
    assert "2 pixels NaN or inf" in found.text


def test_an_image_without_numbers_is_shown(page):
    assert len(page(torch.full((1, 3, 4, 4), float("nan")), [0]).images) == 1


def test_large_images_are_made_smaller(page):
    found = page(torch.rand(1, 3, 1000, 500), [0])
    assert pixels(found.images[0]).shape == (256, 128, 3)
    assert "500 x 1000" in found.text


def test_the_one_sample_of_a_loader_without_batches_is_shown(page):
    found = page({"image": torch.rand(3, 8, 8), "label": 4, "name": "x"}, 17)
    assert len(found.images) == 1
    assert found.cards[0].startswith("sample 17 ")
    assert found.table["image"][0].endswith("float32 (3, 8, 8)")


@pytest.mark.parametrize("kind", [tuple, list])
def test_samples_that_are_not_collated_are_shown(page, kind):
    samples = kind((torch.full((3, 8, 8), number / 4), number, f"name {number}") for number in range(3))
    found = page(samples, [7, 8, 9])
    assert len(found.images) == 3
    assert "[1] 2 [2] name 2" in words(found.cards[2])
    assert list(found.table) == ["[0]", "[1]", "[2]"]
    assert "[1] 1" in words(page(samples[1], 8).cards[0])


# ---- text, numbers, nesting


def test_texts_and_numbers_of_samples_are_shown(page):
    batch = {
        "text": ["one", "two"],
        "label": torch.tensor([3, 4]),
        "meta": {"weight": [0.25, 2.0], "none": [None, b"x"]},
    }
    found = page(batch, [10, 11])
    assert words(found.cards[1]) == "sample 11 text two label 4 meta.weight 2 meta.none b'x'"


def test_tokens_are_decoded(page):
    known = ["", "", "the", "cat"]
    batch = {"ids": torch.tensor([[2, 3], [3, 2]]), "mask": torch.tensor([[1, 1], [1, 0]]), "list": [[2, 2], [3]]}
    found = page(batch, [0, 1], decode=lambda numbers: " ".join(known[number] for number in numbers))
    assert words(found.cards[0]) == "sample 0 ids the cat mask 1, 1 list the the"
    assert words(found.cards[1]) == "sample 1 ids cat the mask 1, 0 list cat"


def test_tokens_without_decode_are_numbers(page):
    found = page(torch.arange(60).reshape(2, 30), [0, 1])
    assert "20, 21, 22, 23 ... 30 in all" in found.cards[0]


def test_what_decode_raises_is_shown(page):
    found = page(torch.tensor([[-100, 5]]), [0], decode=lambda numbers: [][0])
    assert "-100, 5" in found.cards[0]
    assert "decode raised IndexError: list index out of range" in found.cards[0]


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ((torch.ones(2, 4), torch.ones(2)), ["[0]", "[1]"]),
        ([torch.ones(3, 4), torch.ones(3)], ["[0]", "[1]"]),
        ({"a": {"b": [torch.ones(2), torch.ones(5)]}}, ["a.b"]),
        (Pair(torch.ones(2), {"x": torch.ones(2)}), ["left", "right.x"]),
        (Record(torch.ones(2), ["a", "b"]), ["inputs", "names"]),
        ((torch.ones(2, 3, 4), [{"boxes": torch.ones(1, 4)}, {"boxes": torch.ones(5, 4)}]), ["[0]", "[1].boxes"]),
        (torch.ones(2), ["batch"]),
        ([], ["batch"]),
        (None, ["batch"]),
    ],
)
def test_nested_parts_are_named(page, batch, parts):
    assert list(page(batch, [0, 1, 2] if isinstance(batch, list) and len(batch) == 2 else [0, 1]).table) == parts


def test_what_each_sample_has_is_shown_with_it(page):
    boxes = [{"boxes": torch.ones(1, 4)}, {"boxes": torch.full((5, 4), 7.0)}]
    found = page((torch.ones(2, 6), boxes), [0, 1])
    assert "float32 (5, 4) 7 to 7" in words(found.cards[1])
    assert found.table["[1].boxes"][0] == "2 x float32 (1, 4) and 1 others"
    assert found.table["[1].boxes"][1:4] == ["1", "7", "6"]


def test_without_indices_the_samples_are_numbered(page):
    for indices in (None, [None] * 8):
        found = page({"x": torch.ones(3, 5), "y": torch.ones(3), "other": torch.ones(7)}, indices)
        assert len(found.cards) == 3
        assert found.cards[2].startswith("number 2 of the batch")


def test_deep_nesting_ends(page):
    batch = batch_in = {}
    for _ in range(50):
        batch_in["x"] = batch_in = {}
    batch_in["x"] = batch
    assert len(page(batch, [0, 1]).table) == 1


# ---- statistics


def test_statistics_of_tensors(page):
    values = torch.tensor([1.0, 2.0, 3.0, float("nan"), float("inf"), -float("inf")])
    found = page({"floats": values, "whole": torch.tensor([1, 3]), "bools": np.array([True, False])}, None)
    assert found.table["floats"][:7] == ["float32 (6,)", "1", "3", "2", "0.8165", "1", "2"]
    assert found.table["whole"][:7] == ["int64 (2,)", "1", "3", "2", "1", "0", "0"]
    assert found.table["bools"][:5] == ["bool (2,)", "0", "1", "0.5", "0.5"]


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(0),
        torch.empty(2, 0),
        torch.full((2,), float("nan")),
        torch.tensor(3.5),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.ones(2, requires_grad=True),
        torch.ones(2, 2).t(),
        torch.ones(2).to(torch.float8_e4m3fn),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        np.array([1, 2], np.uint16),
        np.array(["a", "b"]),
        np.array([None, {}], object),
        np.array(["2026-01-01"], "datetime64[D]"),
        np.array([(1, 2.0)], [("a", int), ("b", float)]),
        np.ones((2, 2))[::-1],
        np.float32(2.5),
        [Hidden(), Hidden()],
        Hidden(),
        {1, 2},
        range(2),
        b"bytes",
        "text",
        10**400,
        10**5000,
        [10**400, 1],
        float("nan"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of prototypes
def test_any_value_is_shown(page, value):
    value = value() if callable(value) else value  # one of which torch warns
    assert list(page({"x": value}, [0, 1]).table) == ["x"]
    page(value, None)
    page(value, 3)


def test_large_tensors_are_read_in_parts(page, monkeypatch):
    monkeypatch.setattr(picture, "_CHUNK", 10)
    found = page({"x": torch.arange(100.0)}, None)
    assert found.table["x"][1:5] == ["0", "99", "49.5", "28.87"]


def test_a_batch_is_not_changed(page):
    batch = torch.rand(2, 3, 8, 8)
    before = batch.clone()
    page(batch, [0, 1])
    assert torch.equal(batch, before)


# ---- its size


def test_many_samples_are_left_out(page):
    found = page({"x": torch.rand(1000, 20)}, list(range(1000)))
    assert len(found.cards) == 64
    assert "The first 64 of 1,000: a page holds at most 64 samples." in found.text


def test_a_page_has_bounded_size(page, monkeypatch):
    monkeypatch.setattr(picture, "_MOST_BYTES", 1_000_000)
    noise = torch.randint(256, (64, 3, 100, 100), dtype=torch.uint8)
    found = page({"a": noise, "b": noise}, list(range(64)))
    assert 900_000 < len(found.content) < 1_100_000
    assert 1 < len(found.cards) < 64
    assert f"The first {len(found.cards)} of 64: a page holds at most 1 MB of samples." in found.text


def test_many_parts_and_long_texts_are_cut(page):
    batch = {f"part {number}": ["x" * 10_000] for number in range(500)}
    found = page(batch, [0])
    assert "The first 100 parts of more." in found.text
    assert len(found.table) == 100
    assert "xx ... and 8,000 characters more" in found.text
    assert len(found.content) < 400_000


def test_many_indices_are_cut(page):
    assert "1999 and 1,000 more" in page(torch.zeros(3000), list(range(3000))).text
