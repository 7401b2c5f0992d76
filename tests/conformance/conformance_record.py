"""Write down all that a user can see of a loader's iteration, in a form that compares exactly.

A record is a list of events, each a label ("epoch 1: batch 3") and a description made of plain dicts, lists, strings,
numbers and bytes. `describe` keeps types, dtypes, shapes, strides, bytes and who shares memory; it leaves out what
no user can rely on (addresses, the size of the storage behind a view). `first_difference` says where two records part.
"""

import contextlib
import dataclasses
import hashlib
import os
import random
import re
import traceback
import warnings

import numpy as np
import torch
from torch.utils.data import get_worker_info

MAX_ERRORS = 12


def type_name(value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


class Describer:
    """Describes one batch; remembers its tensors to tell which overlap in memory."""

    def __init__(self):
        self.ranges = []

    def describe(self, value):
        described = {"type": type_name(value)}
        if isinstance(value, torch.Tensor):
            described |= self.tensor(value)
        elif isinstance(value, np.ndarray):
            described |= self.array(value)
        elif isinstance(value, np.generic):
            described |= {"dtype": value.dtype.str, "bytes": value.tobytes()}
        elif isinstance(value, float):
            described["value"] = value.hex()
        elif isinstance(value, dict):
            described["items"] = {repr(key): self.describe(item) for key, item in value.items()}
        elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
            described["items"] = [self.describe(item) for item in value]
        elif isinstance(value, set | frozenset):
            described["value"] = sorted(map(repr, value))
        elif value is None or isinstance(value, bool | int | str | bytes | complex | bytearray):
            described["value"] = value
        elif (dataclasses.is_dataclass(value) and not isinstance(value, type)) or hasattr(value, "__dict__"):
            described["attributes"] = self.describe(vars(value)) if not isinstance(value, type) else repr(value)
        else:
            described["value"] = describe_text(repr(value))
        return described

    def tensor(self, tensor):
        described = {
            "dtype": str(tensor.dtype),
            "shape": "ragged" if tensor.is_nested else list(tensor.shape),
            "layout": str(tensor.layout),
            "device": str(tensor.device),
            "requires_grad": tensor.requires_grad,
            "leaf": tensor.is_leaf,
            "inference": tensor.is_inference(),
            "pinned": tensor.device.type == "cpu" and torch.cuda.is_available() and tensor.is_pinned(),
        }
        tensor = tensor.detach()
        if tensor.is_nested:
            described["items"] = [self.describe(item) for item in tensor.unbind()]
        elif tensor.layout == torch.sparse_coo:
            described["coalesced"] = tensor.is_coalesced()
            described["items"] = [self.describe(tensor._indices()), self.describe(tensor._values())]
        elif tensor.layout == torch.sparse_csr:
            parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
            described["items"] = [self.describe(part) for part in parts]
        else:
            plain = tensor.as_subclass(torch.Tensor)
            described["stride"] = list(plain.stride())
            described["conjugate"] = plain.is_conj()
            flat = plain.resolve_conj().clone(memory_format=torch.contiguous_format).flatten()
            described["bytes"] = flat.view(torch.uint8).numpy().tobytes()
            described["overlaps"] = self.overlaps(plain)
        return described

    def array(self, array):
        described = {
            "dtype": str(array.dtype),
            "shape": list(array.shape),
            "stride": list(array.strides),
            "writeable": array.flags.writeable,
        }
        if array.dtype.hasobject:
            described["items"] = [self.describe(item) for item in array.flat]
        else:
            described["bytes"] = array.tobytes()
        return described

    def overlaps(self, tensor):
        """Numbers of the batch's earlier tensors whose span of memory meets this one's."""
        if tensor.numel() == 0:
            self.ranges.append((0, 0))
            return []
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start, end = tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()
        earlier = [i for i, (first, last) in enumerate(self.ranges) if first < end and start < last]
        self.ranges.append((start, end))
        return earlier


def describe(value):
    return Describer().describe(value)


FRAME = re.compile(r'^\s*File "(?P<path>.*)", line \d+, in (?P<function>.*)$')


def describe_text(text):
    """An error's text with everything but the frames of the torch, Ray and rayloader machinery.

    Of the traceback inside the text the user's own frames stay: function and source line. Addresses and process ids
    go.
    """
    lines, own_frame = [], False
    for line in text.splitlines():
        frame = FRAME.match(line)
        if frame:
            own_frame = os.path.basename(frame["path"]).startswith("conformance_")
            if own_frame:
                lines.append(f"  in {frame['function']}")
        elif line.startswith("    ") and "Traceback" in text:
            if own_frame and line.strip(" ^~"):
                lines.append(line)
        else:
            lines.append(line)
    text = re.sub(r"\b0[xX][0-9a-fA-F]{6,}", "0x...", "\n".join(lines))
    # Two of torch's texts say this; which one comes depends on where the signal finds the main process.
    return re.sub(r"\(pid(\(s\))? [\d, ]+\) exited unexpectedly.*", "(pid N) exited unexpectedly", text, flags=re.S)


def describe_error(error):
    """Type, bases, text, and the user's own frames.

    The traceback is dropped: `ExceptionWrapper.reraise` leaves a cycle through it that would keep the iterator alive
    until a garbage collection, which ends torch's workers by timeout only.
    """
    described = {
        "type": type_name(error),
        "bases": [f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__],
        "text": describe_text(str(error)),
        "arguments": [type_name(argument) for argument in error.args],
        "own frames": [frame.name for frame in traceback.extract_tb(error.__traceback__) if is_dataset_code(frame)],
    }
    error.with_traceback(None)  # not by an attribute, which a frozen class refuses
    return described


def is_dataset_code(frame):
    name = os.path.basename(frame.filename)
    return name.startswith("conformance_") and name not in ("conformance_record.py", "conformance_scripts.py")


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


class Recorder:
    """The events of one case. Scripts iterate the loader through it."""

    def __init__(self, loader_class, unordered=False):
        self.loader_class = loader_class
        self.unordered = unordered
        self.events = []
        self.epochs = 0

    def note(self, label, value):
        self.events.append((label, describe(value)))

    def error(self, label, error):
        self.events.append((f"{label}: error", describe_error(error)))

    def attempt(self, label, function):
        """Call it; record what it gives or raises."""
        try:
            value = function()
        except Exception as error:
            self.error(label, error)
            return None
        self.note(label, value)
        return value

    def epoch(self, loader, take=None, use=None):
        """One epoch, or its first `take` batches: length, batches, errors, end, and the generators after it."""
        label = f"epoch {self.epochs}"
        self.epochs += 1
        self.attempt(f"{label}: length", lambda: len(loader))
        iterator = self.start(loader, label)
        if iterator is not None:
            self.take(iterator, take, label, use)
        del iterator
        self.generators(loader, label)

    def start(self, loader, label="start"):
        try:
            iterator = iter(loader)
        except Exception as error:
            self.error(f"{label}: iter", error)
            return None
        self.attempt(f"{label}: length of the iterator", lambda: len(iterator))
        return iterator

    def take(self, iterator, count=None, label="take", use=None, first=0):
        """Take `count` batches (None: all); an error takes a batch's place. Returns whether it may go on."""
        events, errors, number, more = [], 0, first, True
        while count is None or number < first + count:
            try:
                batch = next(iterator)
            except StopIteration as stop:
                more = False
                events.append((f"{label}: end after {number}", {"text": describe_text(str(stop))}))
                stop.__traceback__ = None  # as in describe_error
                break
            except Exception as error:
                events.append((f"{label}: batch {number}: error", describe_error(error)))
                errors += 1
                if errors > MAX_ERRORS:
                    events.append((f"{label}: too many errors", {}))
                    break
            else:
                events.append((f"{label}: batch {number}", describe(batch)))
                if use is not None:
                    use(batch)
            number += 1
        if self.unordered:
            events = [(f"{label}: batch", described) for _, described in sorted(events, key=repr_of_description)]
        self.events.extend(events)
        return more

    def generators(self, loader, label):
        """States of all generators of the main process that an epoch may move."""
        states = {
            "torch": digest(torch.get_rng_state().numpy().tobytes()),
            "python": digest(repr(random.getstate()).encode()),
            "numpy": digest(repr([part.tolist() if i == 1 else part for i, part in numpy_state()]).encode()),
        }
        for name, holder in (("loader", loader), ("sampler", loader.sampler), ("batches", loader.batch_sampler)):
            if getattr(holder, "generator", None) is not None:
                states[name] = digest(holder.generator.get_state().numpy().tobytes())
        inner = getattr(loader.batch_sampler, "sampler", None)
        if getattr(inner, "generator", None) is not None:
            states["inner sampler"] = digest(inner.generator.get_state().numpy().tobytes())
        self.events.append((f"{label}: generators after it", states))
        self.note(f"{label}: worker info outside", get_worker_info())

    def warnings(self, caught):
        """All UserWarnings, but for those that say "Triggered internally", which come once in a process's life, and
        those that are ours alone: on `multiprocessing_context` (it means nothing there), and on streams that are not
        divided.
        """
        left_out = re.compile("Triggered internally|multiprocessing_context|began with the same")
        for warning in caught:
            text = str(warning.message)
            if issubclass(warning.category, UserWarning) and not left_out.search(text):
                self.events.append(("warning", {"text": describe_text(text), "type": warning.category.__name__}))


def numpy_state():
    return enumerate(np.random.get_state())


def repr_of_description(event):
    return repr(event[1])


def record(case, loader_class):
    """Run one case with the given loader class from fixed seeds; returns its events."""
    random.seed(case.seed)
    np.random.seed(case.seed)
    torch.manual_seed(case.seed)
    recorder = Recorder(loader_class, case.unordered)
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        for context in case.contexts:
            stack.enter_context(context())
        try:
            loader = loader_class(**case.make())
        except Exception as error:
            recorder.error("constructor", error)
        else:
            case.script(recorder, loader)
            del loader
    recorder.warnings(caught)
    return recorder.events


def first_difference(expected, actual):
    """None if the two records are equal, else where they part first and what each side has there."""
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=False)):
        if ours == theirs:
            continue
        if ours[0] != theirs[0]:
            return f"event {number}: torch has {summary(theirs)}\nours has {summary(ours)}"
        where, theirs_there, ours_there = narrow(theirs[1], ours[1])
        return f"{theirs[0]}, at {where or 'the top'}:\ntorch: {theirs_there}\nours:  {ours_there}"
    if len(expected) != len(actual):
        side, longer = ("torch", expected) if len(expected) > len(actual) else ("ours", actual)
        return f"only {side} goes on: {summary(longer[min(len(expected), len(actual))])}"
    return None


def summary(event):
    return f"[{event[0]}] {event[1]!r}"[:2000]


def narrow(theirs, ours, path=""):
    """Descend to the first unequal leaf; returns its path and both values, tensors decoded."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if list(theirs) != list(ours):
            return f"{path} keys", list(theirs), list(ours)
        for key in theirs:
            if theirs[key] != ours[key]:
                if key == "bytes":
                    return f"{path} values", decode(theirs), decode(ours)
                return narrow(theirs[key], ours[key], path if key == "items" else f"{path}[{key}]")
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            return f"{path} number of items", len(theirs), len(ours)
        for i, (their_item, our_item) in enumerate(zip(theirs, ours, strict=True)):
            if their_item != our_item:
                return narrow(their_item, our_item, f"{path}[{i}]")
    return path, theirs, ours


def decode(described):
    dtype = described["dtype"]
    if dtype.startswith("torch.") and described["bytes"]:
        values = torch.frombuffer(bytearray(described["bytes"]), dtype=getattr(torch, dtype.removeprefix("torch.")))
        return values.tolist()
    return described["bytes"]
