# Two commands matter: `make demo` and `make test`. Both install what they need on first use, into the active
# virtual environment or, if there is none, into .venv.

SHELL := /bin/bash
# spaces end the names of targets and the words of the shell unless a backslash stands before them
SPACE := $() $()
VENV := $(subst $(SPACE),\$(SPACE),$(or $(VIRTUAL_ENV),$(CURDIR)/.venv))
BIN := $(VENV)/bin
STAMP := $(VENV)/.megamem-installed
# the first interpreter that is new enough; override with `make PYTHON=/path/to/python`
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Linux without an NVIDIA driver gets the CPU build of torch by its local version label, so that pip can never choose
# the CUDA build and its gigabytes; elsewhere the package index's own build is right
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
TORCH ?= torch==$(TORCH_VERSION)$(if $(filter Linux,$(shell uname -s)),$(if $(shell command -v nvidia-smi),,+cpu))
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# bytecode is made on first import instead of for every file of every package; without it each of the many processes
# that tests and jobs start would compile torch and its kin again
unexport PYTHONDONTWRITEBYTECODE
# tests/cluster needs root and packages of the system, tests/package installs packages: they have targets of their own
# as tests/readme has, a script
OWN_TESTS := tests --ignore=tests/cluster --ignore=tests/package
# files with a test marked so; to import all the others too would take half a minute
ALONE_TESTS = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)
# three processes keep two cores busy: tests wait for each other's ranks. Files in the order of their folders: those that
# take minutes, of few tests each, come before the many short ones
SIDE_BY_SIDE := --dist loadfile --no-loadscope-reorder
# of the demo's configuration: `make demo OVERRIDES=training.steps=50` trains a tenth of its steps
OVERRIDES ?=
PIP_INSTALL := $(BIN)/python -m pip install --no-compile --disable-pip-version-check --progress-bar off -qq

.PHONY: install demo dist test test-full test-package test-readme test-cluster test-gpu mutants lint format docs site bench bench-gpu rented clean

install: $(STAMP)  ## Install megamem and its development tools

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -c constraints.txt --upgrade pip  # older ones take twice as long to resolve

# torch comes first: DeepSpeed is a source package whose set-up imports it (hence no build isolation). DS_BUILD_OPS=0
# keeps DeepSpeed from compiling kernels; nothing here needs a compiler.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo Installing into $(VENV): one to two minutes, without a compiler
	$(PIP_INSTALL) -c constraints.txt "$(TORCH)" 2>/dev/null \
		|| $(PIP_INSTALL) -c constraints.txt --extra-index-url $(TORCH_INDEX) "$(TORCH)"
	DS_BUILD_OPS=0 $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch "$@"

demo: install  ## Fetch books, train a model with a memory and one without on two processes, compare them
	$(BIN)/megamem demo $(OVERRIDES)

dist: install  ## Build the sdist, and the wheel from it, into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

# side by side first, then those that need the machine to themselves
test: install  ## All tests but the slow ones and those for a CUDA device
	$(BIN)/python -m pytest -m "not slow and not gpu and not alone" -n 3 --durations 25 $(SIDE_BY_SIDE) $(OWN_TESTS)
	$(BIN)/python -m pytest -m "not slow and not gpu and alone" $(ALONE_TESTS)

test-full: install  ## All tests; those for a CUDA device skip without one
	MEGAMEM_CASES=all $(BIN)/python -m pytest -m "not slow and not gpu and not alone" -n 3 --durations 25 $(SIDE_BY_SIDE) $(OWN_TESTS)
	MEGAMEM_CASES=all $(BIN)/python -m pytest -m "slow or gpu or alone" $(OWN_TESTS)

test-package: install  ## The wheel: what is in it, and that it works in an empty environment
	$(BIN)/python -m pytest tests/package -m package

test-readme:  ## make demo and make test, shortened, under nohup, umask 077, LANG=C and the like; FLAGS=--full in full
	$(PYTHON) tests/readme/hostile.py $(FLAGS)

test-cluster: install  ## Jobs on SLURM, by ssh and across hosts; as root, after tests/cluster/install.sh
	DS_BUILD_OPS=0 $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[dev,cluster]'
	$(BIN)/python -m pytest tests/cluster -m cluster

test-gpu: install  ## The tests for CUDA devices: one, two and four
	$(BIN)/python -m pytest tests/gpu -m gpu

mutants: install  ## Whether tests notice small slips in the code, tried one by one; before releases
	$(BIN)/python -m tests.mutants

lint: install  ## Formatting, lint rules, strict types; the Dockerfiles
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile Dockerfile.cuda

format: install  ## Format the code and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: install  ## Write docs/configuration.md and the drawn figures again, from the code they show
	$(BIN)/python -m megamem.config.document docs/configuration.md
	$(BIN)/python -m docs.figures

site: install  ## Build the documentation as a site in build/site; a warning is an error
	DS_BUILD_OPS=0 $(PIP_INSTALL) -c constraints.txt --no-build-isolation -e '.[dev,docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: install  ## Throughput of memory models over plain attention on the CPU; what a checkpoint costs
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.checkpoints

bench-gpu: install  ## Rates of a CUDA device, throughput and MFU on it; says so and ends without one
	$(BIN)/python -m benchmarks.gpu

rented: install  ## Preflight, test-gpu and bench-gpu on a rented machine, packed into one archive
	$(BIN)/python -m benchmarks.rented

clean:  ## Remove the local environment and caches; runs/ stays
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
