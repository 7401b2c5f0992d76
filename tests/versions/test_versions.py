"""The distributions are complete, and the wheel works by itself with the oldest versions of what it requires.

`make test` builds them. `make test-full` also installs the wheel, outside of the checkout, into environments with the
versions of `oldest.txt` and of `constraints.txt`. pip must be able to fetch these. Only torch, which is large, and what
it requires are taken from the environment of the tests; `matrix.py` has others.
"""

import email.message
import email.policy
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
OLDEST = Path(__file__).with_name("oldest.txt")
SMOKE = Path(__file__).with_name("smoke.py")
HANG_LIMIT = 1200  # seconds; on expiry subprocess.run kills the program and raises


def run(*command: object, folder: Path | None = None) -> str:
    """What a program prints, in a folder, without a way to the checkout or to another Ray."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RAY_ADDRESS")}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_LIMIT
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


# --- what the distributions hold


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution, and the wheel that is built from it, by suffix."""
    folder = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def metadata(distributions: dict[str, Path]) -> email.message.Message:
    with zipfile.ZipFile(distributions[".whl"]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
        return email.message_from_bytes(wheel.read(name), policy=email.policy.default)


def test_the_source_distribution_is_the_repository(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions[".gz"]) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in names if name.startswith("rayloader.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == set(run("git", "ls-files", folder=ROOT).splitlines())


def test_the_wheel_is_the_package(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions[".whl"]) as wheel:
        names = {name for name in wheel.namelist() if not re.match(r"rayloader-[^/]*\.dist-info/", name)}
        licences = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    assert names == set(run("git", "ls-files", "rayloader", folder=ROOT).splitlines())
    assert "rayloader/py.typed" in names
    assert licences


def test_its_page_on_a_package_index_has_no_link_that_leads_nowhere(metadata: email.message.Message) -> None:
    page = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert targets
    assert all(target.startswith("https://") for target in targets)
    assert "debugging (`docs/howto/debugging.md`)" in " ".join(page.split())


def test_oldest_txt_holds_the_lower_bounds(metadata: email.message.Message) -> None:
    pins = [Requirement(line) for line in OLDEST.read_text().splitlines() if line and not line.startswith("#")]
    oldest = {pin.name: Version(str(pin.specifier).removeprefix("==")) for pin in pins}
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    bounds = {
        requirement.name: Version(part.version)
        for requirement in required
        for part in requirement.specifier
        if part.operator == ">="
    }
    del oldest["pyarrow"]
    assert oldest == bounds


# --- the wheel at work


def torch_and_what_it_requires() -> Iterator[importlib.metadata.Distribution]:
    waiting, seen = ["torch"], set()
    while waiting:
        distribution = importlib.metadata.distribution(waiting.pop())
        if distribution.name not in seen:
            seen.add(distribution.name)
            yield distribution
            requirements = [Requirement(text) for text in distribution.requires or []]
            waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module", params=[OLDEST, ROOT / "constraints.txt"], ids=lambda path: path.stem)
def python(
    request: pytest.FixtureRequest, distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The interpreter of an environment with these versions.

    What is linked stays outside of the environment: pip may replace it, and never removes it.
    """
    folder = tmp_path_factory.mktemp(request.param.stem)
    environment, links = folder / "environment", folder / "links"
    run(sys.executable, "-m", "venv", environment)
    links.mkdir()
    for distribution in torch_and_what_it_requires():
        for name in {file.parts[0] for file in distribution.files or []} - {".."}:
            if not (links / name).exists():
                (links / name).symlink_to(distribution.locate_file(name))
    python = environment / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    Path(site, "links.pth").write_text(f"{links}\n")
    constraints = folder / "constraints.txt"
    lines = request.param.read_text().splitlines(keepends=True)
    constraints.write_text("".join(line for line in lines if not line.startswith("torch==")))
    run(python, "-m", "pip", "install", "-c", constraints, "--only-binary=:all:", distributions[".whl"], "pyarrow")
    return python


@pytest.mark.full
def test_batches_are_torchs_whatever_happens_to_the_workers(python: Path, tmp_path: Path) -> None:
    output = run(python, SMOKE, folder=tmp_path)
    assert f"smoke passed: {python.parents[1]}" in output
    print(output)


@pytest.mark.full
def test_the_quickstart_runs(python: Path, tmp_path: Path) -> None:
    assert "most frequent: e " in run(python, ROOT / "examples" / "quickstart.py", folder=tmp_path)
