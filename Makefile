# Each target makes .venv and installs what it needs first. Variables:
#   PYTHON  the interpreter that makes .venv (3.11 or later)
#   TORCH   which torch to install; any >= 2.11 will do (on a GPU machine: make serve TORCH=torch)
#   START, SEEDS  which runs of the simulated cluster `make soak` makes
#   MODEL   what `make serve` serves; ARGS: more flags for `diptych serve`
PYTHON ?= python3
TORCH ?= torch==2.13.0
START ?= 0
SEEDS ?= 20000
MODEL ?= tiny
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test lint unit e2e soak bench proto clean

serve: $(VENV)/.installed
	$(BIN)/diptych serve $(MODEL) --prefill 1 --decode 1 $(ARGS)

test: lint unit e2e

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

unit: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m "not e2e and not gpu"

e2e: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m "e2e and not gpu"

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.simulation.soak --start $(START) --seeds $(SEEDS)

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/transfer.py
	$(BIN)/python benchmarks/engine.py

proto: $(VENV)/.installed-dev
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml setup.py $(wildcard kernels/cpu/src/* kernels/cpu/build.py) | $(BIN)/python
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
