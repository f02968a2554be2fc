# Each target sets up what it needs in .venv, once; a changed pyproject.toml, constraints.txt or
# C source sets it up again. PYTHON=python3.12 make test chooses another interpreter.

PYTHON ?= python3
BIN := .venv/bin
# pip and not uv: the CPU build of torch that constraints.txt pins is found by pip alone.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
RECIPE ?= vision
WHICH ?= full or not full

.PHONY: help demo train test test-all test-gpu lint format bench docs clean

help: ## say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: .venv/.demo ## train on digits with wrong labels; ends with a page to look at (2 minutes)
	$(BIN)/microclip demo

train: .venv/.lab ## train a recipe on embedded data: make train RECIPE=speech (5 minutes)
	$(BIN)/microclip train $(RECIPE)

# tests that share what several processes computed run in one worker: loadgroup
PYTEST := $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadgroup $(FLAGS)

test: .venv/.dev ## run the tests, without the rest of large matrices and what is slow (5 minutes)
	$(PYTEST)

test-all: .venv/.dev ## run all tests, with coverage (35 minutes)
	$(PYTEST) -m '$(WHICH)' --cov --cov-fail-under=95

test-gpu: .venv/.dev ## run the tests of devices on your GPU: CUDA, MPS or XPU
	$(BIN)/python tests/support/gpu_tests.py

lint: .venv/.dev ## ruff and mypy --strict
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dev ## let ruff format and mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.dev ## what clipping costs, side by side with plain training (5 minutes)
	$(BIN)/python benchmarks/stream_cost.py
	$(BIN)/python benchmarks/import_time.py

docs: .venv/.dev ## build the documentation into docs/_build
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build
	@echo "docs/_build/index.html"

clean: ## remove what the targets made
	rm -rf .venv docs/_build demo-output

.venv/.base: constraints.txt pyproject.toml lab/pyproject.toml hatch_build.py $(wildcard src/microclip/engines/single_pass/*.c)
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.exit(0 if sys.version_info >= (3, 11) else "microclip needs Python 3.11 or newer, but $(PYTHON) is " + v + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(PIP) hatchling editables
	@touch $@

.venv/.demo: .venv/.base
	$(PIP) --no-build-isolation -e '.[demo]'
	@touch $@

.venv/.lab: .venv/.base
	$(PIP) --no-build-isolation -e . -e ./lab
	@touch $@ .venv/.demo

.venv/.dev: .venv/.base
	$(PIP) --no-build-isolation -e '.[dev]' -e ./lab
	@touch $@ .venv/.demo .venv/.lab
