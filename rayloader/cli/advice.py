"""How many workers to use, according to the measurements. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rayloader.cli.rates import Rate

# A rate within this share of the best is good enough: more workers would gain too little.
ENOUGH = 0.95
# More workers are worth a try if the last doubling has brought at least this factor.
GROWS = 1.10
# A trainer that waits less than this has no use for more workers.
LITTLE_WAIT = 0.02


def numbers_of_workers(most: int) -> Iterator[int]:
    """The numbers to try: none, one, and then twice as many each time."""
    yield 0
    number = 1
    while number < most:
        yield number
        number *= 2
    if most >= 1:
        yield most


def fastest(rates: Sequence[Rate]) -> tuple[int, str]:
    """The smallest number of workers that is about as fast as any, and the reason."""
    best = max(rates, key=lambda rate: rate.batches)
    chosen = min((rate for rate in rates if rate.batches >= ENOUGH * best.batches), key=lambda rate: rate.num_workers)
    share = chosen.batches / best.batches
    reason = f"{chosen.batches:,.1f} batches a second with {_workers(chosen.num_workers)}"
    if chosen is best:
        reason += ", the most of those tried"
    else:
        reason += f", {share:.0%} of the rate with {_workers(best.num_workers)}"
    last, before = rates[-1], rates[-2] if len(rates) > 1 else rates[-1]
    if chosen is last and len(rates) > 1 and last.batches >= GROWS * before.batches:
        reason += f"; {before.batches:,.1f} with {_workers(before.num_workers)}, so more may be faster still"
    return chosen.num_workers, reason


def for_step(rates: Sequence[Rate], step: float) -> tuple[int, str]:
    """The smallest number of workers with which a trainer hardly waits, and the reason."""
    for rate in rates:
        if rate.wait_share <= LITTLE_WAIT:
            who = f"with {_workers(rate.num_workers)} a trainer of {step * 1000:g} ms a step"
            return rate.num_workers, f"{who} waits {rate.wait_share:.1%} of its time"
    best = min(rates, key=lambda rate: rate.wait_share)
    who = f"even with {_workers(best.num_workers)} a trainer of {step * 1000:g} ms a step"
    more = "try more workers, or " if best is rates[-1] else "more workers did not help; "
    return best.num_workers, f"{who} waits {best.wait_share:.0%} of its time: {more}make the samples cheaper"


def _workers(number: int) -> str:
    return "no workers" if number == 0 else f"{number} worker{'s' * (number > 1)}"
