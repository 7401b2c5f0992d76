"""The check of continuous integration: tiny and medium batches come at three times torch's rate, or it fails.

Motive: a change that costs the loader its speed should not land unnoticed. The bound is far below the aims, so that a
busy machine does not fail it. Where memory is slow, no loader could have three times torch's rate with medium batches:
there it is enough to come near the floor, which is what the processes could do that delivered to nobody.
Method: the throughput benchmark of these two cases, torch, rayloader and the floor alternating, in whole epochs: quick
ones may be over in a few hundredths of a second. The better two of three rounds count: a third is run only where two
disagree.
Command: python benchmarks/check.py, or `make bench-check`. Needs the extra `dev` only.
"""

from __future__ import annotations

import sys

import harness
import throughput

CASES = ("tiny", "medium")
BOUND = 3.0
FLOOR_BOUND = 0.8

Round = tuple[float, float]  # rayloader's rate as a multiple of torch's, and of the floor's


def main() -> None:
    """Measures, prints a line a case, fails where the better two rounds are not fast enough."""
    rounds = measure(CASES, count=2)
    undecided = tuple(case for case in CASES if len(set(map(is_fast, rounds[case]))) > 1)
    if undecided:
        for case, more in measure(undecided, count=1).items():
            rounds[case] += more
    slow = []
    for case in CASES:
        shown = ", ".join(f"{ratio:.1f} ({share:.0%})" for ratio, share in rounds[case])
        print(
            f"{case}: {shown} times torch's batches a second (of the floor's), a figure a round; "
            f"at least {BOUND:g}, or {FLOOR_BOUND:.0%}"
        )
        if sum(map(is_fast, rounds[case])) < 2:
            slow.append(case)
    if slow:
        sys.exit(f"too slow: {', '.join(slow)}; see python benchmarks/throughput.py --cases {','.join(slow)}")


def is_fast(measured: Round) -> bool:
    """Whether a round is fast enough."""
    ratio, share = measured
    return ratio >= BOUND or share >= FLOOR_BOUND


def measure(cases: tuple[str, ...], count: int) -> dict[str, list[Round]]:
    """So many rounds, by case."""
    peers = ("torch", "rayloader", "floor")
    options = harness.Options(rounds=count, quick=False, workers=2, cases=cases, peers=peers)
    figures = throughput.measure(options)
    found = {}
    for case in cases:
        of_ours = {"case": case, "implementation": "rayloader"}
        both = [harness.find(figures, **of_ours, metric=metric) for metric in (throughput.RATIO, throughput.OF_FLOOR)]
        if None in both:
            sys.exit(f"{case} was not measured")
        found[case] = list(zip(*(figure["rounds"] for figure in both if figure), strict=True))
    return found


if __name__ == "__main__":
    with harness.clean_exit():
        main()
