"""What torch's loader and ours read of Hugging Face's `datasets`, and what they make of it.

python datasets_cases.py OUT NAME...   write to OUT, as JSON, what torch's loader makes of these cases
"""

import itertools
import json
import multiprocessing
import sys
from pathlib import Path

import datasets
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from framework_data import seed

SETTINGS = {"0": {"num_workers": 0}, "2": {"num_workers": 2}, "2p": {"num_workers": 2, "persistent_workers": True}}


def rows():
    """Texts of different lengths."""
    return datasets.Dataset.from_dict(
        {"number": list(range(26)), "text": ["low lower lowest"[: 3 + number % 14] for number in range(26)]}
    )


def tokenizer():
    """Made here, for nothing can be fetched."""
    import tokenizers
    import any_torchvision  # isort: skip  # noqa: F401 (first)
    import transformers

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "low", "lower", "lowest"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


def tokenized(dataset):
    """Tokens in place of texts, and the collator that makes those of a batch equally long."""
    import any_torchvision  # isort: skip  # noqa: F401 (first)
    import transformers

    tokens = tokenizer()
    dataset = dataset.map(lambda row: tokens(row["text"]), remove_columns="text")
    return {"dataset": dataset, "collate_fn": transformers.DataCollatorWithPadding(tokens)}


def stream():
    return rows().to_iterable_dataset(num_shards=4)


def interleaved():
    """Drawn at random from two; each worker reads some shards of both, and draws other numbers than its neighbour."""
    return datasets.interleave_datasets([stream(), stream()], probabilities=[0.5, 0.5], seed=7)


class Holds(IterableDataset):
    """The user's own, which holds two streams and passes its state on to them at once."""

    def __init__(self):
        self.streams = {"first": stream(), "second": stream()}

    def __iter__(self):
        yield from itertools.chain(*self.streams.values())

    def state_dict(self):
        return {name: inner.state_dict() for name, inner in self.streams.items()}

    def load_state_dict(self, state):
        for name, inner in self.streams.items():
            inner.load_state_dict(state[name])


class HoldsAndWaits(Holds):
    """Passes its state on when it is iterated."""

    state = None

    def __iter__(self):
        if self.state is not None:
            super().load_state_dict(self.state)
            self.state = None
        yield from super().__iter__()

    def load_state_dict(self, state):
        self.state = state


CASES = {
    "rows": lambda: {"dataset": rows().with_format("torch"), "shuffle": True},
    "stream": lambda: {"dataset": stream().with_format("torch")},
    "interleaved": lambda: {"dataset": interleaved()},
    "held": lambda: {"dataset": Holds()},
    "held, passed on late": lambda: {"dataset": HoldsAndWaits()},
    "joined": lambda: {"dataset": datasets.concatenate_datasets([stream(), stream()])},
    "shuffled": lambda: {"dataset": stream().shuffle(seed=3, buffer_size=5).with_format("torch")},
    "tokenized rows": lambda: {**tokenized(rows()), "shuffle": True},
    "tokenized stream": lambda: tokenized(stream()),
}


def make(loader_class, case, setting):
    """The loader, from the same seed each time."""
    seed(1)
    return loader_class(**CASES[case](), batch_size=3, **SETTINGS[setting])


def plain(batch):
    """A batch as JSON can hold it, with the types of its tensors."""
    return {
        name: [str(value.dtype), value.tolist()] if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def epoch(loader, number):
    """The batches of this epoch, whose number streams are told."""
    if hasattr(loader.dataset, "set_epoch"):
        loader.dataset.set_epoch(number)
    return [plain(batch) for batch in loader]


def two_epochs(loader_class, name):
    case, setting = name.rsplit(", ", 1)
    loader = make(loader_class, case, setting)
    return [epoch(loader, 0), epoch(loader, 1)]


if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    found = {name: two_epochs(DataLoader, name) for name in sys.argv[2:]}
    assert "ray" not in sys.modules, "torch's side must not have Ray in it"
    Path(sys.argv[1]).write_text(json.dumps(found))
