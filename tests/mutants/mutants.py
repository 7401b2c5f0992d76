"""Whether the tests notice faults: `make mutants`.

    python tests/mutants/mutants.py [--count 300] [--seed 0] [--limit 600] [--of FOLDER...] [--tests PATH...]

In a copy of the project, in build/mutants, so many faults of five kinds are put into `epoch/`, `workers/`, `host/`,
`transport/` and `resume/`, or other folders of the library, one of which a process has at most (mutation.py). One run
of the tests without any shows which tests reach which. Then each mutant is given to the tests that reach it, the
quickest first, until one fails, or hangs, or `--limit` seconds are over. What is known already is not done again: the
command may be interrupted. The table, `build/mutants/results.json`, names each mutant's fate.
"""

import argparse
import json
import os
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


def fate(number, tests, limit):
    """What the tests say of a mutant: killed by one, hanging in one, survived all, or not known within the limit."""
    began, log = time.monotonic(), HERE / f"mutant-{number}.log"
    by_folder = {}
    for name, seconds, _ in sorted(tests, key=lambda test: test[1]):
        by_folder.setdefault(name.split("/")[1], []).append((name, seconds))
    for some in sorted(by_folder.values(), key=lambda some: sum(seconds for _, seconds in some) / len(some)):
        names = HERE / f"mutant-{number}.txt"
        names.write_text("\n".join(name for name, _ in some))
        slowest = max(seconds for _, seconds in some)
        with log.open("w") as output:
            arguments = ["-x", "-p", "no:cacheprovider", "-vv", f"@{names}"]
            process = pytest(*arguments, mutant=number, stdout=output, stderr=subprocess.STDOUT)
        size, news = 0, time.monotonic()
        while process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            if log.stat().st_size != size:
                size, news = log.stat().st_size, now
            why = "hangs" if now - news > HANGS + 10 * slowest else "not known" if now - began > limit else ""
            if why:
                os.killpg(process.pid, 9)
                process.wait()
                return why, last_test(log)
        if process.returncode != 0:
            return "killed", last_test(log)
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
        results_file = HERE / "results.json"
        results = json.loads(results_file.read_text()) if results_file.exists() else {}

        def judge(number):
            if names[number] not in results:
                reaching = [test for test in tests if number in test[2]]
                results[names[number]] = fate(number, reaching, given.limit) if reaching else ("not reached", "")
                results_file.write_text(json.dumps(results, indent=1))
                print(f"{names[number]}: {' '.join(results[names[number]])}", flush=True)

        list(pool.map(judge, range(len(chosen))))
    print(dict(Counter(how for how, _ in results.values())))


if __name__ == "__main__":
    main()
