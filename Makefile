# Two commands matter: `make demo` and `make test`. Both make .venv first, once.

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast lint format bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

demo: $(VENV)/.installed ## watch a real model answer through token trees
	@$(BIN)/specinfer demo

test: lint ## the whole test-suite, lint and types; what CI runs
	$(BIN)/python -m pytest

test-fast: $(VENV)/.dev ## the tests that need no real model, in under 90 seconds
	$(BIN)/python -m pytest -m "not slow"

lint: $(VENV)/.dev ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## rewrite the code as ruff would have it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed ## the default model without and with speculation, on the built-in prompts
	$(BIN)/specinfer bench --model smollm2-135m --ngram

clean: ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt tools/install_torch.py | $(VENV)/bin/python
	@echo "Installing specinfer into $(VENV) (a minute or two, once)"
	@$(PIP) pip
	@$(BIN)/python tools/install_torch.py
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "Installing the development tools into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $@
