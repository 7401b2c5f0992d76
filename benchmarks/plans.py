"""Plans beside what other libraries have for the same: batches by tokens, packs, mixtures.

Motive: a plan knows all lengths, and streams with buffers do not; how much does that gain, and what does it cost?
Method: the same lengths for all, a log-normal of mean 500, cut to 1 to 4,096 tokens. Each way plans one epoch, in this
process, in turns; times are its CPU time, medians of the rounds. What is planned is measured by one program for all:
the padding of batches that are padded to their longest sample; the excess of the most expensive batch of a step over
the mean of 8 ranks, in padded tokens, which all ranks wait for; the use of the room of packs; and by how many samples
a source is at most off its share, at any step. lhotse's DynamicBucketingSampler gets the lengths as durations, 30
buckets and a buffer of 10,000; its steps are the batches of its 8 ranks' samplers. TRL packs tokens themselves, not
lengths, and so does Grain, with 64 open packs. With --large a plan of 100 million samples is made once, by each of our
plans, in a process of its own: CPU time and peak memory, in addition to that of the lengths.
Command: python benchmarks/plans.py [--rounds N] [--peers rayloader,trl] [--quick]; --large instead of these.
Results, where all peers are measured: benchmarks/results/plans.json.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import harness
import tables
from rayloader.plans import Mixture, Packing, TokenBudget

RESULTS = harness.RESULTS / "plans.json"
COMMAND = "python benchmarks/plans.py"
DOCUMENT = harness.ROOT / "docs" / "howto" / "batches.md"
SAMPLES, QUICK, LARGE = 20_000, 2_000, 100_000_000
BUDGET, SEQ_LEN, RANKS = 16_384, 4_096, 8
WEIGHTS = [0.6, 0.27, 0.13]
PACKAGES = {"lhotse": "lhotse", "trl": "trl", "grain": "grain"}
HEADERS = {
    "budget": ("batches by tokens", "padding", "excess of a step", "CPU s"),
    "packs": ("packs", "use of the room", "packs", "CPU s"),
    "mixture": ("mixture", "furthest off a share, samples", "CPU s"),
}
LARGE_HEADER = ("100 million samples", "CPU s", "GB")

Lengths = Any
Row = dict[str, Any]  # of one round


def lengths_of(count: int) -> Lengths:
    """A log-normal of mean 500, as of documents."""
    generator, lengths = np.random.default_rng(0), np.empty(count, np.int32)
    for begin in range(0, count, 1 << 20):
        part = lengths[begin : begin + (1 << 20)]
        part[:] = np.clip(generator.lognormal(np.log(500) - 0.5, 1, len(part)), 1, SEQ_LEN)
    return lengths


@contextlib.contextmanager
def timed(row: Row) -> Iterator[None]:
    """Adds the CPU time of the block."""
    begin = time.process_time()
    yield
    row["cpu"] = time.process_time() - begin


# --- batches by tokens: lengths in each batch, in steps of RANKS


def by_budget(lengths: Lengths, row: Row) -> list[Any]:
    with timed(row):
        batches = [*TokenBudget(lengths, BUDGET, num_replicas=RANKS)]
    return [lengths[batch] for batch in batches]


def by_size(lengths: Lengths, row: Row) -> list[Any]:
    """Of as many samples as fit if each is of mean length: torch's BatchSampler."""
    with timed(row):
        sampler = torch.utils.data.RandomSampler(lengths, generator=torch.Generator().manual_seed(0))
        batches = [*torch.utils.data.BatchSampler(sampler, int(BUDGET / lengths.mean()), drop_last=True)]
    return [lengths[batch] for batch in batches]


def by_lhotse(lengths: Lengths, row: Row) -> list[Any]:
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    cuts = [MonoCut(id=str(number), start=0, duration=float(size), channel=0) for number, size in enumerate(lengths)]
    options = {"max_duration": float(BUDGET), "num_buckets": 30, "shuffle": True, "buffer_size": 10_000}
    with timed(row):
        parts = [
            [
                [cut.duration for cut in batch]
                for batch in DynamicBucketingSampler(
                    CutSet.from_cuts(cuts), world_size=RANKS, rank=rank, drop_last=False, **options
                )
            ]
            for rank in range(RANKS)
        ]
    row["cpu"] /= RANKS  # a rank makes its own
    return [np.array(batch) for step in zip(*parts, strict=True) for batch in step]


def measured_budget(lengths: Lengths, row: Row, plan: Callable[[Lengths, Row], list[Any]]) -> None:
    batches = plan(lengths, row)
    room = np.array([len(batch) * batch.max() for batch in batches])
    row["padding"] = 1 - sum(batch.sum() for batch in batches) / room.sum()
    steps = room[: len(room) // RANKS * RANKS].reshape(-1, RANKS)
    row["excess"] = (steps.max(axis=1) / steps.mean(axis=1)).mean() - 1


# --- packs: how many


def by_best_fit(lengths: Lengths, row: Row) -> int:
    with timed(row):
        return len([*Packing(lengths, SEQ_LEN)])


def by_concat(lengths: Lengths, row: Row) -> int:
    with timed(row):
        return len([*Packing(lengths, SEQ_LEN, algorithm="concat")])


def by_trl(lengths: Lengths, row: Row) -> int:
    import datasets
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    texts = datasets.Dataset.from_dict({"input_ids": [[0] * int(size) for size in lengths]})
    with timed(row):
        return len(pack_dataset(texts, SEQ_LEN, strategy="bfd", map_kwargs={"batch_size": len(lengths)}))


def by_grain_packs(lengths: Lengths, row: Row) -> int:
    import grain
    from grain.experimental import FirstFitPackIterDataset

    texts = grain.MapDataset.source([{"input_ids": np.zeros(size, np.int32)} for size in lengths]).shuffle(seed=0)
    with timed(row):
        packs = FirstFitPackIterDataset(
            texts.to_iter_dataset(), length_struct={"input_ids": SEQ_LEN}, num_packing_bins=64
        )
        return sum(1 for _ in packs)


def measured_packs(lengths: Lengths, row: Row, plan: Callable[[Lengths, Row], int]) -> None:
    row["packs"] = plan(lengths, row)
    row["use"] = float(lengths.sum() / (row["packs"] * SEQ_LEN))


# --- mixtures: the source of each sample


def by_mixture(count: int, row: Row) -> Any:
    with timed(row):
        drawn = [*Mixture([count] * len(WEIGHTS), WEIGHTS, epoch_size=count)]
    return np.array(drawn) // count


def by_chance(count: int, row: Row) -> Any:
    """A source is drawn for each sample: torch's WeightedRandomSampler."""
    with timed(row):
        return np.array(
            [*torch.utils.data.WeightedRandomSampler(WEIGHTS, count, generator=torch.Generator().manual_seed(0))]
        )


def by_grain_mix(count: int, row: Row) -> Any:
    import grain

    with timed(row):
        sources = [grain.MapDataset.range(number * count, (number + 1) * count) for number in range(len(WEIGHTS))]
        mixed = grain.MapDataset.mix([source.shuffle(seed=0) for source in sources], WEIGHTS)
        drawn = [mixed[place] for place in range(count)]
    return np.array(drawn) // count


def measured_mixture(lengths: Lengths, row: Row, plan: Callable[[int, Row], Any]) -> None:
    sources = plan(len(lengths), row)
    counts = np.cumsum(sources[:, None] == np.arange(len(WEIGHTS)), axis=0)
    row["off"] = float(np.abs(counts - np.arange(1, len(sources) + 1)[:, None] * WEIGHTS).max())


WAYS: dict[str, tuple[Any, dict[str, tuple[str, Any]]]] = {
    "budget": (
        measured_budget,
        {
            "rayloader": ("rayloader, TokenBudget", by_budget),
            "lhotse": ("lhotse, DynamicBucketingSampler", by_lhotse),
            "torch": ("torch, BatchSampler of a fixed size", by_size),
        },
    ),
    "packs": (
        measured_packs,
        {
            "rayloader": ("rayloader, Packing, best-fit", by_best_fit),
            "rayloader-concat": ("rayloader, Packing, concat: cuts samples", by_concat),
            "trl": ("TRL, pack_dataset, bfd", by_trl),
            "grain": ("Grain, FirstFitPackIterDataset", by_grain_packs),
        },
    ),
    "mixture": (
        measured_mixture,
        {
            "rayloader": ("rayloader, Mixture", by_mixture),
            "grain": ("Grain, MapDataset.mix", by_grain_mix),
            "torch": ("torch, WeightedRandomSampler", by_chance),
        },
    ),
}
PEERS = [*dict.fromkeys(peer for _, ways in WAYS.values() for peer in ways)]


def measure(options: harness.Options) -> dict[str, dict[str, Row]]:
    """By question and peer: the medians; a text where a peer can't be measured."""
    lengths = lengths_of(QUICK if options.quick else SAMPLES)
    peers = options.pick_peers(PEERS, quick=["rayloader", "torch"])
    found: dict[str, dict[str, list[Row]]] = {question: {} for question in WAYS}
    for number in range(options.rounds):
        for question, (measured, ways) in WAYS.items():
            for peer in harness.rotated([peer for peer in ways if peer in peers], number):
                harness.say(f"{question}: {peer}, round {number + 1} of {options.rounds}")
                row: Row = {}
                try:
                    measured(lengths, row, ways[peer][1])
                except ImportError as error:
                    row["missing"] = str(error)
                found[question].setdefault(peer, []).append(row)
    return {
        question: {
            peer: rows[0]
            if "missing" in rows[0]
            else {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            for peer, rows in of_peers.items()
        }
        for question, of_peers in found.items()
    }


def large(kind: str) -> Row:
    """One plan of 100 million samples, and all of it read that has to be made."""
    lengths = lengths_of(LARGE if kind != "mixture" else 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row: Row = {}
    with timed(row):
        if kind == "mixture":
            order = Mixture([LARGE, LARGE, LARGE], WEIGHTS, epoch_size=LARGE).order_for(RANKS)
            for place in range(0, LARGE, 1 << 19):
                order[place]
        else:
            plan: Any = TokenBudget(lengths, BUDGET) if kind == "budget" else Packing(lengths, SEQ_LEN, algorithm=kind)  # type: ignore[arg-type]
            plan.order_for(RANKS)[0]
    row["gigabytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
    return row


LARGE_KINDS = {
    "budget": "TokenBudget",
    "best-fit": "Packing, best-fit",
    "concat": "Packing, concat",
    "mixture": "Mixture, all of it, a part at a time",
}


def show(key: str, row: Row) -> str:
    """A cell."""
    if "missing" in row:
        return "-"
    value = row[key]
    return {"padding": f"{value:.1%}", "excess": f"{value:.1%}", "use": f"{value:.2%}", "packs": f"{value:,.0f}"}.get(
        key, f"{value:.2f}"
    )


def rows_of(question: str, rows: dict[str, Row]) -> list[list[str]]:
    """A table, with its header."""
    keys = {"budget": ("padding", "excess", "cpu"), "packs": ("use", "packs", "cpu"), "mixture": ("off", "cpu")}[
        question
    ]
    named = WAYS[question][1]
    return [[*HEADERS[question]], *([named[peer][0], *(show(key, row) for key in keys)] for peer, row in rows.items())]


def table(results: dict[str, Any]) -> str:
    """The tables of the document."""
    machine, settings = results["machine"], results["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    parts = [
        f"{settings['samples']:,} samples, of mean {settings['mean']:,.0f} tokens; a budget of {BUDGET:,}, packs of "
        f"{SEQ_LEN:,}, {RANKS} ranks; {machine['cpu']}, torch {machine['torch']}, {versions}; medians of "
        f"{settings['rounds']} rounds.",
        *(tables.markdown(rows_of(question, rows)) for question, rows in results["found"].items()),
    ]
    if results["large"]:
        rows = [
            [LARGE_KINDS[kind], f"{row['cpu']:.1f}", f"{row['gigabytes']:.2f}"]
            for kind, row in results["large"].items()
        ]
        parts.append(tables.markdown([[*LARGE_HEADER], *rows]))
    return "\n\n".join(parts)


def main() -> None:
    """Measures, prints and writes."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"large": {}}
    if sys.argv[1:] == ["--large"]:
        for kind in LARGE_KINDS:
            harness.say(f"100 million samples: {kind}")
            command = [sys.executable, __file__, "--kind", kind]
            known["large"][kind] = json.loads(
                subprocess.run(command, capture_output=True, check=True, text=True).stdout
            )
            print(kind, known["large"][kind])
        if "found" in known:
            write(known)
        return
    options, machine = harness.options(__doc__), harness.machine()
    found = measure(options)
    for question, rows in found.items():
        header, *others = rows_of(question, rows)
        harness.print_table(question, header, others)
    if not (options.peers or options.quick):
        lengths = lengths_of(SAMPLES)
        versions = {name: importlib.metadata.version(name) for name in PACKAGES.values()}
        settings = {"rounds": options.rounds, "samples": SAMPLES, "mean": float(lengths.mean()), "versions": versions}
        write({"machine": machine, "settings": settings, "found": found, "large": known["large"]})


def write(results: dict[str, Any]) -> None:
    """The results, and the tables in the document."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    tables.put(DOCUMENT, COMMAND, table(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--kind"]:
        print(json.dumps(large(sys.argv[2])))
    else:
        with harness.clean_exit():
            main()
