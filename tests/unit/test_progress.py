"""The bar around a loader: what it shows, and when it is closed."""

from __future__ import annotations

import gc
import io
import sys
import weakref

import pytest
import torch

import rayloader
from rayloader import DataLoader


class Terminal(io.StringIO):
    def isatty(self):
        return True


def loader(length=10):
    return DataLoader(torch.utils.data.TensorDataset(torch.arange(length)), batch_size=2)


def shown(file):
    """What the bar showed last."""
    return file.getvalue().replace("\n", "\r").rstrip("\r").rpartition("\r")[2]


def test_batches_pass_through_and_are_counted():
    file = Terminal()
    bar = rayloader.progress(loader(), file=file, desc="epoch 3", mininterval=0)
    assert len(bar) == 5
    for _ in range(2):  # each iter() has a bar of its own
        assert torch.cat([batch for (batch,) in bar]).tolist() == list(range(10))
        assert shown(file).startswith("epoch 3: 100%")
        assert "5/5" in shown(file)
        assert "wait " in shown(file)


def test_nothing_is_shown_where_nobody_looks():
    file = io.StringIO()
    assert len(list(rayloader.progress(loader(), file=file))) == 5
    assert file.getvalue() == ""


def test_a_stream_without_a_length_is_counted_too():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(3))

    file = Terminal()
    assert len(list(rayloader.progress(DataLoader(Stream()), file=file, mininterval=0))) == 3
    assert "3batch" in shown(file)


@pytest.fixture
def closed(monkeypatch):
    """The bars that were closed."""
    import tqdm.auto

    bars = []

    class Bar(tqdm.auto.tqdm):
        def close(self):
            if not self.disable:
                bars.append(self.n)
            super().close()

    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    return bars


def test_the_bar_is_closed_where_the_loop_is_left(closed):
    for _ in rayloader.progress(loader(), file=Terminal()):
        break
    assert closed == [0]


def test_the_bar_is_closed_where_the_loop_raises(closed):
    def loop():
        for _ in rayloader.progress(loader(), file=Terminal()):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert len(closed) == 1


def test_the_bar_is_closed_where_the_dataset_raises(closed):
    class Failing(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return 1 // (2 - index)

    iterator = iter(rayloader.progress(DataLoader(Failing()), file=Terminal()))
    assert [next(iterator).item() for _ in range(2)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(iterator)
    assert closed == [2]
    assert next(iterator).item() == -1  # as without a bar


def test_a_resumed_epoch_begins_where_it_was():
    saved = loader()
    iterator = iter(saved)
    for _ in range(3):
        next(iterator)
    resumed = loader()
    resumed.load_state_dict(saved.state_dict())
    file = Terminal()
    assert len(list(rayloader.progress(resumed, file=file, mininterval=0))) == 2
    assert "5/5" in shown(file)


def test_no_batch_is_kept():
    iterator = iter(rayloader.progress(loader(), file=Terminal()))
    (batch,) = next(iterator)
    ref = weakref.ref(batch)
    del batch
    gc.collect()
    assert ref() is None


def test_restarts_are_shown():
    file, shows = Terminal(), loader()
    for step, _ in enumerate(rayloader.progress(shows, file=file, mininterval=0)):
        if step == 2:
            shows._recorder.latest.restarts = 2
    assert "restarts 2" in shown(file)


def test_without_tqdm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"rayloader\[progress\]"):
        rayloader.progress(loader())


def test_other_loaders_are_refused():
    with pytest.raises(TypeError, match=r"rayloader\.DataLoader"):
        rayloader.progress(torch.utils.data.DataLoader(range(3)))
