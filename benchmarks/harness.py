"""What all benchmarks share: rounds, figures, tables, the machine's description and the command line.

Nothing here needs more than the standard library, except `pss` (psutil) and `print_table` (rich, of the extra
`bench`), which `options` asks for before anything is measured.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import signal
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from processes import Missing, PeerError

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")

Figure = dict[str, Any]


def rotated(names: Sequence[str], round_number: int) -> list[str]:
    """The names, begun with another one each round: none always runs after the same other."""
    begin = round_number % max(1, len(names))
    return [*names[begin:], *names[:begin]]


def say(text: str) -> None:
    """Tells whoever waits at the terminal where the benchmark is; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(text, file=sys.stderr)


# ---- figures


def figure(question: str, case: str, implementation: str, metric: str, unit: str, rounds: Any, **more: Any) -> Figure:
    """One measured quantity: the median and each round's value; or, where `rounds` is `Missing`, why there is none."""
    names = {"question": question, "case": case, "implementation": implementation, "metric": metric, "unit": unit}
    if isinstance(rounds, Missing):
        return {**names, "missing": rounds.reason, **more}
    return {**names, "median": _round(statistics.median(rounds)), "rounds": [_round(x) for x in rounds], **more}


def ratio(over: Figure, under: Figure, **names: Any) -> Figure | None:
    """The ratio of two figures' medians, and of each round's values; None where either is missing."""
    if "missing" in over or "missing" in under:
        return None
    pairs = zip(over["rounds"], under["rounds"], strict=True)
    rounds = [_round(a / b) for a, b in pairs]
    return {**over, "unit": "", "median": _round(over["median"] / under["median"]), "rounds": rounds, **names}


def find(figures: Iterable[Figure], **names: Any) -> Figure | None:
    """The one figure with these entries, None if there is none."""
    return next((f for f in figures if all(f.get(key) == value for key, value in names.items())), None)


def show(found: Figure | None) -> str:
    """A figure's median for a table."""
    if found is None or "missing" in found:
        return "-"
    value = found["median"]
    if found["unit"] == "GB":
        return f"{max(0.0, value):.2f}"  # what is below a hundredth is noise, of either sign
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def pss(*, descendants: bool) -> float:
    """Bytes of memory, a share of what is shared, of this process alone or of all that it started too."""
    import psutil

    this = psutil.Process()
    total = 0.0
    for process in [this, *(this.children(recursive=True) if descendants else [])]:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    say("")
    table = Table(title=title, title_justify="left")
    for column, name in enumerate(header):
        table.add_column(name, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def print_missing(figures: Iterable[Figure]) -> None:
    """Says why cells are empty."""
    reasons = {(f["implementation"], f["missing"]) for f in figures if "missing" in f}
    for implementation, reason in sorted(reasons):
        print(f"- {implementation}: {reason}")


# ---- the machine


def machine() -> dict[str, Any]:
    """What was measured on."""
    cpus = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kb = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return {
        "date": today(),
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory_kb / 1e6, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "ray", "torchdata", "spdl_core", "grain", "pyarrow", "datasets")},
        "load_at_start": [round(load, 2) for load in os.getloadavg()],
    }


def today() -> str:
    """Date and time, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


# ---- the command line


@dataclass(frozen=True)
class Options:
    """What the command line says; without cases or peers all there are."""

    rounds: int
    quick: bool
    workers: int
    cases: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    def pick_peers(self, known: Sequence[str], quick: Sequence[str] | None = None) -> list[str]:
        """Those of the known ones that were asked for; by default all, or `quick` with --quick."""
        return self._pick(self.peers, known, quick)

    def pick_cases(self, known: Sequence[str], quick: Sequence[str] | None = None) -> list[str]:
        """The same for cases."""
        return self._pick(self.cases, known, quick)

    def _pick(self, wanted: Sequence[str], known: Sequence[str], quick: Sequence[str] | None) -> list[str]:
        if unknown := sorted(set(wanted) - set(known)):
            sys.exit(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
        wanted = wanted or (quick if self.quick and quick is not None else known)
        return [name for name in known if name in wanted]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return number


def options(doc: str | None, *, choice: bool = True, needs: Sequence[str] = ("rich",), workers: int = 2) -> Options:
    """Reads the command line of a benchmark, looks for what it will need at its end, and compiles the library.

    pip compiles what it installs, so the peers are compiled; this tree may not be, where Python is told to write none.
    With `choice` cases and peers can be chosen; without the packages of `needs` there would be no table or plot.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--rounds", type=_positive, help="measured rounds; 5, or 2 with --quick")
    parser.add_argument(
        "--workers", type=_positive, default=workers, help="of a loader; at most, where their number is the question"
    )
    parser.add_argument("--quick", action="store_true", help="smaller epochs, fewer rounds")
    if choice:
        parser.add_argument("--cases", type=_names, default=(), help="comma-separated; all by default")
        parser.add_argument("--peers", type=_names, default=(), help="comma-separated; all by default")
    arguments = vars(parser.parse_args())
    lacking = [package for package in needs if importlib.util.find_spec(package) is None]
    if lacking:
        sys.exit(f"this needs {', '.join(lacking)}, of the extra `bench`: pip install -c constraints.txt -e '.[bench]'")
    compileall.compile_dir(ROOT / "rayloader", quiet=1)
    return Options(**{**arguments, "rounds": arguments["rounds"] or (2 if arguments["quick"] else 5)})


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """Ends processes on SIGTERM too, and says errors without a traceback."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except PeerError as error:
        sys.exit(f"error: {error}")
