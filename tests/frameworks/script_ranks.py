"""One rank of two: batches, losses and resumption, beside torch's loader in the same process.

python -m torch.distributed.run --standalone --nproc-per-node=2 script_ranks.py Accelerate
python script_ranks.py Lightning    Lightning itself starts the other rank
"""

import multiprocessing
import sys
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import rayloader
from framework_data import Augmented, Numbers, seed
from trainings_cases import FRAMEWORKS, lightning, trained

FRAMEWORKS["Lightning"] = lambda *given: lightning(*given, devices=2, strategy="ddp")
NAMES = {
    "Accelerate": [f"{name}, noise, {one}" for name in FRAMEWORKS if name.startswith("Accelerate") for one in "01"],
    "Lightning": ["Lightning, noise, 0", "Lightning, noise, 1"],
}


def prepared(dataset, loader_class=DataLoader, workers=1, configuration=None, **options):
    seed(1)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**configuration or {}))
    return accelerator.prepare(loader_class(dataset, num_workers=workers, **options))


def read(loader):
    return [batch.tolist() for batch in loader]


def resume_in_accelerate():
    """Streams, uneven parts, and states."""
    for data, how in [
        (Numbers(24), {"dispatch_batches": False}),
        (Numbers(24), {}),
        (Augmented(), {"even_batches": False}),
    ]:
        options = {"batch_size": 3, "configuration": how}
        expected = read(prepared(data, **options))
        with rayloader.patch(ray_remote_args={"num_cpus": 0}):
            assert read(prepared(data, **options)) == expected, how

    with rayloader.patch(ray_remote_args={"num_cpus": 0}):
        for how in ({}, {"even_batches": False}, {"use_seedable_sampler": False}, {"dispatch_batches": True}):
            options = {"batch_size": 3, "shuffle": True, "configuration": how}
            loader = prepared(Augmented(24), **options)
            told = [(batch.tolist(), loader.state_dict().copy()) for batch in loader]
            following = read(loader)
            assert len(told) == 4
            for taken in (1, 3, 4):
                loader = prepared(Augmented(24), **options)
                if taken < 4 and "dispatch_batches" in how:
                    if torch.distributed.get_rank() == 0:
                        with pytest.raises(rayloader.StateError, match="one process fetches the batches of all"):
                            loader.load_state_dict(told[taken - 1][1])
                    continue
                loader.load_state_dict(told[taken - 1][1])
                loader.iteration = taken // 4
                assert read(loader) == ([batch for batch, _ in told[taken:]] or following), (how, taken)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    # For torch's workers: a child of this process can deadlock at its fork, by the threads of gloo.
    multiprocessing.set_forkserver_preload(["torch", "framework_data"])
    multiprocessing.set_start_method("forkserver")
    trained(NAMES[sys.argv[1]][0])  # the first one starts the ranks, and what this draws is not to matter
    for name in NAMES[sys.argv[1]]:
        expected = trained(name)
        with rayloader.patch(ray_remote_args={"num_cpus": 0}):
            assert trained(name) == expected, name
    if sys.argv[1] == "Accelerate":
        resume_in_accelerate()
    print("the end\n", end="", flush=True)  # in one piece
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    rayloader.shutdown()
