# Main targets: `make demo` and `make test`. Both create .venv once and install into it alone.
#
#   make test PYTHON=python3.12                             another Python (3.11 or newer)
#   make test VENV_FLAGS=--system-site-packages VENV=/tmp/v  use the system's PyTorch, for example with CUDA

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A shared environment keeps system packages within the allowed ranges; other environments have exact versions.
SHARED := $(findstring --system-site-packages,$(VENV_FLAGS))
CONSTRAIN := $(if $(SHARED),,--constraint constraints.txt)

# `--system-site-packages` shares only the base Python's packages; PyTorch may be in an environment of PYTHON.
PURELIB := import sysconfig; print(sysconfig.get_path("purelib"))

MADE := $(VENV)/.made
RUN := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
DEV := $(VENV)/.installed-dev

# In tests PyTorch's threads sleep while they wait instead of spinning: several runs may share the cores, and a
# spinning thread can block the thread it waits for (docs/decisions/03-cpu-kernels.md). The native kernels' threads sleep soon anyway.
test test-all test-clients: export OMP_WAIT_POLICY ?= PASSIVE
# Each test process imports every test, so bytecode is kept even if the environment says otherwise.
test test-all: export PYTHONDONTWRITEBYTECODE =
# A process per core; each starts with its own part of the tests, so that fixtures are made once. One more where
# many tests wait for servers and browsers.
SHARED_OUT := --dist worksteal --durations=30 --numprocesses
ONE_MORE := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
# Each test runs in one of two targets: quick ones and the named smokes in `test`, the others in `test-all`.
QUICK := not slow and not thorough or smoke

.PHONY: help demo serve test test-all test-gpu test-aarch64 test-clients lint types prose format wheel release docs
.PHONY: paper peers-env pin clean distclean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z0-9%-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: $(KERNELS) ## install, fetch a small model, and show speculation at work
	@$(BIN)/specinfer demo $(ARGS)

serve: $(KERNELS) ## serve that model to OpenAI clients at http://127.0.0.1:8000
	@$(BIN)/specinfer serve $(ARGS)

test: lint types ## lint, types, quick tests and smokes: at most 6 minutes on 2 cores
	$(BIN)/python -m pytest -m "$(QUICK)" $(SHARED_OUT) logical $(ARGS)

test-all: prose ## the tests that `make test` leaves out, and the English: 18 minutes on 2 cores
	$(BIN)/python -m pytest -m "not ($(QUICK))" $(SHARED_OUT) $(ONE_MORE) $(ARGS)

test-gpu: $(DEV) ## what runs on a CUDA card; writes a page to benchmarks/results (under 10 minutes)
	$(BIN)/python -m tests.gpu.run $(ARGS)

test-aarch64: $(DEV) ## kernels for aarch64; on other machines with g++-aarch64-linux-gnu and qemu-user
	$(BIN)/python -m pytest tests/unit/kernels/test_native_proof.py -m slow -k aarch64 -rs $(ARGS)

test-clients: $(DEV) ## published clients against one server; ARGS="openai dspy" selects some (minutes, gigabytes)
	$(BIN)/python -m tests.clients.run $(ARGS)

lint: $(DEV) ## ruff
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(DEV) ## mypy --strict
	$(BIN)/python -m mypy --strict

prose: $(DEV) ## the English of pages and comments
	$(BIN)/python tools/prose.py

format: $(DEV) ## let ruff format and sort
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

wheel: export SPECINFER_WHEEL_LEVELS ?= all
wheel: $(MADE) ## build a wheel in dist/ with kernels for every kind of CPU of this architecture: minutes
	$(PIP) wheel --verbose --no-deps --wheel-dir dist --config-settings=--global-option=--quiet .
	@ls -lh dist/specinfer-*.whl

docs: $(DEV) ## build the site in build/site; a warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

release: ## build, check and try sdist and wheel in dist/, and write the release notes: minutes
	$(PYTHON) tools/release.py

paper: $(DEV) ## the SpecInfer paper's questions, asked here; hours, ARGS="--quick --prompts DIR" a part
	$(BIN)/python -m benchmarks.paper.run $(ARGS)

bench-%: $(DEV) ## benchmarks/*/%.py with ARGS="...", for example make bench-peers ARGS=--help
	$(BIN)/python -m $(subst /,.,$(basename $(wildcard benchmarks/*/$*.py))) $(ARGS)

peers-env: ## install the engines of bench-peers in ~/.cache/specinfer-peers (minutes, gigabytes)
	PYTHON="$(PYTHON)" sh benchmarks/peers/install.sh $(ARGS)

pin: $(DEV) ## write the installed versions to constraints.txt
	$(BIN)/python tools/pin_constraints.py

clean: ## remove caches and build results
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove caches, build results and the environment
	rm -rf $(VENV)

$(MADE):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d; specinfer needs 3.11 or newer: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(if $(SHARED),$(PYTHON) -c '$(PURELIB)' > "$$($(BIN)/python -c '$(PURELIB)')/shared.pth")
	@touch $@

$(RUN): $(MADE) pyproject.toml constraints.txt tools/install_torch.py
	@$(BIN)/python tools/install_torch.py
	@echo "installing specinfer and its dependencies"
	@SPECINFER_WHEEL_LEVELS=none $(PIP) install --quiet $(CONSTRAIN) --editable '.[serve]'
	@$(BIN)/python -m compileall -q specinfer
	@touch $@

$(KERNELS): $(RUN) $(wildcard specinfer/kernels/cpu/*)
	@echo "compiling the native kernels (a minute; once per machine)"
	@$(BIN)/python -m specinfer.kernels
	@touch $@

$(DEV): $(RUN) | $(KERNELS)
	@echo "installing the tools for tests and benchmarks"
	@SPECINFER_WHEEL_LEVELS=none $(PIP) install --quiet $(CONSTRAIN) --editable '.[dev]'
	@touch $@
