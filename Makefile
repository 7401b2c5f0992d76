# `make` lists the targets. `make demo` and `make test` need Python >= 3.10, pip and make, and nothing else:
# they build .venv on first use, and again when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench

# Fast tests first, then every other folder under tests/. Multi-node tests start Ray nodes of their own and must
# not share a process with the others.
ORDERED := tests/unit tests/conformance tests/integration tests/faults
MULTINODE := $(wildcard tests/multinode)
TESTS := $(wildcard $(ORDERED)) \
	$(filter-out $(ORDERED) $(MULTINODE) %/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))
PYTEST := $(PY) -m pytest

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-full chaos bench bench-quick bench-check lint format types clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## train on real images with two Ray workers and check the batches against torch's
	@$(PY) examples/digits.py

test: lint types ## lint, types, tests (sampled where a full run takes long) and bench-check; what CI runs
	$(call run_tests,-m "not full")
	@$(PY) benchmarks/check.py

test-full: lint types ## the same with every test
	$(call run_tests,)
	@$(PY) benchmarks/check.py

chaos: $(READY) ## kill workers and whole Ray nodes at random for some minutes; every batch must come, once and the same
	@$(PY) tests/chaos/chaos.py

bench: $(BENCH_READY) ## every benchmark, beside torch's loader and others: table, JSON and plot in benchmarks/results
	@$(PY) benchmarks/run_all.py

bench-quick: $(BENCH_READY) ## the same in under two minutes: smaller, and beside torch's loader only
	@$(PY) benchmarks/run_all.py --quick

bench-check: $(READY) ## fail when tiny or medium batches come at less than three times torch's rate
	@$(PY) benchmarks/check.py

lint: $(READY) ## ruff: rules and format
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --diff --quiet . || { echo "badly formatted; run: make format" >&2; exit 1; }

types: $(READY) ## mypy, strict, on the library
	@$(PY) -m mypy --no-error-summary

format: $(READY) ## rewrite the sources as ruff wants them
	@$(PY) -m ruff check --quiet --fix-only .
	@$(PY) -m ruff format --quiet .

clean: ## remove build output and caches; keeps .venv
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +

# Both pytest processes run whatever the first one says, so that one run shows every failure.
# Exit status 5 is "no tests selected": fine for the multi-node folder, a mistake for the rest.
define run_tests
@failed=0; \
$(PYTEST) $(1) $(TESTS) || failed=1; \
if [ -n "$(MULTINODE)" ]; then \
	$(PYTEST) $(1) $(MULTINODE) || [ $$? -eq 5 ] || failed=1; \
fi; \
exit $$failed
endef

$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "no $(PYTHON) here: install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "Python must be 3.10 or newer, $(PYTHON) is $$("$(PYTHON)" -V 2>&1);" \
			"name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) can't build virtual environments: install its venv package" \
			"(Debian and Ubuntu: python3-venv)" >&2; exit 1; }
	@echo "Setting up $(VENV) with torch, Ray and the development tools; this takes a minute or more, once."
	@"$(PY)" -c 'import pip' 2>/dev/null || "$(PYTHON)" -m venv --clear $(VENV)
	@"$(PY)" -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@touch $@

$(BENCH_READY): $(READY)
	@echo "Adding the loaders that the benchmarks compare with."
	@"$(PY)" -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt -e '.[dev,bench]'
	@touch $@
