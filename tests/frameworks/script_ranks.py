"""One rank of several under Accelerate: batches, losses and resumption, beside torch's loader in the same process.

python -m torch.distributed.run --standalone --nproc-per-node=2 script_ranks.py
"""

import copy
import multiprocessing
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import rayloader
from framework_data import Augmented, Model, Numbers, Sums, seed

warnings.filterwarnings("ignore", "This DataLoader will create")


def prepared(dataset, *, size=3, workers=1, **configuration):
    seed(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration))
    shuffle = None if isinstance(dataset, Numbers) else True
    return accelerator, accelerator.prepare(DataLoader(dataset, size, shuffle=shuffle, num_workers=workers))


def epoch(loader):
    return [batch.tolist() for batch in loader]


def losses():
    accelerator, loader = prepared(Sums(), size=8)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def of_all_kinds():
    found = {"losses": list(losses())}
    for name, configuration in {
        "even": {},
        "uneven": {"even_batches": False},
        "torch's sampler": {"use_seedable_sampler": False},
        "split": {"split_batches": True, "size": 4},
        "dispatched": {"dispatch_batches": True},
    }.items():
        for workers in (0, 1):
            accelerator, loader = prepared(Augmented(), workers=workers, **configuration)
            found[name, workers] = epoch(loader), epoch(accelerator.skip_first_batches(loader, 1)), epoch(loader)
    for name, configuration in {"stream": {"dispatch_batches": False}, "dispatched stream": {}}.items():
        accelerator, loader = prepared(Numbers(24), **configuration)
        found[name] = epoch(loader), epoch(accelerator.skip_first_batches(loader, 1))
    return found


def compare():
    expected = of_all_kinds()
    assert len(expected["losses"]) == 10
    with rayloader.patch(ray_remote_args={"num_cpus": 0}):
        found = of_all_kinds()
        assert type(prepared(Augmented())[1].base_dataloader) is rayloader.DataLoader
    for kind, batches in expected.items():
        assert found[kind] == batches, (kind, found[kind], batches)

    with rayloader.patch(ray_remote_args={"num_cpus": 0}):
        for configuration in ({}, {"even_batches": False}, {"use_seedable_sampler": False}, {"dispatch_batches": True}):
            accelerator, loader = prepared(Augmented(24), **configuration)
            states, batches = [], []
            for batch in loader:
                batches.append(batch.tolist())
                states.append(copy.deepcopy(loader.state_dict()))
            following = epoch(loader)
            assert len(states) == 4
            for taken in (1, 3, 4):
                _, loader = prepared(Augmented(24), **configuration)
                if taken < 4 and "dispatch_batches" in configuration and accelerator.is_main_process:
                    with pytest.raises(rayloader.StateError, match="one process fetches the batches of all"):
                        loader.load_state_dict(states[taken - 1])
                    continue
                loader.load_state_dict(states[taken - 1])
                loader.iteration = taken // 4
                if "dispatch_batches" not in configuration or taken == 4:
                    assert epoch(loader) == (batches[taken:] if taken < 4 else following), (configuration, taken)

    torch.distributed.destroy_process_group()
    rayloader.shutdown()
    print("the end")


if __name__ == "__main__":
    # For torch's workers: a child of this process can deadlock at its fork, by the threads of gloo.
    multiprocessing.set_forkserver_preload(["torch", "framework_data"])
    multiprocessing.set_start_method("forkserver")
    compare()
