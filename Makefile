# `make` lists the targets. `make demo` and `make test` need Python >= 3.11, pip and make, and nothing else:
# they build .venv on first use, and again when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
FULL_READY := $(VENV)/.ready-full
DOCS_READY := $(VENV)/.ready-docs

# The tests run in parts, each in a process with a Ray of its own, three side by side, for tests of workers leave cores
# idle; what takes longest begins first. A part is a folder, unless its files are given here.
PARTS := integration programs conformance unit multinode others checkpoints types
FOLDERS := $(notdir $(patsubst %/,%,$(dir $(wildcard tests/*/test_*.py))))
FILES_checkpoints := $(wildcard tests/integration/test_checkpoint*.py)
FILES_programs := $(patsubst %,tests/integration/test_%.py,closing default examples forks interrupts \
	kinds_of_datasets lacking lifetimes scripts signals)
FILES_integration := tests/integration $(patsubst %,--ignore=%,$(FILES_checkpoints) $(FILES_programs))
FILES_types := tests/unit/test_docs.py::test_the_library_and_the_code_in_the_documents_pass_mypy
FILES_unit := tests/unit --deselect=$(FILES_types)
FILES_others := $(addprefix tests/,$(sort $(filter-out $(PARTS),$(FOLDERS))))
PYTEST := $(PY) -m pytest $(SELECTED)

.DEFAULT_GOAL := help
.PHONY: help demo test test-full test-versions docs chaos mutants bench bench-quick bench-check lint format types clean $(PARTS)
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## train on real images with two Ray workers and check the batches against torch's
	@$(PY) examples/digits.py

test: lint ## lint, types, tests (sampled where a full run takes long) and bench-check; what CI runs
	$(call run_tests,-m 'not full')
	@$(PY) benchmarks/check.py

test-full: lint docs $(FULL_READY) ## the same with every test, and the documentation
	$(call run_tests,)
	@$(PY) benchmarks/check.py

test-versions: $(READY) ## other versions of Python, torch, NumPy and Ray, into the README's table; takes hours and 6 GB for each
	@$(PY) tests/versions/matrix.py

docs: $(DOCS_READY) ## build the documentation site in build/docs
	@$(PY) -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

chaos: $(READY) ## kill workers and whole Ray nodes at random for some minutes; every batch must come, once and the same
	@$(PY) tests/chaos/chaos.py

mutants: $(READY) ## put 300 small faults into the library, one at a time, and count those that the tests notice; takes hours
	@$(PY) tests/mutants/mutants.py

bench: $(BENCH_READY) ## every benchmark, beside torch's loader and others: table, JSON and plot in benchmarks/results
	@$(PY) benchmarks/run_all.py

bench-quick: $(BENCH_READY) ## the same in two to three minutes: smaller, and beside torch's loader only
	@$(PY) benchmarks/run_all.py --quick

bench-check: $(READY) ## fail when tiny or medium batches come at less than three times torch's rate, and far from the floor
	@$(PY) benchmarks/check.py

lint: $(READY) ## ruff: rules and format
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --diff --quiet . || { echo "badly formatted; run: make format" >&2; exit 1; }

types: ## mypy, strict, on the library and on the code in the documents; part of the tests

format: $(READY) ## rewrite the sources as ruff wants them
	@$(PY) -m ruff check --quiet --fix-only .
	@$(PY) -m ruff format --quiet .

clean: ## remove build output and caches; keeps .venv
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# The output of a process comes in one piece when its tests have ended. All run whatever the first ones say, so that one
# run shows every failure. The sources are compiled once, not in each of the thousand processes of the tests, where
# Python is told to write no bytecode.
define run_tests
@$(PY) -m compileall -q rayloader tests
@$(MAKE) --no-print-directory --jobs=3 --keep-going --output-sync=target $(PARTS) SIDE_BY_SIDE=1 SELECTED="$(1)"
endef

$(PARTS): $(READY)
	@$(PYTEST) $(or $(FILES_$@),tests/$@)

$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "no $(PYTHON) here: install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Python must be 3.11 or newer, $(PYTHON) is $$("$(PYTHON)" -V 2>&1);" \
			"name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) can't build virtual environments: install its venv package" \
			"(Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	@echo "Setting up $(VENV) with torch, Ray and the development tools; this takes a minute or more, once."
	@"$(PY)" -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@"$(PY)" -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@touch $@

$(FULL_READY): $(READY)
	@echo "Adding the trainers and the libraries that only the full tests run."
	@"$(PY)" -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[dev,trainers,clients]'
	@touch $@

$(BENCH_READY): $(READY)
	@echo "Adding the loaders that the benchmarks compare with."
	@"$(PY)" -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[dev,bench]'
	@touch $@

$(DOCS_READY): $(READY)
	@echo "Adding what builds the documentation."
	@"$(PY)" -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[dev,docs]'
	@touch $@
