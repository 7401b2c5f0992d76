"""Plans beside what torch has for the same: batches by tokens, packs, mixtures.

Motive: a plan knows all lengths, and a sampler does not; how much does that gain, and what does it cost?
Method: the same lengths for all, a log-normal of mean 500, cut to 1 to 4,096 tokens. Each way plans one epoch, in this
process, in turns; times are its CPU time, medians of the rounds. Measured are the padding of batches that are padded to
their longest sample; the excess of the most expensive batch of a step over the mean of 8 ranks, in padded tokens, which
all ranks wait for; the use of the room of packs; and by how many samples a source is at most off its share, at any
step.
Command: python benchmarks/plans.py [--rounds N] [--quick]
Results: benchmarks/results/plans.json, and the tables in docs/howto/batches.md; those of --quick are only printed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Generator
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

import harness
import tables
from rayloader.plans import Mixture, Packing, TokenBudget

RESULTS = harness.RESULTS / "plans.json"
COMMAND = "python benchmarks/plans.py"
DOCUMENT = harness.ROOT / "docs" / "howto" / "batches.md"
SAMPLES, QUICK = 20_000, 2_000
BUDGET, SEQ_LEN, RANKS = 16_384, 4_096, 8
WEIGHTS = [0.6, 0.27, 0.13]

Lengths = Any
Row = dict[str, float]


def lengths_of(count: int) -> Lengths:
    """A log-normal of mean 500, as of documents."""
    drawn = np.random.default_rng(0).lognormal(np.log(500) - 0.5, 1, count)
    return np.clip(drawn, 1, SEQ_LEN).astype(np.int32)


# --- what is measured of a plan


def of_batches(lengths: Lengths, batches: list[list[int]]) -> Row:
    room = np.array([len(batch) * lengths[batch].max() for batch in batches])
    steps = room[: len(room) // RANKS * RANKS].reshape(-1, RANKS)
    tokens = sum(lengths[batch].sum() for batch in batches)
    return {"padding": 1 - tokens / room.sum(), "excess": (steps.max(axis=1) / steps.mean(axis=1)).mean() - 1}


def of_packs(lengths: Lengths, packs: list[Any]) -> Row:
    return {"use": float(lengths.sum() / (len(packs) * SEQ_LEN)), "packs": len(packs)}


def of_sources(lengths: Lengths, sources: list[int]) -> Row:
    counts = np.cumsum(np.array(sources)[:, None] == np.arange(len(WEIGHTS)), axis=0)
    return {"off": float(np.abs(counts - np.arange(1, len(sources) + 1)[:, None] * WEIGHTS).max())}


# --- the ways


def by_size(lengths: Lengths) -> Any:
    """Batches of as many samples as fit if each is of mean length."""
    sampler = RandomSampler(lengths, generator=Generator().manual_seed(0))
    return BatchSampler(sampler, int(BUDGET / lengths.mean()), drop_last=True)


def by_mixture(lengths: Lengths) -> Any:
    count = len(lengths)
    return (place // count for place in Mixture([count] * len(WEIGHTS), WEIGHTS, epoch_size=count))


def by_chance(lengths: Lengths) -> Any:
    """A source is drawn for each sample."""
    return WeightedRandomSampler(WEIGHTS, len(lengths), generator=Generator().manual_seed(0))


# By question: the columns with their formats, what is measured, and the ways, each of which gives what is planned.
QUESTIONS: dict[str, tuple[dict[str, tuple[str, str]], Callable[..., Row], dict[str, Callable[[Lengths], Any]]]] = {
    "batches by tokens": (
        {"padding": ("padding", ".1%"), "excess": ("excess of a step", ".1%"), "cpu": ("CPU s", ".2f")},
        of_batches,
        {
            "rayloader, TokenBudget": lambda lengths: TokenBudget(lengths, BUDGET, num_replicas=RANKS),
            "torch, BatchSampler of a fixed size": by_size,
        },
    ),
    "packs": (
        {"use": ("use of the room", ".2%"), "packs": ("packs", ",.0f"), "cpu": ("CPU s", ".2f")},
        of_packs,
        {
            "rayloader, Packing, best-fit": lambda lengths: Packing(lengths, SEQ_LEN),
            "rayloader, Packing, concat: cuts samples": lambda lengths: Packing(lengths, SEQ_LEN, algorithm="concat"),
        },
    ),
    "mixture": (
        {"off": ("furthest off a share, samples", ".2f"), "cpu": ("CPU s", ".2f")},
        of_sources,
        {"rayloader, Mixture": by_mixture, "torch, WeightedRandomSampler": by_chance},
    ),
}


def measure(options: harness.Options) -> dict[str, dict[str, Row]]:
    """By question and way: the medians."""
    lengths = lengths_of(QUICK if options.quick else SAMPLES)
    found: dict[str, dict[str, Row]] = {}
    for question, (columns, of_plan, ways) in QUESTIONS.items():
        rounds: dict[str, list[Row]] = {way: [] for way in ways}
        for number in range(options.rounds):
            for way in harness.rotated([*ways], number):
                harness.say(f"{way}, round {number + 1} of {options.rounds}")
                begin = time.process_time()
                planned = [*ways[way](lengths)]
                cpu = time.process_time() - begin
                rounds[way].append({**of_plan(lengths, planned), "cpu": cpu})
        found[question] = {
            way: {column: statistics.median(row[column] for row in rows) for column in columns}
            for way, rows in rounds.items()
        }
    return found


def rows_of(question: str, rows: dict[str, Row]) -> list[list[str]]:
    """A table, with its header."""
    columns = QUESTIONS[question][0]
    cells = [[way, *(format(row[key], of) for key, (_, of) in columns.items())] for way, row in rows.items()]
    return [[question, *(title for title, _ in columns.values())], *cells]


def table(results: dict[str, Any]) -> str:
    """The tables of the document."""
    machine, settings = results["machine"], results["settings"]
    caption = (
        f"{settings['samples']:,} samples, of mean {settings['mean']:,.0f} tokens; a budget of {BUDGET:,}, packs of "
        f"{SEQ_LEN:,}, {RANKS} ranks; {machine['cpu']}, torch {machine['torch']}; medians of "
        f"{settings['rounds']} rounds."
    )
    return "\n\n".join([caption, *(tables.markdown(rows_of(*found)) for found in results["found"].items())])


def main() -> None:
    """Measures, prints and writes."""
    options, machine = harness.options(__doc__, choice=False), harness.machine()
    found = measure(options)
    for question, rows in found.items():
        header, *others = rows_of(question, rows)
        harness.print_table(question, header, others)
    if not options.quick:
        settings = {"rounds": options.rounds, "samples": SAMPLES, "mean": float(lengths_of(SAMPLES).mean())}
        results = {"machine": machine, "settings": settings, "found": found}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        tables.put(DOCUMENT, COMMAND, table(results))


if __name__ == "__main__":
    with harness.clean_exit():
        main()
