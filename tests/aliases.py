"""Objects over the same memory, a write to each, and who sees it: pickling decides, whatever carries the pickle."""

import copy

import numpy as np
import torch

try:
    import pandas
except ImportError:
    pandas = None

AT = 150  # the number that is written, of the whole array
# For each kind of object: how to make it from the holder of those before it, and where that number is.
KINDS = {
    "array": (lambda held: np.arange(2000.0), lambda array: (array, AT)),
    "same": (lambda held: held["array"], lambda array: (array, AT)),
    "whole view": (lambda held: held["array"][:], lambda array: (array, AT)),
    "part view": (lambda held: held["array"][100:300], lambda array: (array, AT - 100)),
    "reshaped": (lambda held: held["array"].reshape(20, 100), lambda array: (array, (1, 50))),
    "read-only view": (lambda held: read_only(held["array"][:]), lambda array: (array, AT)),
    "tensor": (lambda held: torch.from_numpy(held["array"]), lambda tensor: (tensor, AT)),
    "another tensor": (lambda held: torch.from_numpy(held["array"]), lambda tensor: (tensor, AT)),
    "part of the tensor": (lambda held: held["tensor"][140:160], lambda tensor: (tensor, AT - 140)),
    "tensor's array": (lambda held: held["tensor"].numpy(), lambda array: (array, AT)),
    "shallow copy": (lambda held: copy.copy(held), lambda holder: (holder["array"], AT)),
    "shallow copy's view": (lambda held: copy.copy(held), lambda holder: (holder["whole view"], AT)),
    "frame": (lambda held: pandas.DataFrame({"a": held["array"]}, copy=False), lambda frame: (frame.iloc, (AT, 0))),
    "series": (lambda held: held["frame"]["a"], lambda series: (series.iloc, AT)),
    "frame's copy": (lambda held: held["frame"].copy(deep=False), lambda frame: (frame.iloc, (AT, 0))),
}
OF_PANDAS = {"frame", "series", "frame's copy"}
WRITTEN = [kind for kind in KINDS if kind != "read-only view" and (pandas or kind not in OF_PANDAS)]


def read_only(array):
    array.flags.writeable = False
    return array


def made():
    """One object of each kind."""
    held = {}
    for kind, (make, _) in KINDS.items():
        if pandas is not None or kind not in OF_PANDAS:
            held[kind] = make(held)
    return held


def seen(held, written):
    """Those that show what is written to one of them; each write is another number."""
    number = -1.0 - WRITTEN.index(written)
    target, place = KINDS[written][1](held[written])
    target[place] = number
    found = {kind: KINDS[kind][1](held[kind]) for kind in held}
    return [kind for kind, (target, place) in found.items() if float(target[place]) == number]


class Aliases(torch.utils.data.Dataset):
    """Sample i is what a write to the i-th kind shows in."""

    def __init__(self):
        self.held = made()

    def __len__(self):
        return len(WRITTEN)

    def __getitem__(self, index):
        return seen(self.held, WRITTEN[index])


def as_is(sample):
    return sample
