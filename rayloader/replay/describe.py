"""What a state is, in plain types and in words, and how two states differ.

Promise: pure functions. A description holds everything that is in a state: what is long or of no meaning to a reader
(generators, the states of the user's own objects) by its size and a checksum, so that states with equal descriptions
continue in the same way.
"""

from __future__ import annotations

import itertools
import json
import operator
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from rayloader.random.generator_kinds import set_state
from rayloader.random.packed import pack
from rayloader.random.random_state import RandomState
from rayloader.resume.checkpoint import fits_any_ranks, fits_any_workers
from rayloader.resume.state import VERSION, LocalState, SavedWorker, State, Stream, as_saved, tasks_in

_MISSING = "-"
_MOST_TOLD = 4  # texts of one heading
# Attributes of samplers that other lines tell.
_TOLD_ELSEWHERE = {"name", "batch_size", "drop_last", "num_replicas", "rank", "num_samples", "total_size"}


class Difference(NamedTuple):
    """One value in which two descriptions differ.

    Attributes:
        name: where it is in them.
        a: the value in the first one.
        b: the value in the second one.
    """

    name: str
    a: Any
    b: Any


@as_saved()
def described(state: State) -> dict[str, Any]:
    """Everything that a state holds, in types that JSON knows."""
    fits = state.fits
    return {
        "version": VERSION,
        "bytes": len(json.dumps(state.pack(), default=str)),
        "loader": {
            "batch_size": fits.batch_size,
            "drop_last": fits.drop_last,
            "seeding": fits.seeding,
            "scheduling": fits.scheduling,
            "in_order": fits.in_order,
        },
        "dataset": {"kind": fits.dataset_kind, "length": fits.dataset_length, **_process(state.process)},
        "samplers": _samplers(state),
        "ranks": _ranks(state),
        "versions": {**state.versions},
        "skip_steps": [list(step) for step in state.skip_steps],
        "seeds": _seeds(state),
        "position": _position(state),
        "workers": _workers(state),
        "continues_on": {
            "no_workers": not state.num_workers or fits_any_workers(state),
            "workers": bool(state.num_workers) or fits_any_workers(state),
            "other_ranks": fits_any_ranks(state),
        },
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    """Where two descriptions differ, in their order: first what the loaders are, and then how far they are.

    When a worker's snapshot was taken depends on time, so workers with snapshots of other moments are compared by the
    batches alone that both states would build again.
    """
    ours, theirs = a["workers"]["each"], b["workers"]["each"]
    if len(ours) == len(theirs):
        pairs = [_comparable(*pair) for pair in zip(ours, theirs, strict=True)]
        a = {**a, "workers": {**a["workers"], "each": [pair[0] for pair in pairs]}}
        b = {**b, "workers": {**b["workers"], "each": [pair[1] for pair in pairs]}}
    follow = {"bytes": None, "continues_on": None}  # from the rest
    return [*unequal({**a, **follow}, {**b, **follow})]


def _comparable(a: dict[str, Any], b: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What can be compared of the descriptions of a worker in two states."""
    both = a["rebuilds"].keys() & b["rebuilds"].keys()
    digests = [{step: one["rebuilds"][step] for step in sorted(both, key=int)} for one in (a, b)]
    if a["snapshot_after_step"] != b["snapshot_after_step"]:
        a = b = {}
    return {**a, "rebuilds": digests[0]}, {**b, "rebuilds": digests[1]}


def unequal(a: Any, b: Any, name: str = "") -> Iterator[Difference]:
    """Where two values of types that JSON knows differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from unequal(a.get(key, _MISSING), b.get(key, _MISSING), f"{name}.{key}" if name else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and name != "skip_steps":
        for place, pair in enumerate(zip(a, b, strict=True)):
            yield from unequal(*pair, f"{name}[{place}]")
    elif a != b:
        yield Difference(name, a, b)


def relation(a: State, b: State) -> str:
    """In one sentence, how two states that differ relate to each other."""
    if a.fits._replace(rank=b.fits.rank) == b.fits != a.fits:
        return f"They are of different ranks, {a.fits.rank} and {b.fits.rank}"
    if a.fits != b.fits:
        return "They are of different loaders: neither's loader loads the other one"
    here, there = (one.position.begin if one.position is not None else None for one in (a, b))
    if a.epoch != b.epoch:
        return f"They are of different epochs, {a.epoch} and {b.epoch}; the seeds alone tell little then"
    if here is None or there is None or a.position is None or b.position is None:
        return f"Both are of epoch {a.epoch}, and at least one of them is from before its first batch"
    if here.base_seed != there.base_seed or _order(a) != _order(b):
        return f"Both are of epoch {a.epoch}, of runs that began it with other seeds or another order"
    steps = sorted([a.position.next_task, b.position.next_task])
    if steps[0] != steps[1]:
        return f"They are of the same epoch with the same seeds and order, at steps {steps[0]:,} and {steps[1]:,}"
    if a.position.checksum != b.position.checksum:
        return f"The same seeds began epoch {a.epoch}, but before step {steps[0]:,} the sampler gave other indices"
    return f"They are of the same epoch with the same seeds, the same order and at the same step, {steps[0]:,}"


# ---- the parts of a description


def _mark(content: Any) -> str:
    """A checksum, for what is too long to be shown."""
    return f"{zlib.crc32(content if isinstance(content, bytes) else repr(content).encode()):08x}"


def _opaque(content: bytes | None) -> dict[str, Any] | None:
    return None if content is None else {"bytes": len(content), "checksum": _mark(content)}


def _random(random: RandomState) -> dict[str, Any]:
    """The generators, by checksums of their states; torch's state also tells by which number it was seeded."""
    python, torch_, numpy, others, located = pack(random)
    named = {"python": python, "torch": torch_, "numpy": numpy}
    found: dict[str, Any] = {name: _mark(state) for name, state in named.items() if state is not None}
    if random.torch is not None:
        set_state(generator := torch.Generator(), random.torch)
        found["torch_seed"] = generator.initial_seed()
    if random.others:
        found["others"] = [_mark(state) for state in others[1:]]
    if random.located:
        found["found_in_objects"] = [_mark(one) for one in located]
    return found


def _position(state: State) -> dict[str, Any]:
    place = state.position
    found: dict[str, Any] = {
        "epoch": state.epoch,
        "between_epochs": state.is_between_epochs,
        "next_step": 0,
        "taken": state.taken,
    }
    if place is None:
        return found
    return {
        **found,
        "next_step": 0 if place.finished else place.next_task,
        "taken_ahead": list(place.ahead),
        "samples_skipped": place.skipped,
        "next_worker": place.next_worker,
        "draws": place.draws,
        "indices_checksum": f"{place.checksum:08x}",
        "drawn": place.drawn,
        "drawn_checksum": f"{place.drawn_checksum:08x}",
        "stream": _stream(place.stream),
    }


def _stream(stream: Stream | None) -> dict[str, Any] | None:
    if stream is None:
        return None
    begin = None if stream.begin is None else _random(stream.begin)
    return {"begin": begin, "state": _opaque(stream.told), "checksum": f"{stream.digest:08x}", "ended": stream.ended}


def _seeds(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {"now": _random(state.now)}
    if (begin := state.begin) is not None:
        found |= {"base_seed": begin.base_seed, "shared_seed": begin.shared_seed, "epoch_of_workers": begin.epoch}
        found["order"] = _order(state)
    return found


def _order(state: State) -> list[str]:
    """Checksums of the points of the epoch from which the sampler can be read again."""
    starts = () if state.begin is None else state.begin.starts
    return [_mark(((pack(start.moment.random), start.moment.attributes), *start[1:4])) for start in starts]


def _samplers(state: State) -> list[dict[str, Any]]:
    """The samplers, the outermost first; the state of their own is the first one's that has one."""
    names = state.fits.sampler.split(" of ")
    found = [{"name": name, **simple} for name, simple in zip(names, state.sampler.attributes, strict=True)]
    if state.sampler.own is not None:
        found.append({"state": _opaque(state.sampler.own)})
    return found


def _process(process: LocalState | None) -> dict[str, Any]:
    if process is None:
        return {}
    return {"generators": _random(process.random), "state": _opaque(process.dataset)}


def _workers(state: State) -> dict[str, Any]:
    place = state.position
    return {
        "num_workers": state.num_workers,
        "remember": state.num_workers > 0 and place is not None and place.remembers,
        "each": [] if place is None else [_worker(one) for one in place.workers],
    }


def _worker(worker: SavedWorker) -> dict[str, Any]:
    snapshot = worker.start.state
    found: dict[str, Any] = {
        "snapshot_after_step": None if snapshot is None else snapshot.last_task,
        "rebuilds": {f"{step}": f"{digest:08x}" for step, digest in tasks_in(worker.replay)},
    }
    if snapshot is not None:
        found |= {
            "tasks": snapshot.tasks,
            "exhausted": snapshot.exhausted,
            "generators": _random(snapshot.random),
            "dataset": _opaque(snapshot.dataset),
            "iterator": _opaque(snapshot.iterator),
        }
    if worker.start.before is not None:
        found["from_epoch_before"] = _mark([getattr(one, "task_id", one) for one in worker.start.before.entries])
    return found


def _ranks(state: State) -> dict[str, Any] | None:
    fits = state.fits
    if fits.num_replicas is None:
        return None
    stages = [] if state.begin is None else [len(stage.taken) for stage in state.begin.stages]
    return {"num_replicas": fits.num_replicas, "rank": fits.rank, "began_with": stages}


# ---- in words


def in_words(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A description of one state, as pairs of a heading and a text."""
    loader, dataset, workers, ranks = found["loader"], found["dataset"], found["workers"], found["ranks"]
    kind = "an iterable dataset" if dataset["kind"] == "iterable" else "a map-style dataset"
    size = "" if dataset["length"] is None else f" of {_number(dataset['length'], 'sample')}"
    batch_size = found["samplers"][0].get("batch_size") if loader["batch_size"] is None else loader["batch_size"]
    each = f"batches of {batch_size:,}" if isinstance(batch_size, int) else "batches as its sampler gives them"
    drops = ", without an incomplete last one" if loader["drop_last"] else ""
    rows = [
        ("position", _position_in_words(found)),
        ("skip_steps", steps_in_words(found["skip_steps"])),
        ("dataset", f"{kind}{size}, in {each}{drops}"),
        ("samplers", " of ".join(map(_sampler_in_words, found["samplers"]))),
        ("seeds", _seeds_in_words(found)),
        ("workers", _workers_in_words(workers, loader)),
        ("ranks", "not one of several ranks" if ranks is None else _ranks_in_words(ranks)),
        ("continues on", _continues_in_words(found)),
        ("saved with", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("state", f"version {found['version']}, {found['bytes'] / 1000:,.1f} kB as JSON"),
    ]
    return [(name, text) for name, text in rows if text]


def together_in_words(states: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """The same of the states of all ranks: what is the same in several is told once."""
    rows = [dict(in_words(found)) for found in states]
    texts = {}
    for heading in dict.fromkeys(heading for row in rows for heading in row):
        ranks: dict[str, list[int]] = {}
        for rank, row in enumerate(rows):
            ranks.setdefault(row.get(heading, "none"), []).append(rank)
        told = [f"{'ranks' if len(some) > 1 else 'rank'} {_runs(some)}: {text}" for text, some in ranks.items()]
        others = len(told) - _MOST_TOLD
        told = told[:_MOST_TOLD] + ([f"and {others} more, see --json"] if others > 0 else [])
        texts[heading] = next(iter(ranks)) if len(ranks) == 1 else "\n".join(told)
    last, first = len(states) - 1, states[0]
    texts["ranks"] = f"0 to {last}, of one loader"
    texts["state"] = (
        f"version {first['version']}, {sum(one['bytes'] for one in states) / 1000:,.1f} kB together as JSON"
    )
    changes = "any number of ranks" if first["continues_on"]["other_ranks"] else f"as many ranks, {last + 1}"
    texts["continues on"] = f"{_workers_to_continue_on(first)}; all together on {changes}"
    return [*texts.items()]


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers, with those that are consecutive in one."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


def _position_in_words(found: dict[str, Any]) -> str:
    place = found["position"]
    if place["between_epochs"]:
        return f"epoch {place['epoch']:,} comes next"
    text = f"epoch {place['epoch']:,}, {place['taken']:,} batches taken; step {place['next_step']:,} comes next"
    if ahead := place.get("taken_ahead"):
        text += f" (step {', '.join(map(str, ahead))} taken already)"
    if skipped := place.get("samples_skipped"):
        text += f"; {_number(skipped, 'sample')} skipped"
    return text


def steps_in_words(steps: Sequence[Sequence[int]]) -> str:
    """Pairs of an epoch and a step, in order."""
    epochs = itertools.groupby(steps, key=operator.itemgetter(0))
    return "; ".join(f"epoch {epoch}: {_runs([step for _, step in some])}" for epoch, some in epochs)


def _sampler_in_words(sampler: dict[str, Any]) -> str:
    if "name" not in sampler:
        return f"a state of their own ({sampler['state']['bytes']:,} bytes)"
    shown = {name: value for name, value in sampler.items() if name not in _TOLD_ELSEWHERE and value is not None}
    attributes = ", ".join(f"{name}={value!r}" for name, value in shown.items())
    return f"{sampler['name']}({attributes})" if attributes else f"{sampler['name']}"


def _seeds_in_words(found: dict[str, Any]) -> str:
    seeds = found["seeds"]
    text = f'seeding="{found["loader"]["seeding"]}"'
    if "base_seed" in seeds:
        text += f"; the epoch's base seed is {seeds['base_seed']}"
    if (seed := seeds["now"].get("torch_seed")) is not None:
        text += f"; torch's generator was seeded with {seed}"
    if others := seeds["now"].get("others"):
        text += f"; {_number(len(others), 'generator')} of loader and samplers"
    return text


def _workers_in_words(workers: dict[str, Any], loader: dict[str, Any]) -> str:
    if not workers["num_workers"]:
        return "none: the program itself builds the batches"
    text = _number(workers["num_workers"], "worker") + f', scheduling="{loader["scheduling"]}"'
    if not loader["in_order"]:
        text += ", in_order=False"
    if rebuilt := sum(len(worker["rebuilds"]) for worker in workers["each"]):
        text += f"; when resumed, at most {rebuilt} of the batches taken are built again"
    if workers["remember"]:
        text += "; they keep state or generators of the dataset's own"
    return text


def _ranks_in_words(ranks: dict[str, Any]) -> str:
    text = f"rank {ranks['rank']} of {ranks['num_replicas']}"
    if ranks["began_with"]:
        text += f"; the epoch began with {' and then '.join(map(str, ranks['began_with']))} ranks"
    return text


def _continues_in_words(found: dict[str, Any]) -> str:
    text, ranks = _workers_to_continue_on(found), found["ranks"]
    if ranks is None:
        return text
    number = "any number of" if found["continues_on"]["other_ranks"] else f"{ranks['num_replicas']}"
    return (
        f"{text}; on rank {ranks['rank']} of {ranks['num_replicas']}, or in the list of all ranks' states on each of "
        f"{number} ranks"
    )


def _workers_to_continue_on(found: dict[str, Any]) -> str:
    on, number = found["continues_on"], found["workers"]["num_workers"]
    if on["no_workers"] and on["workers"]:
        return "any num_workers, 0 too"
    if on["no_workers"]:
        return "num_workers=0 only"
    if found["position"]["between_epochs"]:
        return "any num_workers from 1 on"
    return f"any num_workers from 1 on, with the rest of this epoch as {_number(number, 'worker')} would build it"
