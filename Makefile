PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Of `make test`: twice the cores of a small machine, since many tests wait for processes that they start.
WORKERS ?= 4
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-gpu gpu-wheels test-kernels test-slurm test-slow check bench clean

run: $(VENV)/.run  ## install, and train the bundled model with two ranks; ARGS="key=value …" are overrides
	@$(BIN)/launch nproc_per_node=2 $(ARGS)

# The tests start Python a thousand times: bytecode is kept even where the environment says not to.
test: $(VENV)/.test  ## install the test extra, and run all tests; WORKERS=1 one after the other
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-gpu: $(VENV)/.test  ## the tests that need an NVIDIA GPU; they skip, saying why, where there is none
	@$(BIN)/python -m pytest -m gpu

gpu-wheels: $(VENV)/.test  ## .gpu-wheels, which tests/gpu/prove needs on a machine with a GPU and no network
	@$(BIN)/python -m tests.gpu.wheels

test-kernels: $(VENV)/.test  ## placement on real kernels, booted in QEMU (README in tests/kernels); ARGS="-k 64-cpus" selects
	@$(BIN)/python -m pytest -m kernels tests/kernels -v --durations=8 $(ARGS)

test-slurm: $(VENV)/.test  ## on a real SLURM of several nodes, started here (slurm/sandbox); ARGS="-k preempt" selects
	@$(BIN)/python -m pytest -m slurm tests -v --durations=8 $(ARGS)

test-slow: $(VENV)/.test  ## tests that take a minute or more each; ARGS="-k idle" selects
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m slow -n $(WORKERS) --dist worksteal --durations=8 $(ARGS)

check: $(VENV)/.test  ## ruff, mypy, and who may import whom
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: $(VENV)/.test  ## what the launcher costs and how well it places, beside torchrun; ARGS="start shim …" selects
	@$(BIN)/python -m tests.benchmarks $(ARGS)

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "launch needs Python 3.11 or later: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV), with what the tests need"
	@$(PIP) --editable ".[test]"
	@touch $@
