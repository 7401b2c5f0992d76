"""The table of conformance cases. Both sides import it; nothing here knows Ray or rayloader.

A case is a function that builds the loader's arguments and a script that iterates the loader. Worker settings are
written as "0", "2", "2p": the number of workers, p for persistent ones. Three groups:

- the cross product of map-style datasets and ways of sampling, and of iterable datasets and ways of batching, each
  pair with every third worker setting, shifted from pair to pair, so that every pair of axis values meets; a sample has
  one setting for each pair, and of the map-style datasets two thirds of the pairs;
- cases of one feature each, with the worker settings at which it could differ; a sample has it without workers, and at
  one of the other settings, in turn. Of features that differ little, a sample has some.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import conformance_callables as calls
import conformance_datasets as data
import conformance_iterables as streams
import conformance_scripts as scripts
import stateful
from conformance_callables import seeded

WORKERS = ("0", "1", "1p", "2", "2p", "3", "3p")
NOT_SAMPLED = ()  # of a feature whose mechanism other cases have


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: Unique; also the test's id.
        make: Builds the loader's arguments, everything new with each call.
        script: Iterates the loader, through the recorder.
        seed: Of the main process's generators before `make`.
        unordered: Compare the batches of an epoch as a multiset.
        contexts: Context managers around construction and script.
        full: In a full run only.
        actors: What actors are compared with: torch's workers that are forked or spawned; None: with nothing.
        again: Builds the arguments of a loader that goes on from a state of the first one; None: as `make` does.
    """

    name: str
    make: Callable[[], dict[str, Any]]
    script: Callable[[Any, Any], None]
    seed: int = 1234
    unordered: bool = False
    contexts: tuple[Callable[[], Any], ...] = ()
    full: bool = False
    actors: Literal["fork", "spawn", None] = "fork"
    again: Callable[[], dict[str, Any]] | None = None


CASES: list[Case] = []


def worker_arguments(setting):
    return {"num_workers": int(setting[0]), "persistent_workers": setting.endswith("p")}


def build(make, setting):
    """The arguments of one worker setting; `prefetch_factor` goes where there are no workers, as torch demands."""
    arguments = make() | worker_arguments(setting)
    if setting == "0":
        for name in ("prefetch_factor", "timeout", "multiprocessing_context"):
            arguments.pop(name, None)
    return arguments


def add(name, on, make, script=None, sample=None, **options):
    """A case for each worker setting; those that are not in `sample` are in a full run only, all with `NOT_SAMPLED`."""
    script = script or scripts.epochs(2)
    settings = on.split()
    if sample is None:
        with_workers = [setting for setting in settings if setting != "0"]
        sample = {"0", *with_workers[len(CASES) % max(1, len(with_workers)) :][:1]}
    for setting in settings:
        full = setting not in sample
        CASES.append(Case(f"{name}-w{setting}", partial(build, make, setting), script, full=full, **options))


def settings_of(i, j, in_sample=True):
    """Every third worker setting, and which of them is in a sample, if any."""
    settings = [setting for k, setting in enumerate(WORKERS) if (i + j + k) % 3 == 0]
    return {"on": " ".join(settings), "sample": {settings[(i + j) // 3 % len(settings)]} if in_sample else NOT_SAMPLED}


# The cross product. Datasets by name, samplings as functions of the dataset.

DATASETS = {
    "tensors": data.tensors,
    "records": data.records,
    "noisy": data.Noisy,
    "arrays": data.Arrays,
    "whole": data.Whole,
    "points": data.Points,
}

SAMPLINGS = {
    "sequential": lambda d: {"batch_size": 4},
    "shuffled": lambda d: {"batch_size": 3, "shuffle": True, "drop_last": True},
    "shuffled_generator": lambda d: {"batch_size": 5, "shuffle": True, "generator": seeded(3)},
    "replacement": lambda d: {
        "sampler": RandomSampler(d, replacement=True, num_samples=37, generator=seeded(4)),
        "batch_size": 5,
        "prefetch_factor": 1,
    },
    "weighted": lambda d: {"sampler": WeightedRandomSampler(range(1, 18), 14), "batch_size": 4},
    "subset_random": lambda d: {
        "sampler": SubsetRandomSampler(range(1, 17, 2)),
        "batch_size": 3,
        "generator": seeded(5),
        "prefetch_factor": 4,
    },
    "distributed": lambda d: {"sampler": DistributedSampler(d, num_replicas=2, rank=1), "batch_size": 3},
    "batches": lambda d: {"batch_sampler": BatchSampler(RandomSampler(d), 4, drop_last=True)},
    "single": lambda d: {"batch_size": None, "sampler": RandomSampler(d, num_samples=11)},
}

STREAMS = {
    "sharded": streams.Sharded,
    "noisy_stream": streams.NoisyStream,
    "uneven": streams.Uneven,
    "declared": streams.Declared,
}

BATCHINGS = {
    "batched": {"batch_size": 3},
    "dropping": {"batch_size": 4, "drop_last": True, "generator": seeded(6)},
    "single": {"batch_size": None, "prefetch_factor": 1},
}


def sampled(dataset, sampling):
    built = dataset()
    return {"dataset": built, **sampling(built)}


def streamed(dataset, batching):
    fresh = {"generator": seeded(6)} if "generator" in batching else {}
    return {"dataset": dataset(), **batching, **fresh}


for i, (dataset_name, dataset) in enumerate(DATASETS.items()):
    for j, (sampling_name, sampling) in enumerate(SAMPLINGS.items()):
        script = scripts.epochs(3 if (i + j) % 4 == 0 else 2)
        make = partial(sampled, dataset, sampling)
        in_sample = (i + j // 3) % 3 == 0  # of each dataset and of each sampling a third
        add(f"{dataset_name}-{sampling_name}", make=make, script=script, **settings_of(i, j, in_sample))

for i, (stream_name, stream) in enumerate(STREAMS.items()):
    for j, (batching_name, batching) in enumerate(BATCHINGS.items()):
        add(f"{stream_name}-{batching_name}", make=partial(streamed, stream, batching), **settings_of(i, j))


# Composed and degenerate datasets.

add("subset", "0 2", lambda: {"dataset": Subset(data.Noisy(), range(2, 17, 3)), "batch_size": 2, "shuffle": True})
add("subset_of_whole", "2p", lambda: {"dataset": Subset(data.Whole(), [5, 1, 9, 3]), "batch_size": 3})
add("concat", "1 3", lambda: {"dataset": ConcatDataset([data.Noisy(5), data.Noisy(9)]), "batch_size": 4})
add("stack_tuple", "0 2", lambda: {"dataset": StackDataset(data.tensors(), data.Points()), "batch_size": 4})
add("stack_dict", "2p", lambda: {"dataset": StackDataset(a=data.records(), b=data.Noisy()), "shuffle": True})
add(
    "chain",
    "0 2 3p",
    lambda: {"dataset": ChainDataset([streams.Sharded(7), streams.Sharded(4)]), "batch_size": 3},
)
add("datapipe", "0 2 2p", lambda: {"dataset": streams.datapipe(), "batch_size": 3, "shuffle": True})
add("range", "2", lambda: {"dataset": range(9), "batch_size": 4})
add("empty", "0 2 2p", lambda: {"dataset": []})
add("empty_tensors", "3", lambda: {"dataset": TensorDataset(torch.empty(0, 2)), "batch_size": 2}, sample=NOT_SAMPLED)
add("empty_shuffled", "2", lambda: {"dataset": [], "shuffle": True}, sample=NOT_SAMPLED)
add("empty_stream", "0 2 2p", lambda: {"dataset": streams.Uneven((0, 0, 0)), "batch_size": 2})
add("fewer_than_a_batch", "2p", lambda: {"dataset": data.records(3), "batch_size": 4, "drop_last": True})
add("fewer_than_workers", "3 3p", lambda: {"dataset": data.Noisy(2)})
add("locally_defined", "2", lambda: {"dataset": data.local_dataset(), "batch_size": 5})

# What a batch can hold.

add("kinds", "0 2 3p", lambda: {"dataset": data.Kinds(9), "batch_size": 4})
add("kinds_single", "2", lambda: {"dataset": data.Kinds(5), "batch_size": None})
add("views", "0 2 2p", lambda: {"dataset": data.Views(5), "batch_size": None, "collate_fn": lambda sample: sample})
add("exotic", "0 2 2p", lambda: {"dataset": data.Exotic(4), "batch_size": None})
add("views_of_one", "0 2", lambda: {"dataset": data.tensors(), "batch_size": 4, "collate_fn": calls.views_of_one})
add("dataclass", "0 3", lambda: {"dataset": data.Noisy(), "batch_size": 4, "collate_fn": calls.to_samples})
add("strings", "2", lambda: {"dataset": ["", "a", "ü" * 40, "\0"] * 3, "batch_size": 5, "shuffle": True})
add("numbers", "2p", lambda: {"dataset": [0.1, -0.0, float("nan"), 1e300] * 3, "batch_size": 5})
add("booleans", "1", lambda: {"dataset": [True, False] * 4, "batch_size": 3})
add("one_big", "2", lambda: {"dataset": TensorDataset(torch.arange(240_000.0).reshape(6, -1)), "batch_size": 2})

for kind in data.Stacking.KINDS:
    add(
        f"stacking_{kind.replace(' ', '_')}",
        "0 2",
        lambda kind=kind: {"dataset": data.Stacking(kind, 9), "batch_size": 4, "prefetch_factor": 1},
    )

# Collate functions.

add("collate_lambda", "0 2p", lambda: {"dataset": data.Points(), "batch_size": 3, "collate_fn": lambda b: b[::-1]})
add("collate_function", "1 3p", lambda: {"dataset": data.Noisy(), "batch_size": 3, "collate_fn": calls.to_tuple})
add("collate_object", "2 2p", lambda: {"dataset": data.records(), "collate_fn": calls.Scaling(), "batch_size": 3})
add(
    "collate_partial",
    "2",
    lambda: {"dataset": data.Noisy(), "batch_size": 3, "collate_fn": partial(calls.with_options, scale=3)},
)


def bound_collate():
    dataset = data.Growing()
    return {"dataset": dataset, "batch_size": 4, "collate_fn": dataset.pad}


add("collate_bound", "0 2 2p", bound_collate)
add("collate_changed", "2 2p", lambda: {"dataset": data.Noisy(), "batch_size": 6}, script=scripts.change_collate)
add(
    "collate_map_extended",
    "0 2 2p",
    lambda: {"dataset": data.Monies(), "batch_size": 4},
    contexts=(scripts.extended_collate_map,),
)
add(
    "collate_map_extended_tensors",
    "2",
    lambda: {"dataset": data.tensors(), "batch_size": 4, "collate_fn": default_collate},
    contexts=(scripts.extended_collate_map,),
)
add(
    "convert_map_extended",
    "2",
    lambda: {"dataset": data.tensors(), "batch_size": None},
    contexts=(scripts.extended_collate_map,),
)

# Workers: init functions, facts, surroundings, state.

add(
    "init_reseeds",
    "1 2 3p",
    lambda: {"dataset": data.Noisy(), "batch_size": 3, "worker_init_fn": calls.reseed},
    script=scripts.epochs(3),
)
add("init_draws", "2 2p", lambda: {"dataset": data.Noisy(), "batch_size": 3, "worker_init_fn": calls.draw_once})
add(
    "init_lambda",
    "2",
    lambda: {"dataset": data.Noisy(), "worker_init_fn": lambda worker: torch.manual_seed(worker)},
    sample=NOT_SAMPLED,
)
add(
    "init_splits",
    "2 3p",
    lambda: {"dataset": streams.ShardedByInit(), "batch_size": 2, "worker_init_fn": calls.split_range},
)


def bound_init():
    dataset = data.Stateful()
    return {"dataset": dataset, "batch_size": 3, "worker_init_fn": dataset.prepare}


add("init_bound", "2 3p", bound_init)
add("init_unused", "0", lambda: {"dataset": data.Noisy(), "worker_init_fn": calls.fail_to_start})


def facts(**options):
    return {"dataset": data.Facts(6), "collate_fn": calls.as_is, "batch_size": 2, **options}


def surroundings():
    return facts(dataset=data.Surroundings(6))


add("facts", "0 1 2 3p", facts)
add("facts_single", "2", lambda: facts(batch_size=None), sample=NOT_SAMPLED)
add("surroundings", "0 2 2p", surroundings, script=scripts.surroundings, actors=None)
add("affinity", "2 2p", surroundings, script=scripts.affinity, actors=None)
add("settings", "0 2 2p", surroundings, script=scripts.settings, actors=None)
add("settings_of_libraries", "2p", facts, script=scripts.settings, actors="spawn", sample={"2p"})
add("modes", "0 2 2p", facts, script=scripts.modes, actors="spawn")
add("default_dtype", "0 2 2p", facts, script=scripts.default_dtype, actors="spawn")
add(
    "default_dtype_collated",
    "2",
    lambda: {"dataset": data.Noisy(), "batch_size": 4},
    script=scripts.default_dtype,
    actors="spawn",
)
add("own_state", "0 2 2p", lambda: {"dataset": data.Stateful(), "batch_size": 3}, script=scripts.epochs(3))
add("own_generator", "0 2 2p", lambda: {"dataset": data.OwnGenerator(), "batch_size": 3})
add("dataset_changed", "0 2 2p", lambda: {"dataset": data.Stateful(), "batch_size": 3}, scripts.change_dataset)
add("private_writes", "0 2 2p", lambda: {"dataset": data.PrivateWrites(), "batch_size": 3})
add("nested_loader", "0 2", lambda: {"dataset": data.NestedLoader(6), "batch_size": 2})

# A state of their own, in datasets and samplers: objects that go on have another salt until they have loaded it.


def salted(name, on, make, **options):
    """A case of three epochs, whose objects that go on are made with another salt."""
    settings = on.split()
    for setting in settings:
        again = partial(build, partial(make, 4), setting)
        add(name, setting, partial(make, 3), scripts.epochs(3), sample={setting}, again=again, **options)


def with_noise(**options):
    return {"dataset": data.Noisy(stateful.LENGTH), "batch_size": 3} | options


salted("counting_map", "0 2 3p", lambda salt: {"dataset": stateful.Counting(salt), "batch_size": 3})
salted("late_map", "2 2p", lambda salt: {"dataset": stateful.LateMap(salt), "batch_size": 3})
salted("stateful_stream", "0 1 2p", lambda salt: {"dataset": stateful.StatefulStream(salt), "batch_size": 3})
salted("late_stream", "2 2p", lambda salt: {"dataset": stateful.LateStream(salt), "batch_size": 3})
salted("late_stream_keeps", "2 3p", lambda salt: {"dataset": stateful.LateStream(salt, keeps=True), "batch_size": 3})
salted(
    "stream_of_iterators", "0 2 2p", lambda salt: {"dataset": stateful.StreamOfStatefulIterators(salt), "batch_size": 3}
)
salted("stateful_sampler", "0 2 2p", lambda salt: with_noise(sampler=stateful.StatefulSampler(salt)))
salted(
    "sampler_of_iterators",
    "0 2",
    lambda salt: with_noise(sampler=stateful.SamplerOfStatefulIterators(salt), batch_size=None),
)
salted(
    "stateful_batch_sampler",
    "0 2 2p",
    lambda salt: {"dataset": stateful.Noise(), "batch_sampler": stateful.StatefulBatchSampler(salt)},
)
salted("shuffled_stream", "0 2 2p", lambda salt: {"dataset": stateful.Shuffled(), "batch_size": 3})
salted("buffered_stream", "2 3p", lambda salt: {"dataset": stateful.Buffered(), "batch_size": 3, "drop_last": True})
salted("own_generators", "0 2 2p", lambda salt: {"dataset": stateful.OwnGenerators(), "batch_size": 3})
salted("counting_sampler", "0 2p", lambda salt: with_noise(sampler=stateful.Counts()))
salted("lazy_generators", "0 2", lambda salt: with_noise(sampler=stateful.Lazy()))


def batches_that_ask():
    dataset = stateful.MapThatAsks()
    sampler = stateful.SamplerThatAsks(dataset)
    return {"dataset": dataset, "batch_sampler": stateful.BatchSamplerThatAsks(sampler, 3, False)}


add("raising_map", "0 2p", lambda: {"dataset": stateful.Faulty(), "batch_size": 3})
add("reseeding", "2 2p", lambda: {"dataset": stateful.Reseeds(), "batch_size": 3})
add("stream_that_asks", "0 2", lambda: {"dataset": stateful.StreamThatAsks(), "batch_size": 3})
add("batches_that_ask", "0 2", batches_that_ask)

# What torch's loader does not know: compared with our own undisturbed run (disturbances.py).

OWN: list[Case] = []


def own(name, on, make, **options):
    """A case for each worker setting."""
    for setting in on.split():
        OWN.append(Case(f"{name}-w{setting}", partial(build, make, setting), scripts.epochs(3), **options))


own("skipping_map", "2 2p", lambda: {"dataset": stateful.Faulty(), "batch_size": 3, "on_error": "skip"})
own(
    "skipping_stream",
    "2 2p",
    lambda: {"dataset": stateful.StreamOfStatefulIterators(faulty=True), "batch_size": 3, "on_error": "skip"},
)
own("batch_seeds", "1 2 3p", lambda: with_noise(seeding="batch", shuffle=True))
own(
    "batch_seeds_stream",
    "2 3p",
    lambda: {"dataset": stateful.Shuffled(), "batch_size": 3, "seeding": "batch"},
)
own(
    "dynamic",
    "2 3p",
    lambda: with_noise(seeding="batch", scheduling="dynamic", shuffle=True),
)
for kind, indices in {"list": [0, 0], "array": np.zeros(2, np.int64), "tensor": torch.zeros(2, dtype=int)}.items():
    own(
        f"overwritten_{kind}",
        "2" if kind == "list" else "2p",
        lambda indices=indices: {"dataset": data.Noisy(), "batch_sampler": calls.OverwritesItsIndices(indices)},
    )
own("skipped_steps", "2 2p", lambda: with_noise(shuffle=True, skip_steps=[1, (1, 2)]))

# Samplers of the user's own, and when they are asked.

for setting, prefetch in (("0", None), ("1", 1), ("2", None), ("2p", 4), ("3", 2)):
    add(
        f"lazy_sampler-{prefetch}",
        setting,
        lambda prefetch=prefetch: {
            "dataset": data.Noisy(),
            "sampler": calls.LazyRandom(17, 14),
            "batch_size": 3,
            "prefetch_factor": prefetch,
        },
        script=scripts.draw_between_batches,
        sample={"0", "2", "2p"},
    )

add("eager_sampler", "0 2 2p", lambda: {"dataset": data.Noisy(), "sampler": calls.EagerRandom(17), "batch_size": 4})
add("eager_batches", "0 1p 2 3p", lambda: {"dataset": data.Noisy(), "batch_sampler": calls.EagerBatches(17)})
add("batch_list", "0 2p", lambda: {"dataset": data.Noisy(), "batch_sampler": [[3, 1], [2], [0, 16, 5, 5]]})
add("batch_tensors", "0 2", lambda: {"dataset": data.Echo(), "batch_sampler": torch.arange(8).reshape(4, 2)})
add("batch_tuples", "2", lambda: {"dataset": data.Whole(), "batch_sampler": [(3, 1), (2,), (0, 16)]})
add(
    "batch_generator",
    "0 2",
    lambda: {"dataset": data.Noisy(), "batch_sampler": ([i, i + 1] for i in range(0, 12, 2))},
)
add("batch_empty", "0 2", lambda: {"dataset": data.Noisy(), "batch_sampler": [[1], [], [2]]})
add("no_length", "0 2", lambda: {"dataset": data.Noisy(), "sampler": calls.NoLength(), "batch_size": 2})
add("sampler_list", "2", lambda: {"dataset": data.Noisy(), "sampler": [4, 4, 2, 0, 9], "batch_size": 2})
add(
    "sampler_of_names",
    "2",
    lambda: {"dataset": data.ByName(["a", "bb", "ccc"]), "sampler": ["ccc", "a", "bb", "a"], "batch_size": 2},
)
add(
    "sampler_of_tensors",
    "0 2",
    lambda: {"dataset": data.Echo(), "sampler": torch.arange(7), "batch_size": 2},
)
add(
    "sampler_of_objects",
    "2",
    lambda: {"dataset": data.Echo(), "sampler": [(1, "x"), {"a": [2.5]}, None, slice(2)], "batch_size": None},
)
add(
    "distributed_in_order",
    "2p",
    lambda: {
        "dataset": data.Noisy(),
        "sampler": DistributedSampler(range(17), num_replicas=2, rank=0, shuffle=False, drop_last=True),
        "batch_size": 2,
    },
)
add(
    "weighted_generator",
    "2",
    lambda: {
        "dataset": data.Noisy(),
        "sampler": WeightedRandomSampler([0.1] * 17, 10, replacement=False, generator=seeded(8)),
        "batch_size": 3,
    },
)
add(
    "index_batches_as_samples",
    "2",
    lambda: {
        "dataset": data.tensors(),
        "sampler": BatchSampler(SequentialSampler(range(17)), 5, drop_last=False),
        "batch_size": None,
    },
)
for good in (0, 3, 9, 14):
    add(
        f"sampler_fails-{good}",
        {0: "0 2", 3: "2p", 9: "0 2", 14: "3"}[good],
        lambda good=good: {"dataset": data.Noisy(), "sampler": calls.FailingSampler(17, good), "batch_size": 2},
        sample={"0", "2p", "3"},
    )
add(
    "sampler_raises_once",
    "0 2 2p",
    lambda: {"dataset": data.Noisy(), "sampler": calls.RaisesOnce(17, 9), "batch_size": None},
)

add(
    "shared_cache",
    "0 1 2 2p",
    lambda: {"dataset": data.SharedCache(), "batch_size": 3},
    script=scripts.shared_cache,
)

# Prefetching, abandoned and interleaved iterators.


def shuffled_noise(**options):
    return {"dataset": data.Noisy(26), "batch_size": 2, "shuffle": True, **options}


for setting, prefetch in (("1", 1), ("1p", 2), ("2", 4), ("2p", 1), ("2p", 2), ("3p", 4)):
    add(
        f"abandoned-{prefetch}",
        setting,
        partial(shuffled_noise, prefetch_factor=prefetch),
        script=scripts.abandon(2, None, 5, 0, None),
        sample={setting} if (setting, prefetch) in (("1p", 2), ("2", 4), ("2p", 1)) else NOT_SAMPLED,
    )
add("abandoned_unset", "0 2", partial(shuffled_noise, generator=None), script=scripts.abandon(2, None, 1, None))
add(
    "abandoned_without_noise",
    "2 3p",
    lambda: {"dataset": data.tensors(40), "batch_size": 2, "shuffle": True, "generator": seeded(2)},
    script=scripts.abandon(3, None, 1, 0, None),
)
add(
    "abandoned_replacement",
    "0 2",
    lambda: {
        "dataset": data.tensors(40),
        "batch_size": 4,
        "sampler": RandomSampler(range(40), replacement=True, num_samples=100, generator=seeded(2)),
    },
    script=scripts.abandon(3, None, 9, None),
)
add(
    "abandoned_at_the_end",
    "2p",
    lambda: shuffled_noise(prefetch_factor=2, generator=seeded(1)),
    script=scripts.abandon(13, 12, None),
)
add(
    "abandoned_endless",
    "0 1 2p 3p",
    lambda: {"dataset": streams.Endless(), "batch_size": 2, "prefetch_factor": 2},
    script=scripts.abandon(5, 7, 0, 4),
)
add(
    "abandoned_lazy_sampler",
    "2 2p",
    lambda: {"dataset": data.Noisy(), "sampler": calls.LazyRandom(17, 17), "batch_size": 2, "prefetch_factor": 2},
    script=scripts.abandon(2, None),
)
add("abandoned_holding", "2 2p", partial(shuffled_noise, prefetch_factor=2), script=scripts.abandon_holding)
add("interleaved", "0 1 2 3", partial(shuffled_noise, prefetch_factor=2), scripts.interleave, sample={"0", "2"})
add(
    "interleaved_generator",
    "0 2",
    lambda: shuffled_noise(prefetch_factor=1, generator=seeded(1)),
    script=scripts.interleave,
)
add(
    "interleaved_unset",
    "2",
    lambda: shuffled_noise(generator=seeded(1)),
    script=scripts.interleave,
    sample=NOT_SAMPLED,
)
add(
    "interleaved_streams",
    "2",
    lambda: {"dataset": streams.NoisyStream(), "batch_size": 2},
    script=scripts.interleave,
)
add("same_iterator", "1p 2p", partial(shuffled_noise, prefetch_factor=2), script=scripts.same_iterator)
add("loop_draws", "0 2 2p", partial(shuffled_noise, prefetch_factor=2), script=scripts.draw_between_batches)
add(
    "loop_draws_from_loader",
    "2",
    lambda: shuffled_noise(prefetch_factor=2, generator=seeded(1)),
    script=scripts.draw_between_batches,
    sample=NOT_SAMPLED,
)
add(
    "loop_draws_from_loader_unset",
    "2",
    lambda: {"dataset": data.tensors(40), "batch_size": 2, "shuffle": True, "generator": seeded(1)},
    script=scripts.draw_between_batches,
)
add("loop_reseeds", "2", shuffled_noise, script=scripts.reseed_between_batches)
add("prefetch_deep", "2", partial(shuffled_noise, prefetch_factor=20))

# What the loop changes of a sampler in mid-epoch.

CHANGED_SIZES = scripts.change_while_drawing((20, scripts.set_batch_size(7)), (25, scripts.set_batch_size(2)))


def changed(sampler=None, length=400, **options):
    return {
        "dataset": data.Noisy(length),
        "batch_size": 4,
        "sampler": sampler and sampler(),
        "prefetch_factor": 2,
        **options,
    }


add("batch_size_changes", "0 1 2 2p 3", changed, CHANGED_SIZES, sample={"0"})
add("batch_size_changes_shuffled", "2", lambda: changed(shuffle=True, generator=seeded(1)), CHANGED_SIZES)
add(
    "batch_size_changes_drop_last",
    "2",
    partial(changed, drop_last=True, prefetch_factor=None),
    CHANGED_SIZES,
    sample=NOT_SAMPLED,
)
add("batch_size_changes_pinned", "1", partial(changed, pin_memory=True), CHANGED_SIZES, sample=NOT_SAMPLED)
add(
    "batch_size_changes_stream",
    "2",
    lambda: {"dataset": streams.NoisyStream(400), "batch_size": 4, "prefetch_factor": 2},
    CHANGED_SIZES,
    sample=NOT_SAMPLED,
)
add(
    "batch_size_changes_uneven_streams",
    "3",
    lambda: {"dataset": streams.Uneven((90, 150, 400)), "batch_size": 2, "prefetch_factor": 2},
    CHANGED_SIZES,
    sample=NOT_SAMPLED,
)
add(
    "subset_changes",
    "2 2p",
    partial(changed, lambda: SubsetRandomSampler(list(range(300)), generator=seeded(1))),
    scripts.change_while_drawing((20, scripts.reverse_subset)),
)
add(
    "subset_changes_single",
    "2",
    partial(changed, lambda: SubsetRandomSampler(list(range(200))), batch_size=None),
    scripts.change_while_drawing((40, scripts.reverse_subset)),
    sample=NOT_SAMPLED,
)

# Arguments that change nothing here.

add("pin_memory", "0 2", lambda: {"dataset": data.records(), "batch_size": 4, "pin_memory": True})
add("pin_memory_device", "2", lambda: {"dataset": data.records(), "pin_memory": True, "pin_memory_device": "cuda"})
add("timeout", "2", lambda: {"dataset": data.Noisy(), "batch_size": 4, "timeout": 60})
add("context", "2", lambda: {"dataset": data.Noisy(), "batch_size": 4, "multiprocessing_context": "fork"})

# in_order=False: with one worker the order is certain, with more the batches are.

add("any_order_single", "0 1 1p", partial(shuffled_noise, in_order=False))
add(
    "any_order",
    "2 3p",
    lambda: {"dataset": data.tensors(40), "batch_size": 3, "shuffle": True, "in_order": False},
    unordered=True,
)
add(
    "any_order_streams",
    "2 3p",
    lambda: {"dataset": streams.Uneven(), "batch_size": 2, "in_order": False, "drop_last": True},
    unordered=True,
)

add(
    "first_come",
    "1 2 3p",
    lambda: {"dataset": data.Located(40), "batch_size": 2, "in_order": False, "prefetch_factor": 6},
    script=scripts.first_come,
    sample=NOT_SAMPLED,
)
add(
    "first_come_streams",
    "1 2 3p",
    lambda: {"dataset": streams.Located(40), "batch_size": 2, "in_order": False, "prefetch_factor": 6},
    script=scripts.first_come,
)

# The consumer: writes into batches, iterates in a thread, asks past the end.

add("written_into", "0 2 2p", lambda: {"dataset": data.Points(), "batch_size": 3}, scripts.write_into_batches)
add(
    "written_into_big",
    "2",
    lambda: {"dataset": TensorDataset(torch.arange(240_000.0).reshape(6, -1)), "batch_size": 2},
    script=scripts.write_into_batches,
)
add("in_a_thread", "0 2 2p", partial(shuffled_noise, prefetch_factor=2), script=scripts.iterate_in_a_thread)
add("past_the_end", "0 2 2p", partial(shuffled_noise, prefetch_factor=2), script=scripts.past_the_end)

# Streams: declared lengths and their warning.

for kind in ("memory", "file"):
    add(
        f"shares_again_{kind}",
        "2 2p",
        lambda kind=kind: {"dataset": streams.SharesAgain(kind), "batch_size": 3},
        script=scripts.dataset_epochs,
    )
add(
    "hugging_face_stream",
    "0 2p",
    lambda: {"dataset": streams.hugging_face(), "batch_size": 3},
    script=scripts.dataset_epochs,
    sample={"0"},  # workers import a large package for it
)

for declared in (5, 19, 30):
    add(
        f"declared_{declared}",
        {5: "0 2 2p", 19: "1", 30: "3"}[declared],
        lambda declared=declared: {"dataset": streams.Declared(19, declared), "batch_size": 2},
    )
add("declared_single", "0 2", lambda: {"dataset": streams.Declared(19, 7), "batch_size": None})
add("declared_not_sharded", "2", lambda: {"dataset": streams.Declared(7, 7, sharded=False), "batch_size": None})
add("uneven_start", "3 3p", lambda: {"dataset": streams.Uneven((0, 7, 2)), "batch_size": 2})
add("uneven_only_one", "3 3p", lambda: {"dataset": streams.Uneven((0, 9, 0)), "batch_size": 2})

# Errors. Iteration goes on after them; the draws show that the worker is where torch's is.


def failing(how, **options):
    return {"dataset": data.Failing(how), "batch_size": 2, "prefetch_factor": 2, **options}


for how, settings in {
    "value": "0 1 2 2p 3p",
    "key": "0 2 2p",
    "lookup": "2",
    "two arguments": "0 2p",
    "message": "2",
    "chained": "2",
    "file": "2",
    "unicode": "2",
    "local": "0",
    "assertion": "3",
}.items():
    sample = (
        NOT_SAMPLED if how in ("file", "unicode", "assertion") else None
    )  # tests/unit/test_caught.py has their like
    add(f"fails_{how.replace(' ', '_')}", settings, partial(failing, how), sample=sample)
for which in "own", "library":
    add(f"fails_oddly_{which}", "0 2", partial(lambda which: {"dataset": data.Odd(which), "batch_size": None}, which))
add("fails_single", "2p", lambda: failing("value", batch_size=None))
add("fails_shuffled", "2", lambda: failing("value", shuffle=True, generator=seeded(1)))
add("stop_iteration", "0 2 2p", lambda: failing("stop"), script=scripts.past_the_end)
add("fails_abandoned", "2p", lambda: failing("value"), script=scripts.abandon(4, None))
add("collate_fails", "0 2 2p", lambda: {"dataset": data.Noisy(), "batch_size": 3, "collate_fn": calls.fail_on_seven})
add("unequal_shapes", "0 2", lambda: {"dataset": data.Growing(), "batch_size": 3})
add("unsupported_type", "0 2", lambda: {"dataset": data.Unsupported(), "batch_size": 3})
add(
    "init_fails",
    "1 2",
    lambda: {"dataset": data.Noisy(), "batch_size": 3, "worker_init_fn": calls.fail_to_start},
    script=scripts.first_errors(1),
)
add("stream_fails", "0 2 2p", lambda: {"dataset": streams.FailingGenerator(), "batch_size": 2})
add("stream_fails_single", "2", lambda: {"dataset": streams.FailingGenerator("key"), "batch_size": None})
add("stream_stops_inside", "2", lambda: {"dataset": streams.FailingGenerator("stop"), "batch_size": 2})
add("stream_goes_on", "0 2 2p", lambda: {"dataset": streams.FailingIterator(), "batch_size": 2})
add("stream_does_not_start", "1", lambda: {"dataset": streams.FailingStart()}, script=scripts.first_errors(1))
# No tensors travel here: torch could not fetch those of a process that is gone.
add(
    "exits",
    "2",
    lambda: {"dataset": data.Failing("exit", at=(0,)), "collate_fn": lambda batch: batch},
    script=scripts.until_an_error,
)

NAMES = [case.name for case in [*CASES, *OWN]]
assert len(set(NAMES)) == len(NAMES), "two cases of one name"
