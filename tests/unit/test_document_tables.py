"""Tables in documents are what the results in benchmarks/results give."""

import copy
import importlib
import json
from pathlib import Path

import pytest


@pytest.fixture
def module(request, monkeypatch):
    """A benchmark that makes a table."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module(request.param)


@pytest.fixture
def results(module):
    """What was measured, for the table of that benchmark."""
    return json.loads(module.RESULTS.read_text())


readme_table = pytest.mark.parametrize("module", ["readme_table"], indirect=True)


@pytest.mark.parametrize("module", ["readme_table", "shared", "gpu", "cache", "plans"], indirect=True)
def test_documents_hold_the_generated_tables(module, results):
    import tables

    assert tables.found(module.DOCUMENT, module.COMMAND) == module.table(results), f"run: {module.COMMAND}"


@readme_table
def test_a_figure_that_changes_changes_the_table(module, results):
    changed = copy.deepcopy(results)
    tiny = next(f for f in changed["figures"] if (f["case"], f["implementation"]) == ("tiny", "rayloader"))
    tiny["median"] *= 2
    assert module.table(changed) != module.table(results)


@readme_table
@pytest.mark.parametrize("implementation", ["torch", "rayloader"])
def test_what_is_missing_is_a_dash(module, results, implementation):
    for number, figure in enumerate(results["figures"]):
        if (figure["case"], figure["implementation"]) == ("tiny", implementation):
            kept = {key: value for key, value in figure.items() if key not in ("median", "rounds")}
            results["figures"][number] = {**kept, "missing": "not there"}
    row = next(line for line in module.table(results).splitlines() if line.startswith("| tiny"))
    assert " - " in row


@readme_table
def test_the_results_are_a_full_run(results):
    assert not results["settings"]["quick"]
    assert all("missing" in figure or len(figure["rounds"]) >= 1 for figure in results["figures"])
