"""A page that shows a batch: its samples, and statistics of its tensors, in one HTML file without scripts.

Promise: the file is complete in itself and of bounded size, whatever the batch holds, and what it leaves out it says.
All text of the batch is escaped. The batch is not changed; of the user's code only `decode` and `repr` of objects are
called, and what these raise is shown in their place.

NOTE [Samples]. `collate_fn` may return anything. Tensors whose first dimension is the number of samples, and lists
of that length, are shown sample by sample, wherever they are in the batch; everything is in the table of tensors.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import itertools
import math
import reprlib
import string
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_MOST_BYTES = 8_000_000  # of samples on a page
_MOST_SAMPLES = 64
_MOST_FIELDS = 100
_MOST_CHARACTERS = 2_000  # of one text
_SHORT_TEXT = 60  # characters of one that stands in a line
_LONG_TEXT = '<div class="text">'
_MOST_NUMBERS = 24  # of one sequence
_MOST_INDICES = 2_000
_DEPTH = 8
_IMAGE_PIXELS = 256  # of an image's longer side
_LEAST_PIXELS = 4  # of an image's shorter side
_CHANNELS = (1, 3, 4)
_CHUNK = 1 << 22  # numbers of a tensor that are converted at a time
_BINS = 32
_NOT_A_NUMBER = (255, 0, 255)  # the colour of such pixels

Decode = Callable[[list[int]], str]


class _Field(NamedTuple):
    """A part of a batch.

    Attributes:
        name: where it is.
        value: the part itself, or a list of what each sample has.
        by_sample: whether it has one entry for each sample.
    """

    name: str
    value: Any
    by_sample: bool


class _OfSamples(list[Any]):
    """One entry for each sample."""


class _Statistics(NamedTuple):
    """Of all numbers in a part of a batch; the first four are of the finite ones, and None if there are none."""

    least: float | None
    most: float | None
    mean: float | None
    deviation: float | None
    nans: int
    infinite: int
    bins: list[int]


def write_html(
    path: str | Path, batch: Any, indices: Any, title: str, details: Mapping[str, Any], decode: Decode | None = None
) -> None:
    """Writes the page.

    Args:
        path: of the file.
        batch: as the loader gave it.
        indices: of its samples, or of the one sample of a loader with `batch_size=None`; None if they are unknown.
        title: of the page.
        details: what else to tell of the batch, with headings.
        decode: makes text of a sample's sequence of whole numbers, such as the `decode` of a tokenizer.
    """
    if isinstance(indices, (Tensor, np.ndarray)):
        indices = indices.tolist()
    is_one = indices is not None and not isinstance(indices, (list, tuple))
    if is_one:
        indices, batch = [indices], _OfSamples([batch])
    known = indices is not None and any(index is not None for index in indices)
    labels = [*map(str, indices if known else range(_samples_in(batch) or 0))]
    fields = [*itertools.islice(_fields(batch, "", len(labels), 0), _MOST_FIELDS + 1)]
    parts = [_table_of_details(details)]
    if known:
        parts.append(_section("Indices", _indices(labels)))
    parts.append(_section("Parts of the batch", _table_of_fields(fields)))
    if samples := [field for field in fields[:_MOST_FIELDS] if field.by_sample]:
        parts.append(_section("Samples", _samples(samples, labels, known, decode)))
    body = f"<h1>{_text(title)}</h1>" + "".join(parts)
    page = _PAGE.substitute(title=_text(title), body=body)
    Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")


# ---- what a batch holds


def parts_in(batch: Any) -> list[dict[str, Any]]:
    """The parts of a batch: name, kind, and statistics of their numbers, if they have some."""
    found = []
    for field in itertools.islice(_fields(batch, "", _samples_in(batch), 0), _MOST_FIELDS):
        statistics = _statistics(_tensors(field.value))
        numbers = {} if statistics is None else statistics._asdict()
        numbers.pop("bins", None)
        found.append({"part": field.name or "batch", "kind": _kinds(field.value), **numbers})
    return found


def _samples_in(batch: Any) -> int | None:
    """How many samples there seem to be: the most frequent first dimension."""
    firsts = Counter(len(field.value) for field in _fields(batch, "", None, 0) if _has_length(field.value))
    return firsts.most_common(1)[0][0] if firsts else None


def _has_length(value: Any) -> bool:
    return (_is_data(value) and value.ndim > 0) or isinstance(value, (list, tuple))


def _is_data(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, Tensor) and not value.is_nested)


def _fields(obj: Any, name: str, count: int | None, depth: int) -> Iterator[_Field]:
    """The parts of a batch of so many samples."""
    inner = _inner(obj, count) if depth < _DEPTH else []
    if not inner:
        yield _Field(name, obj, _has_length(obj) and len(obj) == count)
    for key, value in inner:
        yield from _fields(value, f"{name}.{key}".lstrip(".") if key[:1] != "[" else f"{name}{key}", count, depth + 1)


def _inner(obj: Any, count: int | None) -> list[tuple[str, Any]]:
    """The parts of a part, with their names in it; none if it is shown as a whole."""
    if isinstance(obj, Mapping):
        return [(str(key), value) for key, value in obj.items()]
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return [(one.name, getattr(obj, one.name)) for one in dataclasses.fields(obj)]
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return [*zip(obj._fields, obj, strict=True)]
    if not isinstance(obj, (list, tuple)):
        return []
    if not _is_by_sample(obj, count):
        plain = all(isinstance(value, (str, bytes, int, float, type(None))) for value in obj)
        return [] if plain else [(f"[{place}]", value) for place, value in enumerate(obj)]
    samples = [dict(_inner(sample, None)) if isinstance(sample, (Mapping, tuple)) else {} for sample in obj]
    alike = all(sample.keys() == samples[0].keys() for sample in samples)
    return [(key, _OfSamples(sample[key] for sample in samples)) for key in samples[0]] if samples and alike else []


def _is_by_sample(obj: Sequence[Any], count: int | None) -> bool:
    """Whether a list has one entry for each sample, rather than entries for all of them."""
    if len(obj) != count:
        return False
    lengths = [len(one) for one in obj if _has_length(one)]
    are_samples = all(isinstance(one, tuple) and len({*map(type, one)}) > 1 for one in obj)
    return are_samples or isinstance(obj, _OfSamples) or not lengths or any(length != count for length in lengths)


def _tensors(value: Any) -> list[Tensor]:
    """The dense numbers in a part of a batch, in the memory of this process; none if it has others."""
    try:
        found = [_tensor(one) for one in (value if isinstance(value, (list, tuple)) else [value])]
    except (TypeError, OverflowError):  # of objects, texts or dates, or of numbers that are no floats
        return []
    return [one for one in found if one is not None] if all(one is not None for one in found) else []


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, (bool, int, float)):
        return torch.tensor(float(value))
    if isinstance(value, (list, tuple)):
        are_numbers = all(isinstance(one, (bool, int, float)) for one in value)
        return torch.tensor([*map(float, value)]) if are_numbers else None
    if hasattr(value, "__array_interface__"):  # PIL's images have it too
        value = torch.from_numpy(np.require(np.asarray(value), requirements=["C", "W"]))
    is_dense = (
        isinstance(value, Tensor) and value.layout is torch.strided and not (value.is_nested or value.is_quantized)
    )
    return value.detach().cpu() if is_dense and not (value.is_complex() or value.is_meta) else None


def _statistics(tensors: list[Tensor]) -> _Statistics | None:
    """Of all of them together; None if there are none, or no numbers in them."""
    chunks = [chunk for one in tensors for chunk in one.reshape(-1).split(_CHUNK) if chunk.numel()]
    if not chunks:
        return None
    nans = infinite = count = 0
    least, most, total = math.inf, -math.inf, 0.0
    for numbers in map(Tensor.double, chunks):
        finite = numbers[numbers.isfinite()]
        nans += int(numbers.isnan().sum())
        infinite += int(numbers.isinf().sum())
        if finite.numel():
            least, most = min(least, finite.min().item()), max(most, finite.max().item())
            total += finite.sum().item()
            count += finite.numel()
    if not count:
        return _Statistics(None, None, None, None, nans, infinite, [])
    mean, squares, bins = total / count, 0.0, torch.zeros(_BINS)
    for numbers in map(Tensor.double, chunks):
        finite = numbers[numbers.isfinite()]
        squares += ((finite - mean) ** 2).sum().item()
        if least < most and finite.numel():
            bins += torch.histc(finite.float(), _BINS, least, most)
    return _Statistics(least, most, mean, math.sqrt(squares / count), nans, infinite, [int(one) for one in bins])


# ---- the page


def _text(content: Any) -> str:
    return html.escape(str(content))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"


def _table_of_details(details: Mapping[str, Any]) -> str:
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in details.items())
    return f'<dl class="details">{rows}</dl>' if rows else ""


def _indices(labels: list[str]) -> str:
    more = f" and {len(labels) - _MOST_INDICES:,} more" if len(labels) > _MOST_INDICES else ""
    return f'<p class="numbers">{_text(", ".join(labels[:_MOST_INDICES]))}{more}</p>'


def _samples(fields: list[_Field], labels: list[str], known: bool, decode: Decode | None) -> str:
    """A card for each sample, as long as there is room."""
    cards, room, reads = [], _MOST_BYTES, False
    for place, label in enumerate(labels[:_MOST_SAMPLES]):
        rows = []
        for field in fields:
            shown = _value(field.value[place], decode)
            room -= len(shown)
            if room < 0:
                break
            reads |= shown.startswith(_LONG_TEXT)
            is_short = shown.startswith("<span") or not shown.startswith("<")
            name = f"<dt>{_text(field.name)}</dt>" if field.name else ""
            rows.append(f"<div{' class=short' * is_short}>{name}<dd>{shown}</dd></div>")
        if room < 0:
            break
        heading = f"sample {_text(label)}" if known else f"number {place} of the batch"
        cards.append(f"<article><h3>{heading}</h3><dl>{''.join(rows)}</dl></article>")
    left_out = ""
    if len(cards) < len(labels):
        limit = f"{_MOST_BYTES / 1e6:.0f} MB of samples" if room < 0 else f"{_MOST_SAMPLES} samples"
        left_out = f'<p class="note">The first {len(cards):,} of {len(labels):,}: a page holds at most {limit}.</p>'
    return f'{left_out}<div class="cards{" wide" if reads else ""}">{"".join(cards)}</div>'


def _value(value: Any, decode: Decode | None) -> str:
    """What one sample has of a field."""
    if isinstance(value, str):
        return _words(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return f"{_text(number(value))}"
    tensors = [] if isinstance(value, (list, tuple)) else _tensors(value)
    if not tensors:
        is_sequence = isinstance(value, (list, tuple)) and all(type(one) is int for one in value)
        return _sequence(value, decode) if is_sequence and value else f"<code>{_text(_repr(value))}</code>"
    tensor = tensors[0]
    if tensor.ndim == 0:
        return _text(number(tensor.item()))
    if (image := _as_image(tensor)) is not None:
        return _image(image)
    is_whole = not tensor.is_floating_point() and tensor.dtype is not torch.bool
    if tensor.ndim == 1 and is_whole and tensor.numel():
        return _sequence(tensor.tolist(), decode)
    return _in_short(tensor)


def _words(text: str) -> str:
    shown = _text(_cut(text))
    return f"{_LONG_TEXT}{shown}</div>" if len(text) > _SHORT_TEXT or "\n" in text else f"<span>{shown}</span>"


def _sequence(numbers: Sequence[int], decode: Decode | None) -> str:
    """A sample's whole numbers: decoded, unless they are a mask."""
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    more = f" ... {len(numbers):,} in all" if len(numbers) > _MOST_NUMBERS else ""
    plain = f'<span class="numbers">{shown}{more}</span>'
    if decode is None or max(numbers) <= 1:
        return plain
    try:
        return _words(str(decode(list(numbers))))
    except Exception as error:  # of the user's function, which may not be meant for this field
        return f"{plain} <em>decode raised {_text(_cut(f'{type(error).__name__}: {error}'))}</em>"


def _in_short(tensor: Tensor) -> str:
    """A tensor that is no image: its numbers, if they are few, a line, and what is conspicuous."""
    found = _statistics([tensor])
    text = f"<code>{_kind(tensor)}</code> "
    if found is None:
        return text
    if tensor.numel() <= _MOST_NUMBERS // 4 and tensor.ndim == 1:
        return f'<span class="numbers">{", ".join(number(one) for one in tensor.tolist())}</span>'
    if found.least is not None and found.most is not None:
        text += f"{number(found.least)} to {number(found.most)} "
    if found.nans or found.infinite:
        text += f"<strong>{found.nans:,} NaN, {found.infinite:,} inf</strong>"
    return text + (_line(tensor) if tensor.ndim == 1 and found.least is not None else "")


def _line(tensor: Tensor) -> str:
    """A sequence as a line."""
    points = tensor.double().nan_to_num(0.0, 0.0, 0.0)[:: max(1, len(tensor) // 200)]
    low, high = points.min().item(), points.max().item()
    heights = [28 - 26 * (one - low) / ((high - low) or 1.0) for one in points.tolist()]
    path = " ".join(f"{200 * place / max(1, len(heights) - 1):.1f},{y:.1f}" for place, y in enumerate(heights))
    return f'<svg class="line" viewBox="0 0 200 30" preserveAspectRatio="none"><polyline points="{path}"/></svg>'


def _table_of_fields(fields: list[_Field]) -> str:
    headings = ("part", "type", "min", "max", "mean", "std", "NaN", "inf", "values")
    rows = "".join(_row(field) for field in fields[:_MOST_FIELDS])
    more = f'<p class="note">The first {_MOST_FIELDS} parts of more.</p>' if len(fields) > _MOST_FIELDS else ""
    head = "".join(f"<th>{name}</th>" for name in headings)
    return f'{more}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _row(field: _Field) -> str:
    tensors = _tensors(field.value)
    found = _statistics(tensors)
    cells = f"<td>{_text(field.name or 'batch')}</td><td><code>{_text(_kinds(field.value))}</code></td>"
    if found is None:
        what = "no numbers" if tensors else _repr(field.value)
        return f'<tr>{cells}<td colspan="7" class="other">{_text(what)}</td></tr>'
    cells += "".join(f"<td>{'' if one is None else number(one)}</td>" for one in found[:4])
    cells += "".join(f"<td>{f'<strong>{one:,}</strong>' if one else '0'}</td>" for one in (found.nans, found.infinite))
    return f"<tr>{cells}<td>{_bars(found.bins)}</td></tr>"


def _kinds(value: Any) -> str:
    """The type and shape of a part, or of all entries of a list."""
    if not isinstance(value, (list, tuple)) or not value:
        return _kind(value)
    kinds = Counter(map(_kind, value))
    name = kinds.most_common(1)[0][0]
    return f"{len(value):,} x {name}" + (f" and {len(kinds) - 1:,} others" if len(kinds) > 1 else "")


def _kind(value: Any) -> str:
    if not _is_data(value):
        return type(value).__name__
    device = f" on {value.device}" if isinstance(value, Tensor) and not value.is_cpu else ""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{device}"


def _bars(bins: list[int]) -> str:
    """A histogram; the heights are logarithmic, so that a few outliers are seen."""
    highest = math.log1p(max(bins, default=0))
    if not highest:
        return ""
    bars = "".join(
        f'<rect x="{3 * place}" y="{20 - height:.1f}" width="2" height="{height:.1f}"/>'
        for place, count in enumerate(bins)
        if (height := 20 * math.log1p(count) / highest)
    )
    return f'<svg class="bars" viewBox="0 0 {3 * _BINS} 20">{bars}</svg>'


def number(value: float) -> str:
    """A number in few digits."""
    if not isinstance(value, float):
        return _repr(value)
    return f"{value:.15g}" if value.is_integer() else f"{value:.4g}"


def _cut(text: str) -> str:
    more = len(text) - _MOST_CHARACTERS
    return text if more <= 0 else f"{text[:_MOST_CHARACTERS]} ... and {more:,} characters more"


def _repr(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except Exception as error:  # of the user's class
        return f"{type(value).__name__}, whose repr() raised {type(error).__name__}"


# ---- images


def _as_image(tensor: Tensor) -> Tensor | None:
    """The tensor with the channels last, if it looks like an image."""
    if tensor.ndim == 2 and tensor.dtype in (torch.uint8, torch.bool):
        tensor = tensor[None]
    if tensor.ndim != 3:
        return None
    for image in (tensor.permute(1, 2, 0), tensor):
        height, width, channels = image.shape
        if (
            channels in _CHANNELS
            and min(height, width) >= _LEAST_PIXELS
            and max(height, width) <= 32 * min(height, width)
        ):
            return image
    return None


def _image(image: Tensor) -> str:
    """An image, and how its numbers became colours."""
    height, width, _ = image.shape
    numbers = image.float()
    known = numbers.isfinite()
    finite = numbers[known]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    note = f"{_kind(image)[: _kind(image).index(' ')]}, {width} x {height}"
    if image.dtype is torch.uint8:
        begin, end = 0.0, 255.0
    else:
        note += f", {number(low)} to {number(high)}"
        if low >= 0 and high <= 1:
            begin, end = 0.0, 1.0
        elif low >= 0 and 16 < high <= 255:
            begin, end = 0.0, 255.0
        else:
            begin, end = low, high
            note += ", stretched"
    pixels = ((numbers - begin) * (255 / ((end - begin) or 1.0))).nan_to_num(0.0).clamp(0, 255)
    if not known.all():
        bad = ~known.all(2)
        pixels = pixels[..., :3].expand(height, width, 3).clone()
        pixels[bad] = torch.tensor(_NOT_A_NUMBER, dtype=torch.float32)
        note += f"; {int(bad.sum()):,} pixels NaN or inf"
    scale = _IMAGE_PIXELS / max(height, width)
    if scale < 1:
        size = [max(1, round(height * scale)), max(1, round(width * scale))]
        pixels = torch.nn.functional.interpolate(pixels.permute(2, 0, 1)[None], size, mode="area")[0].permute(1, 2, 0)
    content = base64.b64encode(_png(pixels.round().to(torch.uint8).numpy())).decode("ascii")
    return f'<img src="data:image/png;base64,{content}" alt="{note}"><small>{note}</small>'


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG file with these pixels: height x width x channels, of 8 bits; see the PNG specification, section 5."""
    height, width, channels = pixels.shape
    colour_type = {1: 0, 3: 2, 4: 6}[channels]
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each begins with its filter, 0 for none
    lines[:, 1:] = pixels.reshape(height, -1)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    written = [
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


_PAGE = string.Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1c2128; --soft: #667080; --line: #dde2e8; --card: #fff; --page: #f5f6f8;
  --mark: #2f6fb5; --bad: #c0262d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e7ec; --soft: #98a2b0; --line: #343b45; --card: #1f242b;
  --page: #16191e; --mark: #6ba6e8; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 28px 24px 48px; background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { margin: 0 0 12px; font-size: 24px; line-height: 1.25; overflow-wrap: anywhere; }
h2 { margin: 32px 0 10px; font-size: 16px; }
h3 { margin: 0 0 8px; color: var(--soft); font-size: 12px; font-weight: 600; overflow-wrap: anywhere; }
dl, dd, p { margin: 0; }
dt, small, .note { color: var(--soft); font-size: 12px; }
.note { margin-bottom: 10px; }
.details { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; }
.details dt { font-size: 14px; }
.details dd { overflow-wrap: anywhere; }
.numbers, code, td { font-size: 12px; font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono",
  monospace; }
.numbers, code { overflow-wrap: anywhere; }
p.numbers { max-height: 9em; overflow: auto; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(184px, 1fr)); gap: 12px; }
.cards.wide { grid-template-columns: repeat(auto-fill, minmax(360px, 1fr)); }
article { padding: 12px; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
dl > div + div { margin-top: 6px; }
.short { display: flex; flex-wrap: wrap; gap: 0 8px; align-items: baseline; }
.short dd { overflow-wrap: anywhere; }
img { display: block; width: 100%; max-width: 256px; border-radius: 4px; image-rendering: pixelated; }
small { display: block; margin-top: 3px; }
.text { max-height: 15em; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
strong { color: var(--bad); }
em { color: var(--soft); font-size: 12px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 7px 12px; text-align: right; white-space: nowrap; }
th { color: var(--soft); font-size: 12px; font-weight: 600; border-bottom: 1px solid var(--line); }
tbody tr + tr td { border-top: 1px solid var(--line); }
th:nth-child(-n + 2), td:nth-child(-n + 2), .other, th:last-child, td:last-child { text-align: left; }
.other { color: var(--soft); white-space: normal; overflow-wrap: anywhere; }
svg { display: block; }
.bars { width: 96px; height: 20px; fill: var(--mark); }
.line { width: 100%; height: 30px; margin-top: 4px; }
.line polyline { fill: none; stroke: var(--mark); vector-effect: non-scaling-stroke; }
</style>
</head>
<body>$body</body>
</html>
""")
