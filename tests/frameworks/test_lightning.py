"""Lightning's loops: training, validation, several loaders at once. Its package is there for `make test-full` alone."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import rayloader
from framework_data import HANG_LIMIT, Augmented, Numbers, Quiet, Sums, recorded, seed, written_by

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("default"),  # what Lightning warns of is its own matter
]


@pytest.fixture(scope="module")
def cases():
    """The module, which imports Lightning."""
    return importlib.import_module("lightning_cases")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What Lightning makes of torch's loaders, in a process without Ray: their workers are forks."""
    return written_by("lightning_cases.py", tmp_path_factory.mktemp("lightning"))


def test_training_gives_torchs_losses(monkeypatch, theirs, cases):
    """A loader that it makes anew is of the loader's own class."""
    expected = theirs["training"]
    assert len(expected) == 20
    kinds = recorded(monkeypatch, rayloader.DataLoader)
    assert cases.run(rayloader.DataLoader, "training", on_error="skip") == expected
    with rayloader.patch(on_error="skip"):
        assert cases.run(DataLoader, "training") == expected
    assert kinds == [rayloader.DataLoader] * 2


def test_training_over_a_cache_gives_torchs_losses(monkeypatch, theirs, cases):
    kept = rayloader.cached(Quiet())
    monkeypatch.setattr(cases, "Sums", lambda: Sums(kept))
    for _ in range(2):
        assert cases.run(rayloader.DataLoader, "training") == theirs["training"]
    assert (kept.stats().present, kept.stats().built, kept.stats().hits) == (160, 160, 160)


def test_training_without_workers_gives_torchs_losses(theirs, cases):
    assert cases.run(rayloader.DataLoader, "training, no workers") == theirs["training, no workers"]


def test_a_consumer_of_a_share_is_read_from_its_first_batch_on_or_from_its_state(cases):
    """`fit` makes an iterator to look at before the one that it reads."""

    def loader():
        generator = torch.Generator().manual_seed(5)
        dataset = [torch.tensor(number) for number in range(40)]
        return rayloader.DataLoader(dataset, 4, shuffle=True, num_workers=1, generator=generator)

    def fitted(batches, epochs):
        module = cases.Noting()
        cases.lightning.Trainer(max_epochs=epochs, **cases.QUIET).fit(module, batches)
        return [batch["one"] for batch in module.seen]

    plain = loader()
    expected = [batch.tolist() for _ in range(2) for batch in plain]
    with rayloader.share(loader(), consumers=1) as share:
        assert fitted(share.consumer(0), 2) == expected
    with rayloader.share(loader(), consumers=1) as share:
        consumer = share.consumer(0)
        for _, _ in zip(range(4), consumer, strict=False):
            pass
        state = consumer.state_dict()
    with rayloader.share(loader(), consumers=1, state=state) as share:
        assert fitted(share.consumer(0), 2) == expected[4:]


def test_samples_are_dealt_out_to_the_ranks():
    data = importlib.import_module("lightning.fabric.utilities.data")
    loader = rayloader.DataLoader(Sums(), 8, num_workers=2, on_error="skip", max_skipped=3)
    sampler = DistributedSampler(loader.dataset, 2, 1)
    anew = data._update_dataloader(loader, sampler)
    assert type(anew) is rayloader.DataLoader
    assert (anew.sampler, len(anew), anew.on_error, anew.max_skipped) == (sampler, 10, "skip", 3)
    with rayloader.patch(on_error="skip"):
        loader = DataLoader(Sums(), 8, num_workers=2)
    anew = data._update_dataloader(loader, sampler)  # afterwards
    assert type(anew) is rayloader.DataLoader
    assert (anew.sampler, anew.on_error) == (sampler, "skip")


def test_two_ranks_that_lightning_starts_give_torchs_batches():
    """See the script."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("script_lightning.py")],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert (done.returncode, done.stdout.splitlines().count("the end")) == (0, 2), done.stdout + done.stderr


@pytest.mark.parametrize("num_workers", [2, 0])
@pytest.mark.parametrize("dataset_class", [Augmented, Numbers])
def test_training_goes_on_in_mid_epoch(dataset_class, num_workers, tmp_path, cases):
    """With a stream, whose length it does not know, it is a batch ahead."""

    def fit(path=None):
        module = cases.Noting(tmp_path if path is None else None)
        trainer = cases.lightning.Trainer(max_epochs=2, **cases.QUIET)
        seed(1)
        shuffle = dataset_class is Augmented or None
        trainer.fit(module, rayloader.DataLoader(dataset_class(), 3, shuffle, num_workers=num_workers), ckpt_path=path)
        return module.seen

    batches = fit()
    assert len(batches) == 16
    for step in (1, 7, 8, 11):
        assert fit(tmp_path / f"{step}") == batches[step:], step


@pytest.mark.parametrize("persistent", [False, True])
def test_training_with_a_limit_goes_on_after_each_batch(persistent, tmp_path, cases):
    """It ends each epoch after three of eight batches. The last batch's checkpoint leads to the next epoch."""

    def fit(path=None):
        module = cases.Noting(tmp_path if path is None else None)
        trainer = cases.lightning.Trainer(max_epochs=3, limit_train_batches=3, **cases.QUIET)
        seed(1)
        loader = rayloader.DataLoader(Augmented(), 3, True, num_workers=2, persistent_workers=persistent)
        trainer.fit(module, loader, ckpt_path=path)
        return module.seen

    batches = fit()
    assert len(batches) == 9
    for step in (2, 3, 6, 7):
        assert fit(tmp_path / f"{step}") == batches[step:], step


@pytest.mark.parametrize(
    "case", ["validation, no workers", "validation, fresh workers", "validation, persistent workers"]
)
def test_validation_gives_torchs_losses(case, theirs, cases):
    losses, result = cases.run(rayloader.DataLoader, case)
    assert [losses, result] == theirs[case]
    kinds = [kind for kind, _ in losses]
    epoch = 2 * (["training"] * 10 + ["validation"] * 10)
    assert kinds == ["validation"] * 2 + 2 * epoch + ["validation"] * 10


@pytest.mark.parametrize(
    ("case", "batches"),
    [
        ("min_size", 6),
        ("max_size", 16),
        ("max_size_cycle", 16),
        ("max_size_cycle, no workers", 16),
        ("max_size_cycle, persistent workers", 16),
        ("sequential", 22),
    ],
)
def test_combined_loaders_give_torchs_batches(case, batches, theirs, cases):
    found = cases.run(rayloader.DataLoader, case)
    assert found == theirs[case]
    assert len(found) == batches


@pytest.mark.parametrize("num_workers", [2, 0])
def test_a_checkpoint_from_after_an_epoch_leads_to_the_next(num_workers, tmp_path, cases):
    """Lightning itself does not load the states that are in it."""

    def fit(folder, path=None):
        module = cases.Noting()
        keep = cases.ModelCheckpoint(folder, filename="{step}", save_top_k=-1)
        trainer = cases.lightning.Trainer(
            max_epochs=3, callbacks=[keep], **{**cases.QUIET, "enable_checkpointing": True}
        )
        seed(1)
        loader = rayloader.DataLoader(Augmented(), 3, True, num_workers=num_workers)
        trainer.fit(module, loader, ckpt_path=path)
        return module.seen

    batches = fit(tmp_path)
    for step in (8, 16):
        assert fit(tmp_path / "resumed", tmp_path / f"step={step}.ckpt") == batches[step:], step


@pytest.mark.parametrize("num_workers", [2, 0])
@pytest.mark.parametrize("dataset_class", [Augmented, Numbers])
def test_the_state_counts_though_the_number_of_steps_was_read_before(dataset_class, num_workers, tmp_path, cases):
    """Lightning drops it (its issue 20550). Of a stream it has drawn a batch by then: an error."""

    class Module(cases.Noting):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches == (16 if dataset_class is Augmented else -1)
            return super().configure_optimizers()

    def fit(path=None):
        module = Module(tmp_path if path is None else None)
        seed(1)
        loader = rayloader.DataLoader(dataset_class(), 3, dataset_class is Augmented or None, num_workers=num_workers)
        cases.lightning.Trainer(max_epochs=2, **cases.QUIET).fit(module, loader, ckpt_path=path)
        return module.seen

    batches = fit()
    for step in (3, 8, 11):
        if dataset_class is Augmented:
            assert fit(tmp_path / f"{step}") == batches[step:], step
        else:
            with pytest.raises(rayloader.StateError, match="estimated_stepping_batches"):
                fit(tmp_path / f"{step}")


@pytest.mark.parametrize("dataset_class", [Augmented, Numbers])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_combined_loaders_go_on_after_each_batch(mode, dataset_class, tmp_path, cases):
    """With streams, whose length it does not know, Lightning is a batch ahead. It does not save which of them have
    ended, so that an epoch of the last mode may be longer: only its end is tried there.
    """

    def fit(path=None):
        module = cases.Noting(tmp_path if path is None else None)
        loader = cases.two_loaders(rayloader.DataLoader, mode, cases.FRESH, dataset_class)
        cases.lightning.Trainer(max_epochs=2, **cases.QUIET).fit(module, loader, ckpt_path=path)
        return module.seen

    batches = fit()
    length = len(batches) // 2
    steps = {1, 2, length - 1, length, length + 1}
    for step in sorted(steps - {length - 1} if (mode, dataset_class) == ("max_size_cycle", Numbers) else steps):
        assert fit(tmp_path / f"{step}") == batches[step:], step
