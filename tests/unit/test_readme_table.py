"""The README's table is what benchmarks/results/latest.json gives."""

import copy
import json
import runpy
from pathlib import Path

import pytest

GENERATOR = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "readme_table.py"))
DOCUMENT = json.loads(GENERATOR["RESULTS"].read_text())


def test_the_readme_holds_the_generated_table() -> None:
    in_readme = GENERATOR["BLOCK"].findall(GENERATOR["README"].read_text())
    assert in_readme == [GENERATOR["table"](DOCUMENT)], "run: python benchmarks/readme_table.py --write"


def test_a_figure_that_changes_changes_the_table() -> None:
    changed = copy.deepcopy(DOCUMENT)
    tiny = next(f for f in changed["figures"] if (f["case"], f["implementation"]) == ("tiny", "rayloader"))
    tiny["median"] *= 2
    assert GENERATOR["table"](changed) != GENERATOR["table"](DOCUMENT)


@pytest.mark.parametrize("implementation", ["torch", "rayloader"])
def test_what_is_missing_is_a_dash(implementation: str) -> None:
    changed = copy.deepcopy(DOCUMENT)
    for number, figure in enumerate(changed["figures"]):
        if (figure["case"], figure["implementation"]) == ("tiny", implementation):
            kept = {key: value for key, value in figure.items() if key not in ("median", "rounds")}
            changed["figures"][number] = {**kept, "missing": "not there"}
    row = next(line for line in GENERATOR["table"](changed).splitlines() if line.startswith("| tiny"))
    assert " - " in row


def test_the_results_are_a_full_run() -> None:
    assert not DOCUMENT["settings"]["quick"]
    assert all("missing" in figure or len(figure["rounds"]) >= 1 for figure in DOCUMENT["figures"])
