# Each target makes .venv and installs what it needs first. Variables:
#   PYTHON  the interpreter that makes .venv (3.11 or later)
#   TORCH   which torch to install; any >= 2.11 will do (on a GPU machine: make serve TORCH=torch)
#   PROCESSES  how many share the unit tests
#   START, SEEDS  which runs of the simulated cluster `make soak` makes
#   MODEL   what `make serve` serves; ARGS: more flags for `diptych serve`
PYTHON ?= python3
TORCH ?= torch==2.13.0
PROCESSES ?= 2
START ?= 0
SEEDS ?= 20000
MODEL ?= tiny
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: serve test lint unit e2e e2e-clusters e2e-workers soak bench proto clean

serve: $(VENV)/.installed
	$(BIN)/diptych serve $(MODEL) --prefill 1 --decode 1 $(ARGS)

test: lint unit e2e

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# One thread each where several processes compute: two of one process would wait for each other.
unit e2e e2e-clusters e2e-workers: export OMP_NUM_THREADS = 1

# A file's tests run in one process, in order.
unit: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m "not e2e and not gpu" -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

# Whole clusters, one after the other, beside what starts bare workers; then what needs the machine to itself.
e2e: $(VENV)/.installed-dev
	$(MAKE) --jobs=2 e2e-clusters e2e-workers
	$(BIN)/pytest -q -m "e2e and not gpu and alone"

e2e-clusters e2e-workers: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m "e2e and not gpu and not alone and $(if $(filter %-workers,$@),not )cluster"

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
