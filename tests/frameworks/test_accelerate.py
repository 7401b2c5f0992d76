"""Hugging Face's Accelerate makes each loader anew, calls `state_dict` before each batch, and reads one batch ahead."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import rayloader
from framework_data import Augmented, Model, Numbers, Quiet, Sums, seed
from rayloader.frameworks import readers
from simulated_device import SimulatedAccelerator

full = pytest.mark.full
pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # which torchdata's constructor calls
]

SCRIPT = Path(__file__).parent / "script_ranks.py"
HANG_LIMIT = 500  # seconds for the script; on expiry it is killed and the test fails
OWN = {"on_error": "skip", "max_skipped": 4}


@pytest.fixture(autouse=True)
def accelerate_forgets():
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def patched():
    with rayloader.patch(max_worker_restarts=5):
        yield


def prepared(loader_class, num_workers, dataset=None, own=None, **configuration):
    seed(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    dataset = dataset or Augmented()
    shuffle = None if isinstance(dataset, Numbers) else True
    loader = loader_class(dataset, 3, shuffle=shuffle, num_workers=num_workers, **(own or {}))
    return accelerator, accelerator.prepare(loader)


def epoch(loader):
    return [batch.tolist() for batch in loader]


def test_batches_that_are_on_the_device_already_are_not_copied_again(patched, monkeypatch):
    accelerator = SimulatedAccelerator(at_each_query=1).install(monkeypatch)
    copies = []
    copy = accelerator.copy
    monkeypatch.setattr(accelerator, "copy", lambda *of: copies.append(copy(*of)) or copies[-1])
    _, loader = prepared(rayloader.DataLoader, 2, own={"device": "cuda"})
    assert loader.base_dataloader.device == "cuda"
    batches = list(loader)
    assert [batch.data_ptr() for batch in batches] == [one.data_ptr() for one in copies]


def check_is_ours(loader, restarts=3):
    assert isinstance(loader.base_dataloader, rayloader.DataLoader)
    assert (loader.on_error, loader.max_skipped, loader.max_worker_restarts) == ("skip", 4, restarts)


CASES = [
    pytest.param(0, {"use_seedable_sampler": False}, id="no workers, torch's sampler"),
    pytest.param(2, {"use_seedable_sampler": True}, id="2 workers, Accelerate's sampler"),
    pytest.param(0, {"use_seedable_sampler": True}, id="no workers, Accelerate's sampler", marks=full),
    pytest.param(2, {"use_seedable_sampler": False}, id="2 workers, torch's sampler", marks=full),
]


@pytest.mark.parametrize(("num_workers", "configuration"), CASES)
def test_batches_are_torchs_and_the_loaders_own_arguments_stay(num_workers, configuration):
    accelerator, loader = prepared(DataLoader, num_workers, **configuration)
    expected = [epoch(loader), epoch(accelerator.skip_first_batches(loader, 2)), epoch(loader)]
    with rayloader.patch(max_worker_restarts=5):
        accelerator, loader = prepared(rayloader.DataLoader, num_workers, own=OWN, **configuration)
        check_is_ours(loader)
        found = [epoch(loader)]
        skipping = accelerator.skip_first_batches(loader, 2)
        check_is_ours(skipping)
        found += [epoch(skipping), epoch(loader)]
    assert found == expected


def evaluated(loader_class):
    """What is gathered of an evaluation between two epochs of training."""
    seed(1)
    accelerator = Accelerator(cpu=True)
    loaders = loader_class(Augmented(), 3, True, num_workers=2), loader_class(Augmented(11), 4, num_workers=2)
    training, evaluation = accelerator.prepare(*loaders)
    return [
        epoch(training),
        [accelerator.gather_for_metrics(batch).tolist() for batch in evaluation],
        epoch(training),
    ]


def test_evaluation_loaders_give_torchs_batches():
    expected = evaluated(DataLoader)
    assert list(map(len, expected)) == [8, 3, 8]
    with rayloader.patch():
        assert evaluated(rayloader.DataLoader) == evaluated(DataLoader) == expected


@pytest.mark.usefixtures("patched")
def test_a_loader_that_was_made_as_torchs_gets_the_patchs_defaults():
    assert prepared(DataLoader, 2)[1].max_worker_restarts == 5


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("num_workers", "configuration"), CASES)
def test_a_state_that_accelerate_saved_leads_to_the_batches_that_followed(num_workers, configuration):
    """`_iterator_finished`, which it adds, is accepted."""
    _, loader = prepared(rayloader.DataLoader, num_workers, **configuration)
    states, batches = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    following = epoch(loader)
    assert [state["_iterator_finished"] for state in states] == [False] * 7 + [True]
    for taken in (1, 5, 8):
        _, loader = prepared(rayloader.DataLoader, num_workers, **configuration)
        loader.load_state_dict(states[taken - 1])
        loader.iteration = taken // 8  # it numbers epochs by itself, and seeds its sampler with the number
        assert epoch(loader) == (batches[taken:] if taken < 8 else following)


@pytest.mark.usefixtures("patched")
def test_accelerate_saves_and_loads_the_states_of_its_loaders(tmp_path):
    """With `use_stateful_dataloader` it makes torchdata's loader, which the patch makes ours."""
    accelerator, loader = prepared(rayloader.DataLoader, 2, use_stateful_dataloader=True, own=OWN)
    check_is_ours(loader)
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 3:
            accelerator.save_state(tmp_path)
    accelerator, loader = prepared(rayloader.DataLoader, 2, use_stateful_dataloader=True, own=OWN)
    accelerator.load_state(tmp_path)
    assert epoch(loader) == batches[3:]


def stateful(kind, num_workers, **options):
    """One of the loaders that Accelerate makes with `use_stateful_dataloader`."""
    dataset = [torch.tensor(number) for number in range(16)]
    return kind(dataset, batch_size=4, num_workers=num_workers, use_stateful_dataloader=True, **options)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "options"), [(DataLoaderShard, {}), (DataLoaderDispatcher, {}), (SkipDataLoader, {"skip_batches": 1})]
)
def test_its_loaders_are_instances_of_torchdatas_class_and_keep_their_place(kind, options, num_workers):
    Accelerator(cpu=True)
    loader = stateful(kind, num_workers, **options)
    for one in (loader, loader.base_dataloader):
        assert isinstance(one, StatefulDataLoader)
        assert isinstance(one, rayloader.DataLoader)
    assert isinstance(loader, kind)
    batches, states = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    assert batches == [[*range(begin, begin + 4)] for begin in range(4 * len(options), 16, 4)]
    for taken in (1, 2):
        anew = stateful(kind, num_workers)
        anew.load_state_dict(states[taken - 1])
        assert epoch(anew) == batches[taken:]


def test_a_checkpoint_of_torchdatas_own_loader_is_an_error_that_says_so(tmp_path):
    accelerator, loader = prepared(DataLoader, 0, use_stateful_dataloader=True)
    next(iter(loader))
    accelerator.save_state(tmp_path)
    with rayloader.patch():
        accelerator, _ = prepared(DataLoader, 0, use_stateful_dataloader=True)
        with pytest.raises(rayloader.StateError, match="but of torchdata's StatefulDataLoader"):
            accelerator.load_state(tmp_path)


@pytest.mark.usefixtures("patched")
def test_a_stream_that_one_process_reads_and_dispatches():
    accelerator, loader = prepared(rayloader.DataLoader, 2, Numbers(), own=OWN, dispatch_batches=True)
    check_is_ours(loader)
    batches, states = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    assert batches == epoch(rayloader.DataLoader(Numbers(), 3, num_workers=2))
    assert epoch(accelerator.skip_first_batches(loader, 3)) == batches[3:]
    _, loader = prepared(rayloader.DataLoader, 2, Numbers(), own=OWN, dispatch_batches=True)
    loader.load_state_dict(states[1])
    assert epoch(loader) == batches[2:]


def losses(loader_class, dataset=None):
    seed(1)
    accelerator = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, loader_class(dataset or Sums(), 8, True, num_workers=2)
    )
    found = []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_losses_are_torchs_to_the_digit():
    expected = losses(DataLoader)
    assert len(expected) == 20
    with rayloader.patch():
        assert losses(rayloader.DataLoader) == losses(DataLoader) == expected


def test_losses_over_a_cache_are_those_without():
    expected, kept = losses(DataLoader), rayloader.cached(Quiet())
    with rayloader.patch():
        assert losses(rayloader.DataLoader, Sums(kept)) == losses(DataLoader, Sums(kept)) == expected
    assert (kept.stats().present, kept.stats().built, kept.stats().hits) == (160, 160, 160)


def test_without_a_patch_one_warning_names_the_remedy():
    readers._warn_of_rebuilt.cache_clear()
    with pytest.warns(UserWarning, match=r"rebuilt as torch.*; call rayloader.patch\(\)"):
        _, loader = prepared(rayloader.DataLoader, 2)
    assert type(loader.base_dataloader) is DataLoader
    prepared(rayloader.DataLoader, 2)


@pytest.mark.parametrize("is_patched", [True, False])
@pytest.mark.parametrize("num_processes", [2, 1])
def test_a_rank_whose_part_would_be_dealt_out_to_all_is_an_error(is_patched, num_processes, monkeypatch):
    monkeypatch.setattr(readers, "_warn_of_rebuilt", lambda _: None)  # that it becomes torch's without a patch
    accelerator = Accelerator(cpu=True)
    PartialState._shared_state["num_processes"] = num_processes  # the others are not asked before the first batch
    own = {"num_replicas": 2, "rank": 0}
    with rayloader.patch() if is_patched else contextlib.nullcontext():
        if num_processes == 1:  # several ranks, and none of Accelerate's
            accelerator.prepare(rayloader.DataLoader(Numbers(), 3, **own))
        else:
            with pytest.raises(ValueError, match=r"has those of rank 0; leave num_replicas and rank out"):
                accelerator.prepare(rayloader.DataLoader(Numbers(), 3, **own))
        accelerator.prepare(rayloader.DataLoader(Numbers(), 3))


@full
def test_two_ranks():
    """Batches, losses and resumption are those of torch's loaders; see the script."""
    environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "OMP_NUM_THREADS": "1"}
    launcher = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = launcher.communicate(timeout=HANG_LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert (launcher.returncode, output.splitlines()) == (0, ["the end"] * 2), errors
