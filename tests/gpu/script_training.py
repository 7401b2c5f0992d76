"""Trains with torch's loader and with both ways of rayloader; the losses of all steps must be equal bit for bit.

    python tests/gpu/script_training.py [CASE ...] [--simulate]

Each case is a way to train that depends on streams, graphs or layouts, and runs in a process of its own, without Ray.
Nothing waits for a step: a batch that is overwritten or read too early changes a loss. Prints whether each case has
passed; the status is 0 if all have. With --simulate the device is simulated, and what only CUDA has is left out.
"""

import argparse
import contextlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS is not deterministic
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, default_collate

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS.parent), str(TESTS)]  # the library, and the simulated accelerator

STEPS = 200
BATCH_SIZE = 32  # 393 kB: far more than what travels in messages
CAPTURED_AT = 3  # step; those before it warm up
CASES = {
    "plain": set(),
    "autocast": {"autocast"},
    "channels_last": {"channels_last"},
    "two loaders": {"two"},
    "DDP": {"distributed"},
    "reduce-overhead": {"compiled"},
    "captured by hand": {"captured", "own_stream"},
    "own stream": {"own_stream"},
}
SIMULATED = ("plain", "autocast", "channels_last", "two loaders", "DDP")


class Images(Dataset):
    """Random images of the worker's own stream, so that no two batches are alike."""

    def __len__(self):
        return STEPS * BATCH_SIZE

    def __getitem__(self, index):
        return torch.rand(3, 32, 32) + index % 7, index % 10


def channels_last_batch(samples):
    images, labels = default_collate(samples)
    return images.contiguous(memory_format=torch.channels_last), labels


def new_net():
    """Its loss depends on every number of a batch."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 8 * 8, 10),
    )


class Cuda:
    """The real device."""

    device, backend = torch.device("cuda", 0), "nccl"

    def move(self, part):
        return part.to(self.device, non_blocking=True)


class Simulated:
    """Copies to main memory."""

    device, backend = torch.device("cpu"), "gloo"

    def __init__(self):
        import pytest

        from simulated_device import SimulatedAccelerator

        self.accelerator = SimulatedAccelerator(at_each_query=1).install(pytest.MonkeyPatch())
        torch.set_num_threads(1)  # a tiny net, beside other tests

    def move(self, part):
        moved = self.accelerator.copy(part, self.device)
        self.accelerator.advance(self.accelerator.queued)
        return moved


def train(gpu, loader, ways):
    """The losses of all steps."""
    torch.manual_seed(0)
    net = new_net().to(gpu.device)
    if "channels_last" in ways:
        net = net.to(memory_format=torch.channels_last)
    if "distributed" in ways:
        net = torch.nn.parallel.DistributedDataParallel(net)
    if "compiled" in ways:
        net = torch.compile(net, mode="reduce-overhead")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step(images, labels):
        optimizer.zero_grad()
        with torch.autocast(gpu.device.type, torch.bfloat16, enabled="autocast" in ways):
            loss = cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    collate_fn = channels_last_batch if "channels_last" in ways else None
    loaders = [
        loader(dataset=Images(), batch_size=BATCH_SIZE, shuffle=True, num_workers=2, collate_fn=collate_fn)
        for _ in range(1 + ("two" in ways))
    ]
    losses, graph = [], None
    with torch.cuda.stream(torch.cuda.Stream()) if "own_stream" in ways else contextlib.nullcontext():
        for batch in (batch for together in zip(*loaders, strict=True) for batch in together):
            if "captured" not in ways or len(losses) < CAPTURED_AT:
                losses.append(step(*map(gpu.move, batch)).clone())
                continue
            if graph is None:
                static = [torch.empty_like(part, device=gpu.device) for part in batch]
                graph = torch.cuda.CUDAGraph()
                stream = torch.cuda.current_stream()
                # Meanwhile the loaders' threads call CUDA too.
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    loss = step(*static)
            for target, part in zip(static, batch, strict=True):
                target.copy_(part, non_blocking=True)
            graph.replay()
            losses.append(loss.clone())
        return torch.stack(losses).cpu()


def check(case, gpu):
    """Raises an AssertionError unless all losses are equal."""
    import rayloader

    torch.use_deterministic_algorithms(True)
    ours, found = partial(rayloader.DataLoader, workers="fork"), []
    if case == "DDP":
        torch.distributed.init_process_group(gpu.backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    for loader in (partial(DataLoader, pin_memory=True), partial(ours, pin_memory=True), partial(ours, device="cuda")):
        torch._dynamo.reset()
        found.append(train(gpu, loader, CASES[case]))
    if case == "DDP":
        torch.distributed.destroy_process_group()
    expected, *others = found
    assert len(expected) == STEPS * (1 + (case == "two loaders"))
    assert expected.isfinite().all(), f"torch's losses: {expected}"
    for way, losses in zip(("pin_memory", "device"), others, strict=True):
        unequal = losses.ne(expected).nonzero()
        assert not len(unequal), f"{way}: {len(unequal)} losses differ from torch's, the first at {int(unequal[0])}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--simulate", action="store_true", help="without a GPU")
    given = parser.parse_args()
    cases = given.cases or list(SIMULATED if given.simulate else CASES)
    if len(cases) > 1:
        simulate = ["--simulate"] * given.simulate
        done = [subprocess.run([sys.executable, __file__, case, *simulate], check=False) for case in cases]
        sys.exit(any(process.returncode for process in done))
    check(cases[0], Simulated() if given.simulate else Cuda())
    print(f"passed {cases[0]}", flush=True)


if __name__ == "__main__":
    main()
