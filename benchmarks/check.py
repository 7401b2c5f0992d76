"""The check of continuous integration: tiny and medium batches come at three times torch's rate, or it fails.

Motive: a change that costs the loader its speed should not land unnoticed. The bound is far below the aims, so that a
busy machine does not fail it.
Method: the throughput benchmark of these two cases, torch and rayloader alternating; ratios of medians. Three rounds,
but whole epochs: quick ones may be over in a few hundredths of a second.
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
    options = harness.Options(rounds=3, quick=False, workers=2, cases=CASES, peers=("torch", "rayloader"), read=False)
    figures = throughput.measure(options)
    slow = []
    for case in CASES:
        ratio = harness.find(figures, case=case, implementation="rayloader", metric="ratio to torch")
        if ratio is None:
            sys.exit(f"{case} was not measured")
        rounds = ", ".join(f"{value:.1f}" for value in ratio["rounds"])
        print(f"{case}: {ratio['median']:.1f} times torch's batches a second (rounds: {rounds}); at least {BOUND:g}")
        if ratio["median"] < BOUND:
            slow.append(case)
    if slow:
        sys.exit(f"too slow: {', '.join(slow)}; see python benchmarks/throughput.py --cases {','.join(slow)}")


if __name__ == "__main__":
    with harness.clean_exit():
        main()
