# Everything a newcomer needs: `make serve` in one terminal, a client in another, `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?=
MODEL ?=
# Each of the many processes of a server or a test would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE
export CONFIG MODEL

.DEFAULT_GOAL := help
.PHONY: help serve test test-long quick check format pictures build lock clean

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18
	@echo
	@echo '  MODEL=path make serve                      serve a local Hugging Face folder or GGUF file'
	@echo '  MODEL=org/name make serve                  download and serve a model of the Hugging Face hub'
	@echo '  CONFIG=configs/serve/x.yaml make serve     serve any config'

serve: $(VENV)/.installed ## Install what is missing and serve the demo model on 127.0.0.1:8000
	@$(BIN)/legato serve "$${CONFIG:-$${MODEL:-configs/serve/demo.yaml}}"

# Two workers: half of the suite's time is waiting for processes to start. In the order of
# tests/conftest.py: by itself xdist begins with the modules of many short tests.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder

# Two tests at a time on two cores: the times of the fault table hold for one (tests/faults).
test: $(VENV)/.installed-dev ## Install what is missing and run the test suite
	@LEGATO_FAULTS_FACTOR=$${LEGATO_FAULTS_FACTOR:-8} $(PYTEST) -m "not long"

test-long: $(VENV)/.installed-dev ## Run the tests that take minutes each: chaos, how servers end, peers side by side
	@$(BIN)/python -m pytest -m long

quick: $(VENV)/.installed-dev ## Run the pure tests (no Ray, no tensor work, no long study), in two minutes
	@$(PYTEST) --quick

check: $(VENV)/.installed-dev ## Lint, formatting, strict types, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layers.py

format: $(VENV)/.installed-dev ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pictures: $(VENV)/.installed-dev ## Make figure 7, the notebooks' outputs and the console's picture anew
	$(BIN)/legato simulate --figure7 --out app/simulate/paper
	$(BIN)/python notebooks/render.py
	$(BIN)/python -m tests.app.console.take_screenshot

build: $(VENV)/.installed ## Rebuild the CPU kernels in place
	$(BUILD)

lock: $(VENV)/.installed-dev ## Write the installed versions, which the tests should have passed with
	@$(BIN)/python -m tests.constraints

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info kernels/cpu/*.so

# Stamps: the environment is remade when the dependencies or the C++ sources change.
SOURCES := pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/src/*)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || \
		{ echo "Legato needs Python 3.11 or 3.12: name one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

# The library is compiled while packages are fetched and unpacked: for this processor to serve, and
# for all of them to be tested. Of the packages' modules, Python compiles those that are used when
# they are first imported. The pip of Python 3.11 takes twice as long to choose versions. Editable
# packages are said to be shadowed by folders of their names, which here they are themselves.
PIP := PYTHONWARNINGS=ignore:Editable $(BIN)/python -m pip install --quiet \
	--disable-pip-version-check --no-compile -c constraints.txt
BUILD := $(BIN)/python setup.py -q build_ext --inplace
TOOLS := 'pip>=26' 'setuptools>=77'

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP) $(TOOLS)
	LEGATO_LIBRARY=native $(BUILD) & LEGATO_LIBRARY=apart $(PIP) -e . && wait $$!
	@touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(PIP) $(TOOLS)
	$(BUILD) & LEGATO_LIBRARY=apart $(PIP) -e '.[dev]' && wait $$!
	@touch $@ $(VENV)/.installed
