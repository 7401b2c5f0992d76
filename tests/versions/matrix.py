"""Runs parts of the tests with other versions of Python, torch, NumPy and Ray, and writes into the README which passed.

    python tests/versions/matrix.py [--folder FOLDER] [--only NAME ...] [--parts PART ...]

For each combination an environment is made in the folder, once, and used again; this machine must have its Python. The
first run takes long and much room: torch brings its CUDA packages, some 6 GB for each environment. What was run, with
the counts, is noted in the folder; the table in the README shows the last result of each part, and only what was run.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README, BEGIN, END = ROOT / "README.md", "<!-- versions: begin -->\n", "<!-- versions: end -->\n"
INSTALLED = "torch numpy ray cloudpickle pyarrow pytest hypothesis psutil packaging kubernetes-validate pillow rich"
INSTALLED += " typer scikit-learn h5py datasets accelerate albumentations torchdata tqdm matplotlib"
OLDEST = ["numpy==2.0.0", "cloudpickle==3.0.0", "ray==2.52.1"]

# Name: Python, and what is installed in other versions than the newest.
COMBINATIONS = {
    "3.11, newest": ("3.11", []),
    "3.11, torch 2.13": ("3.11", ["torch==2.13.0"]),
    "3.11, oldest": ("3.11", ["torch==2.6.0", "pyarrow==21.0.0", *OLDEST]),
    "3.13, newest": ("3.13", []),
    "3.13, oldest": ("3.13", ["torch==2.6.0", "numpy==2.1.0", "cloudpickle==3.0.0", "ray==2.52.1"]),
    "3.14, newest": ("3.14", []),
    "3.14, torch 2.13": ("3.14", ["torch==2.13.0"]),
}
PARTS = {
    "smoke": ["tests/versions/smoke.py"],
    "unit": ["-m", "pytest", "-q", "-m", "not full", "tests/unit", "--ignore=tests/unit/test_docs.py"],
    "conformance": ["-m", "pytest", "-q", "-m", "not full", "tests/conformance"],
    "integration": ["-m", "pytest", "-q", "-m", "not full", "tests/integration"],
    "faults": ["-m", "pytest", "-q", "-m", "not full", "tests/faults"],
}
TELL = "import sys, torch, numpy, ray; print(sys.version.split()[0], *(m.__version__ for m in (torch, numpy, ray)))"


class Environment:
    """An environment of one combination."""

    def __init__(self, folder: Path, version: str, wanted: list[str]) -> None:
        self.venv, self.version, self.wanted = folder, version, wanted

    def run(self, program: str, *arguments: str, quiet: bool = False) -> subprocess.CompletedProcess[str]:
        """Runs a program of this environment's, or another one, in the checkout."""
        path = os.pathsep.join([f"{self.venv}/bin", os.environ["PATH"]])
        setting = {"PATH": path, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [program, *arguments],
            cwd=ROOT,
            env={**os.environ, **setting},
            stdout=subprocess.PIPE,
            stderr=None if quiet else subprocess.STDOUT,
            text=True,
        )
        if not quiet:
            print(done.stdout[-3000:], flush=True)
        return done

    def make(self) -> None:
        """Installs what it lacks."""
        if not (self.venv / "bin" / "python").exists():
            print(f"making {self.venv}; torch and its CUDA packages take minutes", flush=True)
            self.run(f"python{self.version}", "-m", "venv", str(self.venv)).check_returncode()
        if self.run("python", "-c", TELL, quiet=True).returncode == 0:
            return
        names = {re.split("[<>=]", one)[0] for one in self.wanted}
        newest = [name for name in INSTALLED.split() if name not in names]
        self.run("python", "-m", "pip", "install", "-q", *self.wanted, *newest).check_returncode()


def summary(part: str, done: subprocess.CompletedProcess[str]) -> str:
    """What the table says of a part: the counts of its last line, or whether it passed."""
    last = done.stdout.strip().splitlines()[-1:] or [""]
    counts = re.findall(r"(\d+) (passed|failed|errors?)\b", last[0])
    if part == "smoke" or not counts:
        return "passed" if done.returncode == 0 else "failed"
    return ", ".join(f"{number} {what}" for number, what in counts)


def table(results: dict[str, dict[str, str]]) -> str:
    """The table of the README."""
    rows = [["Python", "torch", "NumPy", "Ray", *PARTS], ["---"] * (4 + len(PARTS))]
    rows += [[*one["versions"].split(), *(one.get(part, "") for part in PARTS)] for one in results.values()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    """Runs what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions", help="of the environments")
    parser.add_argument("--only", nargs="*", default=[*COMBINATIONS], choices=[*COMBINATIONS], metavar="NAME")
    parser.add_argument("--parts", nargs="*", default=[*PARTS], choices=[*PARTS])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    notes = given.folder / "results.json"
    failed = False
    for name in given.only:
        folder = given.folder.resolve() / name.replace(", ", "-").replace(" ", "-")
        environment = Environment(folder, *COMBINATIONS[name])
        environment.make()
        told = environment.run("python", "-c", TELL, quiet=True).stdout.split("\n")[-2]
        for part in given.parts:
            print(f"{name}: {part}", flush=True)
            done = environment.run("python", *PARTS[part])
            failed |= done.returncode != 0
            results = json.loads(notes.read_text()) if notes.exists() else {}  # other parts may run beside this one
            if results.get(name, {}).get("versions") != told:
                results[name] = {"versions": told}
            results[name][part] = summary(part, done)
            notes.write_text(json.dumps(results, indent=2))
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table(json.loads(notes.read_text()))}\n{END}{rest.partition(END)[2]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
