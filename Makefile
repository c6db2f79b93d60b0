# The two doors: `make demo` and `make test`. Each sets itself up in .venv and needs only
# Python 3.11-3.13, make and a JDK 17 or 21.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGING := setup.py pyproject.toml
MODULES = $(shell find hopsgpu -name '*.py')

.PHONY: help install demo test unit soak bench check java clean

help:
	@echo "make demo | test | check | soak | bench | install | clean"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "hopsgpu needs Python 3.11 to 3.13; $$($(PYTHON) --version) was found: name another with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of packages, so that a second run installs nothing.
$(VENV)/.installed: $(PACKAGING) | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-%: $(PACKAGING) | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

install: $(VENV)/.installed

java: $(VENV)/.installed
	@$(BIN)/python -m hopsgpu.cluster.java

demo: $(VENV)/.installed-demo java
	$(BIN)/python examples/demo.py

check: $(VENV)/.installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_layers.py

test: $(VENV)/.installed-dev java
	$(BIN)/python -m pytest tests/unit tests/contract tests/cluster

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/unit

soak: $(VENV)/.installed-dev java
	$(BIN)/python -m pytest tests/soak

bench: $(VENV)/.installed-dev java
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info
