PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# One more than the cores of a small machine, since many tests wait for processes that they start.
WORKERS ?= 3
# The tests start Python a thousand times: bytecode is kept even where the environment says not to. A module's tests
# run in one worker, which makes what they share once; and a test that hangs fails.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
PARALLEL := -n $(WORKERS) --no-loadscope-reorder --dist
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.PHONY: run test test-gpu gpu-wheels test-kernels test-slurm test-slow test-fuzz check bench clean

run: $(VENV)/.run  ## install, and train the bundled model with two ranks; ARGS="key=value …" are overrides
	@$(BIN)/launch nproc_per_node=2 $(ARGS)

test: $(VENV)/.test  ## install the test extra, and run the tests; ARGS="tests/plan -k nic" selects
	@$(PYTEST) $(PARALLEL) loadscope --timeout=300 $(ARGS)

test-gpu: $(VENV)/.test  ## the tests that need an NVIDIA GPU; they skip, saying why, where there is none
	@$(PYTEST) -m gpu tests/gpu --timeout=300 $(ARGS)

GPU_WHEELS := .gpu-wheels
NEEDED := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  tests = [need for need in project["optional-dependencies"]["test"] if need.startswith(("hypothesis", "pytest>", "pytest-timeout"))]; \
  print(*(need for need in project["dependencies"] + tests if not need.startswith(("torch", "numpy"))), sep="\n")
PLATFORMS := $(foreach libc,_2_28 _2_27 _2_17 2014,--platform=manylinux$(libc)_x86_64)
# Compiled wheels for each of these Pythons, all others once; antlr4 is published as source alone.
gpu-wheels: $(VENV)/.test  ## .gpu-wheels, which tests/gpu/prove needs on a machine with a GPU and no network
	@rm -rf $(GPU_WHEELS) && mkdir $(GPU_WHEELS)
	@$(BIN)/python -c '$(NEEDED)' >$(GPU_WHEELS)/requirements.txt
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(GPU_WHEELS) "antlr4-python3-runtime==4.9.*"
	@for version in 3.11 3.12 3.13 3.14; do \
	  $(BIN)/python -m pip download --quiet --only-binary=:all: --implementation=cp --python-version=$$version \
	    $(PLATFORMS) --dest=$(GPU_WHEELS) --find-links=$(GPU_WHEELS) pip -r $(GPU_WHEELS)/requirements.txt || exit; \
	done
	@du -sh $(GPU_WHEELS)

test-kernels: $(VENV)/.test  ## placement on real kernels, booted in QEMU (README in tests/kernels); ARGS="-k 64-cpus" selects
	@$(PYTEST) -m kernels tests/kernels -v --timeout=900 --durations=8 $(ARGS)

test-slurm: $(VENV)/.test  ## on a real SLURM of several nodes, started here (slurm/sandbox); ARGS="-k preempt" selects
	@$(PYTEST) -m slurm tests -v --timeout=900 --durations=8 $(ARGS)

test-slow: $(VENV)/.test  ## what takes long: the wheel, frameworks, real tuning and trainings; ARGS="-k wheel" selects
	@$(PYTEST) -m slow $(PARALLEL) loadgroup --timeout=600 --durations=8 $(ARGS)

test-fuzz: $(VENV)/.test  ## a thousand new examples of whatever is tested by random ones; LAUNCH_FUZZ=N for N
	@LAUNCH_FUZZ=$${LAUNCH_FUZZ:-1000} $(PYTEST) -m hypothesis $(PARALLEL) loadscope $(ARGS)

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
