# The two doors: `make demo` and `make test`. Each sets itself up in .venv and needs only
# Python 3.11-3.13, make and a JDK 17 or 21.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without bytecode each process of thousands would compile what it imports, and each of the tests'
# workers all tests.
unexport PYTHONDONTWRITEBYTECODE
PACKAGING := setup.py pyproject.toml
# Several files at a time; the longest ones first, for the last one runs alone.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Each worker with a cluster of its own: 5 GB, and more than one core.
PARALLEL := -n 2 $(BY_FILE)
# What needs Spark on that cluster or disturbs others on its HDFS, and what does not.
SPARK := $(wildcard tests/cluster/test_*.py tests/contract/test_frameworks_*.py)
SPARK := $(filter-out tests/cluster/test_cluster_lifecycle.py,$(SPARK))
SPARK += tests/contract/test_safe_mode.py
LONGEST := search.py lease.py docs.py submit.py publishing.py notebook.py notebooks.py pipeline.py
LONGEST := $(addprefix tests/cluster/test_,$(LONGEST) ranks.py launch.py)
LIGHT := $(filter-out $(SPARK),$(wildcard tests/cluster/test_*.py tests/contract/test_*.py))
LIGHT += $(sort $(shell find tests/unit tests/process -name 'test_*.py'))
LIGHT_LONGEST := $(addprefix tests/contract/test_,checkpoints.py publication_kills.py models.py)
LIGHT_LONGEST += tests/cluster/test_cluster_lifecycle.py
LIGHT_LONGEST += $(addprefix tests/process/agent/test_,supervisor.py fork_server.py)
LIGHT_LONGEST += tests/process/gpu/test_discovery_script.py tests/unit/control/test_heartbeat.py
LIGHT_LONGEST += tests/process/agent/test_tmpdir_links.py
# With variants of what other tests have.
SOAK := $(wildcard tests/soak/test_*.py)
SOAK += $(shell grep -l 'mark\.soak' tests/cluster/test_*.py tests/contract/test_*.py)
SOAK_LONGEST := $(addprefix tests/soak/test_,soak.py other_libraries.py nodes.py gpus.py)

.PHONY: help install demo test unit soak bench check docs python java clean

help:
	@echo "make demo | test | check | docs | soak | bench | install | clean"

python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "hopsgpu needs Python 3.11 to 3.13 ($$($(PYTHON) --version 2>&1)): name one with make PYTHON=..." >&2; exit 1; }

# Told before gigabytes are downloaded, by a Python that has no package yet: as a script, since the
# package that the module is in imports some.
java: python
	@PYTHONPATH=. $(PYTHON) -P hopsgpu/devcluster/java.py

$(VENV)/bin/python: | python
	$(PYTHON) -m venv $(VENV)

# A stamp for each set of packages, so that a second run installs nothing.
$(VENV)/.installed: $(PACKAGING) | $(VENV)/bin/python
	@echo "installing hopsgpu into $(VENV)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-%: $(PACKAGING) | $(VENV)/bin/python
	@echo "installing hopsgpu and what $* needs into $(VENV): minutes, the first time"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

install: $(VENV)/.installed

demo: java $(VENV)/.installed-demo
	$(BIN)/python examples/demo.py

check: $(VENV)/.installed-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_layers.py \
	  tests/process/gpu/test_health_check.py::test_the_file_is_what_the_modules_are

# The pages, into docs/_build/html: built, and their links, code and completeness checked.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs docs/_build/html
	$(BIN)/python -m pytest -q tests/docs

test: java $(VENV)/.installed-dev
	@# Most of these wait for most of their time.
	$(BIN)/python -m pytest -q -m 'not soak' -n 4 $(BY_FILE) --one-cluster \
	  $(LIGHT_LONGEST) $(filter-out $(LIGHT_LONGEST),$(LIGHT))
	$(BIN)/python -m pytest -m 'not soak' --durations=20 $(PARALLEL) \
	  $(LONGEST) $(filter-out $(LONGEST),$(SPARK))

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 tests/unit tests/process

soak: java $(VENV)/.installed-dev $(VENV)/.installed-libraries
	$(BIN)/python -m pytest -m soak --durations=20 $(PARALLEL) $(SOAK_LONGEST) \
	  $(filter-out $(SOAK_LONGEST),$(SOAK))

bench: java $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist docs/_build *.egg-info
