"""The check of continuous integration: tiny and medium batches come at three times torch's rate, or it fails.

Motive: a change that costs the loader its speed should not land unnoticed. The bound is far below the aims, so that a
busy machine does not fail it.
Method: the throughput benchmark of these two cases, torch and rayloader alternating, in whole epochs: quick ones may be
over in a few hundredths of a second. The better two of three rounds count: a third is run only where two disagree.
Command: python benchmarks/check.py, or `make bench-check`. Needs the extra `dev` only.
"""

from __future__ import annotations

import sys

import harness
import throughput

CASES = ("tiny", "medium")
BOUND = 3.0


def main() -> None:
    """Measures, prints a line a case, fails under the bound."""
    ratios = measure(CASES, rounds=2)
    undecided = tuple(case for case in CASES if len({ratio >= BOUND for ratio in ratios[case]}) > 1)
    if undecided:
        for case, more in measure(undecided, rounds=1).items():
            ratios[case] += more
    slow = []
    for case in CASES:
        rounds = ", ".join(f"{ratio:.1f}" for ratio in ratios[case])
        print(f"{case}: {rounds} times torch's batches a second, a figure a round; at least {BOUND:g}")
        if sorted(ratios[case])[-2] < BOUND:
            slow.append(case)
    if slow:
        sys.exit(f"too slow: {', '.join(slow)}; see python benchmarks/throughput.py --cases {','.join(slow)}")


def measure(cases: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    """Rayloader's rate as a multiple of torch's, by case and round."""
    peers = ("torch", "rayloader")
    options = harness.Options(rounds=rounds, quick=False, workers=2, cases=cases, peers=peers, read=False)
    figures = throughput.measure(options)
    found = {}
    for case in cases:
        ratio = harness.find(figures, case=case, implementation="rayloader", metric="ratio to torch")
        if ratio is None:
            sys.exit(f"{case} was not measured")
        found[case] = list(ratio["rounds"])
    return found


if __name__ == "__main__":
    with harness.clean_exit():
        main()
