"""Whether the tests notice faults: `make mutants`.

    python tests/mutants/mutants.py [--count 300] [--seed 0] [--limit 600] [--of FOLDER...] [--tests PATH...]

In a copy of the project, in build/mutants, so many faults of five kinds are put into `epoch/`, `workers/`, `host/`,
`transport/` and `resume/`, or other folders of the library, one of which a process has at most (mutation.py). One run
of the tests without any shows which tests reach which. Then each mutant is given to the tests that reach it, the
quickest first, until one fails, or hangs, or `--limit` seconds are over. What is known already is not done again: the
command may be interrupted. The table, `build/mutants/results.json`, names each mutant's fate.
"""

import argparse
import contextlib
import json
import os
import queue
import select
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mutation

ROOT = Path(__file__).parents[2]
HERE = ROOT / "build" / "mutants"
SIDE_BY_SIDE = 2  # processes of pytest
HANGS = 60.0  # seconds without news after which a test counts as hanging, and ten times what it took without a mutant
READS_SOURCES = ["test_docs.py", "test_layout.py", "test_sources.py"]  # which are not the same here


def pytest(*arguments, mutant=-1, **options):
    """Starts pytest in the copy."""
    path = os.pathsep.join([str(HERE / "copy"), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": path, mutation.ACTIVE: str(mutant)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not full", *arguments]
    return subprocess.Popen(command, cwd=HERE / "copy", env=environment, start_new_session=True, **options)


def make_copy(chosen):
    """A copy of the tracked files, with the mutants."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for file in filter(None, files):
        target = HERE / "copy" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target)
    mutation.write(HERE / "copy" / "rayloader", chosen)


def reach(folder):
    """The tests of a folder, or file, that pass: name, seconds, sites."""
    name = "-".join(folder.with_suffix("").parts)
    report, done = HERE / f"reached-{name}.jsonl", HERE / f"reached-{name}.done"
    if not done.exists():
        report.unlink(missing_ok=True)
        left_out = [f"--ignore={folder / name}" for name in READS_SOURCES]
        with (HERE / f"reached-{name}.log").open("w") as log:
            arguments = ["-p", "reached", f"--reached={report}", *left_out, folder]
            pytest(*arguments, stdout=log, stderr=subprocess.STDOUT).wait()
        done.touch()
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


class Judge:
    """A process that has collected the tests of a folder, and gives mutants to them; see judge.py."""

    def __init__(self, folder, names):
        files = sorted({name.split("::")[0] for name in names})
        arguments = ["-vv", "-p", "no:cacheprovider", "-p", "judge", *files]
        with (HERE / f"judge-{folder}.log").open("w") as log:
            self.process = pytest(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def fate(self, number, tests, limit):
        """What these tests, names with seconds, say of a mutant: None if all pass."""
        names, log = HERE / f"mutant-{number}.txt", HERE / f"mutant-{number}.log"
        names.write_text("\n".join(name for name, _ in tests))
        log.touch()
        print(number, names, log, sep="\t", file=self.process.stdin, flush=True)
        pid, began = int(self.process.stdout.readline()), time.monotonic()
        slowest = max(seconds for _, seconds in tests)
        size, news = 0, time.monotonic()
        while not select.select([self.process.stdout], [], [], 1.0)[0]:
            now = time.monotonic()
            if log.stat().st_size != size:
                size, news = log.stat().st_size, now
            why = "hangs" if now - news > HANGS + 10 * slowest else "not known" if now - began > limit else ""
            if why:
                os.killpg(pid, 9)
                self.process.stdout.readline()
                return why, last_test(log)
        failed = int(self.process.stdout.readline()) != 0
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, 9)  # what a test that failed has left
        return ("killed", last_test(log)) if failed else None


def fate(number, tests, limit, judges):
    """What the tests say of a mutant: killed by one, hanging in one, survived all, or not known within the limit."""
    began, by_folder = time.monotonic(), {}
    for name, seconds, _ in sorted(tests, key=lambda test: test[1]):
        by_folder.setdefault(name.split("/")[1], []).append((name, seconds))
    for folder, some in sorted(by_folder.items(), key=lambda item: sum(s for _, s in item[1]) / len(item[1])):
        said = judges[folder].fate(number, some, limit - (time.monotonic() - began))
        if said is not None:
            return said
    return "survived", f"{len(tests)} tests"


def last_test(log):
    """The test that was at work at the end."""
    words = [line.split(" ") for line in log.read_text(errors="replace").splitlines() if "::" in line]
    return words[-1][words[-1][0] in ("FAILED", "ERROR")] if words else "the start"


def main():
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=300, help="of mutants")
    parser.add_argument("--seed", type=int, default=0, help="by which they are drawn")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a mutant")
    parser.add_argument("--of", nargs="*", default=mutation.MUTATED, help="folders of the library")
    parser.add_argument("--tests", nargs="*", default=[], help="folders or files in tests/; all folders by default")
    given = parser.parse_args()
    chosen = mutation.choose(ROOT / "rayloader", given.count, given.seed, given.of)
    HERE.mkdir(parents=True, exist_ok=True)
    names = [str(site) for site in chosen]
    known = HERE / "sites.json"
    if known.exists() and json.loads(known.read_text()) != names:
        shutil.rmtree(HERE)
        HERE.mkdir()
    if not known.exists():
        make_copy(chosen)
        known.write_text(json.dumps(names))
    folders = given.tests or sorted({path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")})
    tests = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        for some in pool.map(reach, [Path("tests") / folder for folder in folders]):
            tests += some
        names_by_folder = {}
        for name, _, _ in tests:
            names_by_folder.setdefault(name.split("/")[1], []).append(name)
        crews = queue.SimpleQueue()
        for _ in range(SIDE_BY_SIDE):
            crews.put({folder: Judge(folder, some) for folder, some in names_by_folder.items()})
        results_file = HERE / "results.json"
        results = json.loads(results_file.read_text()) if results_file.exists() else {}

        def judge(number):
            reaching = [test for test in tests if number in test[2]]
            if names[number] in results:
                return
            if reaching:
                judges = crews.get()
                try:
                    results[names[number]] = fate(number, reaching, given.limit, judges)
                finally:
                    crews.put(judges)
            else:
                results[names[number]] = "not reached", ""
            results_file.write_text(json.dumps(results, indent=1))
            print(f"{names[number]}: {' '.join(results[names[number]])}", flush=True)

        list(pool.map(judge, range(len(chosen))))
    print(dict(Counter(how for how, _ in results.values())))


if __name__ == "__main__":
    main()
