"""`ArrowDataset` and `ParquetStream` in the loops that train: torch's own loader, Accelerate's, Lightning's."""

import importlib

import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from pyarrow import parquet
from torch.utils.data import DataLoader

import rayloader
from framework_data import Model, recorded, seed
from rayloader import ArrowDataset, ParquetStream, ShuffleBuffer

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]

ROWS = 160
KINDS = ["ArrowDataset", "ParquetStream", "ShuffleBuffer"]


@pytest.fixture(scope="module")
def table():
    inputs = np.random.default_rng(0).random((ROWS, 4), np.float32)
    return pa.table({"inputs": pa.FixedSizeListArray.from_arrays(inputs.reshape(-1), 4), "labels": inputs.sum(1)})


@pytest.fixture(scope="module")
def folder(table, tmp_path_factory):
    """Two files of four row groups each."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(2):
        parquet.write_table(table.slice(80 * number, 80), folder / f"{number}.parquet", row_group_size=20)
    return folder


def loader(loader_class, kind, folder, **options):
    options = {"num_workers": 2, **options}
    match kind:
        case "ArrowDataset":
            return loader_class(ArrowDataset(parquet.read_table(folder)), 8, shuffle=True, **options)
        case "ParquetStream":
            return loader_class(ParquetStream(folder, shuffle=True), 8, **options)
        case "ShuffleBuffer":
            return loader_class(ShuffleBuffer(ParquetStream(folder, shuffle=True), 20), 8, **options)


def losses(batches, model, optimizer, backward=torch.Tensor.backward, begin=lambda _: None):
    """Of two epochs, as floats."""
    found = []
    for epoch in range(2):
        begin(epoch)
        for batch in batches:
            loss = model(**batch)["loss"]
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def trained(loader_class, kind, folder, sets_epoch=False, **options):
    seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = loader(loader_class, kind, folder, **options)
    begin = {"begin": batches.dataset.set_epoch} if sets_epoch else {}
    return losses(batches, model, optimizer, **begin)


@pytest.fixture(scope="module")
def expected(folder):
    """The losses with torch's own loader, by the kind of dataset."""
    return {kind: trained(DataLoader, kind, folder) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_own_loader_trains(kind, folder, table, expected):
    found = expected[kind]
    assert len(found) == 2 * ROWS // 8
    assert sum(found[20:]) < sum(found[:20])
    rows = [tuple(row) for batch in loader(DataLoader, kind, folder) for row in batch["inputs"].tolist()]
    assert sorted(rows) == sorted(map(tuple, table["inputs"].to_pylist()))
    if kind == "ArrowDataset":  # whose order does not depend on the workers
        assert trained(DataLoader, kind, folder, num_workers=0) == found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", ["fork", "ray"])
def test_losses_are_torchs_to_the_digit(kind, workers, folder, expected):
    assert trained(rayloader.DataLoader, kind, folder, workers=workers) == expected[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("made_as", [DataLoader, rayloader.DataLoader])
def test_accelerate_trains(kind, made_as, folder):
    """It sets the epoch of a dataset that has one."""
    expected = trained(DataLoader, kind, folder, sets_epoch=kind != "ArrowDataset")
    with rayloader.patch():
        seed(1)
        accelerator = Accelerator(cpu=True)
        model = Model()
        prepared = model, torch.optim.SGD(model.parameters(), lr=0.01), loader(made_as, kind, folder)
        model, optimizer, batches = accelerator.prepare(*prepared)
        assert type(batches.base_dataloader) is rayloader.DataLoader
        assert losses(batches, model, optimizer, accelerator.backward) == expected


@pytest.mark.full
@pytest.mark.filterwarnings("default")  # what Lightning warns of is its own matter
@pytest.mark.parametrize("kind", KINDS)
def test_lightning_trains(kind, folder, expected, monkeypatch):
    cases = importlib.import_module("lightning_cases")
    kinds = recorded(monkeypatch, rayloader.DataLoader)
    seed(1)
    module = cases.Regression()
    cases.lightning.Trainer(max_epochs=2, **cases.QUIET).fit(module, loader(rayloader.DataLoader, kind, folder))
    assert [loss for _, loss in module.losses] == expected[kind]
    assert set(kinds) == {rayloader.DataLoader}
