"""What a loader gives when something happens in the middle of a run: the same batches, in all ways and from all points.

A story is a case, the way that its batches travel, what happens (disturbances.py), and where in the run. A sample has
one of each case, so that each disturbance meets each way and each kind of point; it is drawn by a seed, that of the
variable RAYLOADER_STORIES. A full run has every disturbance of each case.
"""

import os
import random

import pytest

from conformance_cases import CASES, OWN
from conformance_record import first_difference
from conformance_side import ALWAYS
from disturbances import EVERYWHERE, WITH_WORKERS, Run, chain, in_any_order, nothing, run_of, walk
from rayloader import DataLoader

SEED = int(os.environ.get("RAYLOADER_STORIES", "0"))
POINTS = (0, 0), (0, 1), (1, 0), (1, 2), (0, 99)  # epoch and step: before the first batch, later, at the end
LATER = (0, 3), (1, 3), (1, 4), (0, 99)  # each worker has given a batch: until then it is as its program makes it

# Where a run that is loaded again cannot be the same, and why.
NOT_THE_SAME = {
    "batch_generator": "a generator gives one epoch in one program, and a second one in another",
    "sampler_fails": "a sampler that has raised raises again where it is read again",
    "sampler_raises_once": "the same",
    "lazy_generators-w0": "without workers, samples draw from the generators that the sampler draws from",
    "own_state-w0": "without workers, what the dataset has counted is the program's to save",
    "private_writes-w0": "without workers, what the dataset has written is the program's to save",
}
# Counts how often it was iterated over: a state from before an epoch's first batch has nothing that would show it.
COUNTS = "noisy_stream"
# Whose batches depend on attributes of objects that nobody saves: they are the same, or an error.
HIDDEN = "collate_object", "init_bound", "own_state", "private_writes"


def stories():
    """Each case with each disturbance; in a sample with one."""
    chance, number = random.Random(SEED), 0
    for case in [*CASES, *OWN]:
        if case.contexts or not hasattr(case.script, "epochs"):
            continue
        if case.name.startswith(tuple(NOT_THE_SAME)):
            continue
        disturbances = EVERYWHERE if case.name.endswith("-w0") else WITH_WORKERS
        if case.name.startswith(COUNTS):
            disturbances = [happens for happens in disturbances if happens not in (chain, walk)]
        ways = ALWAYS if case.actors == "fork" else ("fork",)
        first, at = chance.randrange(30), chance.randrange(5)
        for place in range(len(disturbances)):
            happens, way = disturbances[(first + place) % len(disturbances)], ways[(first + number) % len(ways)]
            points = LATER if case.again is not None else POINTS
            point = points[(at + place) % len(points)]
            name = f"{case.name}-{way}-{happens.__name__}-{point[0]}.{point[1]}"
            yield pytest.param(case, way, happens, point, id=name, marks=pytest.mark.full if place or case.full else ())
            number += 1


@pytest.mark.filterwarnings("ignore::UserWarning")  # those that torch gives, too: see test_conformance.py
@pytest.mark.parametrize(("case", "lane", "happens", "point"), list(stories()), indirect=["lane"])
def test_the_batches_are_those_of_an_undisturbed_run(case, lane, happens, point, reference, ray_session):
    run = Run(case, DataLoader)
    events = run.play(happens, *point)
    undisturbed = Run(case, DataLoader).play(nothing, 0, 0) if case in OWN else reference[case.name]
    expected = run_of(undisturbed, run.compared)
    if case.name.startswith(HIDDEN):
        refused = [label for label, described in events if described.get("type") == "rayloader.errors.ReplayError"]
        expected = [event for event in expected if f"{event[0]}: error" not in refused]
        events = [event for event in events if event[0] not in refused]
    if case.unordered:
        expected, events = in_any_order(expected), in_any_order(events)
    difference = first_difference(expected, events)
    if difference:
        pytest.fail(difference, pytrace=False)
