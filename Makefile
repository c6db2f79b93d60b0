# The two doors: `make demo` and `make test`. Each sets itself up in .venv and needs only
# Python 3.11-3.13, make and a JDK 17 or 21.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without bytecode each process of thousands would compile what it imports, and each of the tests'
# workers all tests.
unexport PYTHONDONTWRITEBYTECODE
# The versions that were tried together last, with the digests of their files; empty for the newest
# that setup.py allows.
CONSTRAINTS := constraints.txt
PACKAGING := setup.py pyproject.toml $(CONSTRAINTS)
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# Extras that constraints.txt has: what the targets here install, and what users do; and hopsgpu
# alone.
RESOLVED := demo check dev libraries docs bench kerberos gcs azure kubernetes all
ALONE := hopsgpu
# pip checks digests only where every package has some, and an editable one has none: the packages
# come first. setuptools, which is among them, then installs hopsgpu without a download.
ifdef CONSTRAINTS
install = $(SELECT) set=$(1) $(CONSTRAINTS) > $(VENV)/$(1).txt && \
  $(PIP) --require-hashes --no-deps --requirement $(VENV)/$(1).txt && \
  $(PIP) --no-deps --no-build-isolation --editable .
else
install = $(PIP) --editable '.$(filter-out [$(ALONE)],[$(1)])'
endif
# Below each package, a line names the sets that the package is in.
SELECT := awk '/^[^ \#]/ { entry = "" } { entry = entry $$0 "\n" } \
  /^ +\# for / && index($$0 " ", " " set " ") { printf "%s", entry; found = 1 } \
  END { exit !found }'
NEWEST := .venv-newest
# Several files at a time; the longest ones first, for the last one runs alone.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Each worker with a cluster of its own: 5 GB, and more than one core.
PARALLEL := -n 2 $(BY_FILE)
# What needs Spark on that cluster or disturbs others on its HDFS, and what does not.
SPARK := $(wildcard tests/cluster/test_*.py tests/contract/test_frameworks_*.py)
SPARK += $(addprefix tests/contract/test_,safe_mode.py cluster_managers.py)
LONGEST := lease.py submit.py search.py ranks.py launch.py notebook.py data.py elastic.py gpus.py
LONGEST := $(addprefix tests/cluster/test_,$(LONGEST))
LIGHT := $(filter-out $(SPARK),$(wildcard tests/contract/test_*.py))
LIGHT += $(sort $(shell find tests/unit tests/process -name 'test_*.py'))
LIGHT += $(wildcard tests/attacks/test_*.py)
# First what can do without the cluster, which is started meanwhile.
LIGHT_LONGEST := tests/process/agent/test_agent.py
LIGHT_LONGEST += tests/contract/test_local.py
LIGHT_LONGEST += tests/process/gpu/test_discovery_script.py
LIGHT_LONGEST += $(addprefix tests/process/agent/test_,fork_server.py trials.py)
LIGHT_LONGEST += $(addprefix tests/contract/test_,checkpoints.py publication_kills.py models.py)
LIGHT_LONGEST += $(addprefix tests/contract/test_,gang_queue.py usage.py)
# What a standalone master must do as YARN does.
ACCEPTANCE := launch.py lease.py ranks.py search.py elastic.py score.py run.py attempts.py data.py
ACCEPTANCE += killed_driver.py inventory.py doctor.py checkpoints.py packages.py notebook.py
ACCEPTANCE := $(addprefix tests/cluster/test_,$(ACCEPTANCE) standalone.py)
# The same on Kubernetes, with what only that has.
ON_KUBERNETES := $(filter-out tests/cluster/test_standalone.py,$(ACCEPTANCE))
ON_KUBERNETES += tests/contract/test_cluster_managers.py
ON_KUBERNETES += $(wildcard tests/kubernetes/test_*.py)
# What repeats or varies other tests, or takes long.
SOAK := $(wildcard tests/soak/test_*.py)
SOAK += $(wildcard tests/contract/test_*.py tests/screens/test_*.py)
SOAK += $(shell grep -rl --include='test_*.py' 'mark\.soak' tests/cluster tests/process tests/unit \
  tests/attacks)
# Need a KDC: `make secure`.
SOAK += $(shell grep -l 'mark\.soak' tests/secure/test_*.py)
# The first ones wait for minutes, for tokens to expire and GPUs to idle.
SOAK_LONGEST := $(addprefix tests/,secure/test_token_lifetimes.py cluster/test_idle_gpus.py)
SOAK_LONGEST += tests/secure/test_failover.py
SOAK_LONGEST += $(addprefix tests/soak/test_,soak.py preemption.py other_libraries.py doctor.py)
SOAK_LONGEST += $(addprefix tests/soak/test_,nodes.py gpus.py queues.py)
# Empty, or after how many seconds no further test of the soak is begun; and with which it begins,
# counted round, so that all have their turn where the time is short.
SOAK_SECONDS :=
SOAK_BEGIN := 0
# Of the tests of the cluster, those of what tests/secure has not.
ALSO_SECURE := 'tests/cluster/test_notebooks.py::test_notebooks[pytorch_on_the_lake-tour]'
ALSO_SECURE += tests/cluster/test_score.py::test_the_command_scores_with_a_function_of_a_file_in_cluster_mode
ALSO_SECURE += tests/cluster/test_python_env.py::test_packages_go_before_those_of_the_executors
# PySpark, by the start of its version, and Hadoop; the corner is the pair that CI tries, with
# Kerberos.
CORNER := 3.5/3.3.6
MATRIX := $(CORNER) 3.5/3.5.0 4.0/3.4.3 4/3.3.6 4/3.5.0
# PySpark 3.5 runs on no later one.
PYTHON_OF_MATRIX ?= python3.11

.PHONY: help install demo test standalone kubernetes unit soak screens faults gpu corner secure also-secure docker serving objects other-objects matrix bench check docs constraints newest one python java clean

help:
	@echo "make demo | test | standalone | kubernetes | check | docs | soak | screens | faults | gpu | corner | secure | also-secure | docker | serving | objects | other-objects | matrix | bench | install | constraints | newest | clean"

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
	@$(call install,$(ALONE))
	@touch $@

$(VENV)/.installed-%: $(PACKAGING) | $(VENV)/bin/python
	@echo "installing hopsgpu and what $* needs into $(VENV): minutes, the first time"
	@$(call install,$*)
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
	@# Many of these wait for most of their time.
	$(BIN)/python -m pytest -q -m 'not soak' -n 5 $(BY_FILE) --one-cluster \
	  $(LIGHT_LONGEST) $(filter-out $(LIGHT_LONGEST),$(LIGHT))
	$(BIN)/python -m pytest -m 'not soak' --durations=20 $(PARALLEL) \
	  $(LONGEST) $(filter-out $(LONGEST),$(SPARK))

# The acceptance that YARN has, by the same tests, on a standalone master.
standalone: java $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m 'not soak' --standalone --durations=10 $(PARALLEL) $(ACCEPTANCE)

# The programs of the development cluster on Kubernetes, built once into the user's cache, with Go
# 1.25 or later; then the acceptance that YARN has, on Kubernetes. Needs root, and Debian's packages
# containerd, runc, containernetworking-plugins, iproute2, procps and openssl.
KUBERNETES_CACHE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hopsgpu/kubernetes-1.34.4
KUBERNETES_NAMES := etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl
KUBERNETES_NAMES += gpu-device-plugin
GO_FLAGS = -trimpath -buildvcs=false -ldflags '-s -w $(GO_VERSION)'
GO_VERSION := -X k8s.io/component-base/version.gitVersion=v1.34.4
GO_VERSION += -X k8s.io/component-base/version.gitMajor=1
GO_VERSION += -X k8s.io/component-base/version.gitMinor=34
GO_VERSION += -X k8s.io/client-go/pkg/version.gitVersion=v1.34.4
KUBERNETES_SOURCES := $(wildcard kubernetes-daemons/*.go kubernetes-daemons/*/*.go)
KUBERNETES_SOURCES += kubernetes-daemons/go.mod kubernetes-daemons/go.sum

$(KUBERNETES_CACHE)/.built: $(KUBERNETES_SOURCES)
	@echo "building Kubernetes into $(@D), once; with Kueue: 17 CPU minutes, 6 GB of Go's caches"
	mkdir -p $(@D)
	cd kubernetes-daemons && go build $(GO_FLAGS) -o $(@D)/daemons.new . && \
	  CGO_ENABLED=0 go build $(GO_FLAGS) -o $(@D)/hopsgpu-pause ./pause
	mv $(@D)/daemons.new $(@D)/daemons
	for name in $(KUBERNETES_NAMES); do ln -sf daemons $(@D)/$$name; done
	@touch $@

# Kueue's controller manager and CRDs, for the tests of gangs that Kueue admits.
KUEUE_MODULE := sigs.k8s.io/kueue
$(KUBERNETES_CACHE)/kueue: $(wildcard kubernetes-daemons/kueue/go.*)
	@echo "building Kueue into $(@D), once"
	mkdir -p $(@D)/kueue-crds
	cd kubernetes-daemons/kueue && go build -trimpath -buildvcs=false -ldflags '-s -w' \
	  -o $@.new $(KUEUE_MODULE)/cmd/kueue && \
	  cp --no-preserve=mode $$(go list -m -f '{{.Dir}}' \
	  $(KUEUE_MODULE))/config/components/crd/bases/*.yaml $(@D)/kueue-crds/
	mv $@.new $@

kubernetes: java $(VENV)/.installed-dev $(addprefix $(KUBERNETES_CACHE)/,.built kueue)
	$(BIN)/python -m pytest -m 'not soak' --kubernetes --durations=10 $(PARALLEL) $(ON_KUBERNETES)

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 tests/unit tests/process

# Needs Debian's packages prometheus (or its two programs), chromium and tmux.
soak: java $(VENV)/.installed-bench $(VENV)/.installed-libraries $(VENV)/.installed-kerberos
	$(BIN)/python -m pytest -m soak --durations=20 $(PARALLEL) \
	  $(addprefix --begin-within ,$(SOAK_SECONDS)) --begin-at $(SOAK_BEGIN) $(SOAK_LONGEST) \
	  $(filter-out $(SOAK_LONGEST),$(SOAK))

# The transcripts and pictures of docs/seen.md; needs tmux and Chromium.
screens: java $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q --record tests/screens

# With a loopback device of its own, in which connections can be cut.
OWN_NETWORK := unshare --net $(if $(filter-out 0,$(shell id -u)),--map-root-user)
OWN_NETWORK += sh -c 'ip link set lo up && exec "$$@"' --

# Each fault with each kind of launch, one after the other, on YARN and on a standalone master; then
# the page of what was seen. `make faults FAULTS_ON=--kubernetes` does this on Kubernetes, and needs
# what `make kubernetes` needs.
FAULTS_ON := '' --standalone
faults: java $(VENV)/.installed-dev $(if $(findstring kubernetes,$(FAULTS_ON)),$(KUBERNETES_CACHE)/.built)
	@failed=0; for manager in $(FAULTS_ON); do \
	  $(OWN_NETWORK) $(BIN)/python -m pytest -q --record $$manager tests/faults || failed=1; done; \
	$(BIN)/python -m tests.faults.page; exit $$failed

# What checks this machine's GPUs: a Python 3.11-3.13 with hopsgpu's requirements and a torch that
# has CUDA.
GPU_PYTHON := $(BIN)/python

# One page about this machine's NVIDIA GPUs in under four minutes; then their table in docs/gpus.md.
gpu: java $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.installed-demo)
	@code=0; $(GPU_PYTHON) -m tests.gpu_machine --record || code=$$?; \
	$(GPU_PYTHON) -m tests.gpu_machine.page; exit $$code

.venv-spark%/.installed: $(PACKAGING)
	@echo "installing hopsgpu with PySpark $* into .venv-spark$*"
	$(PYTHON_OF_MATRIX) -m venv .venv-spark$*
	.venv-spark$*/bin/pip install --quiet --disable-pip-version-check --editable '.[matrix]' \
	  'pyspark==$*.*'
	@touch $@

# An environment, and the options of a run, for one corner.
environment = .venv-spark$(firstword $(subst /, ,$(1)))
versions = --spark $(firstword $(subst /, ,$(1))) --hadoop $(lastword $(subst /, ,$(1)))
ENVIRONMENTS := $(sort $(foreach c,$(MATRIX),$(call environment,$(c))))

corner: java $(call environment,$(CORNER))/.installed
	$(call environment,$(CORNER))/bin/python -m pytest -m corner --durations=10 tests/matrix \
	  $(call versions,$(CORNER)) --kerberos

# On a Kerberized cluster; needs krb5-kdc, krb5-admin-server, krb5-user and libkrb5-dev.
secure: java $(VENV)/.installed-dev $(VENV)/.installed-kerberos
	$(BIN)/python -m pytest -m 'not soak' --durations=10 tests/secure

# As alice with a keytab, what the cluster's tests do as nobody in particular.
also-secure: java $(VENV)/.installed-dev $(VENV)/.installed-kerberos
	$(BIN)/python -m pytest --durations=10 --kerberos $(ALSO_SECURE)

# In containers of a dockerd of its own; needs root and Debian's packages docker.io, containerd and
# runc.
docker: java $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q --durations=10 tests/docker

# Servers' packages exclude each other and ours: each has an environment of its own.
SERVERS := kserve 'tritonclient[http]' nvidia-pytriton skops xgboost-cpu joblib
# KServe's storage initialiser, with what it reads HDFS by.
SERVERS += kserve-storage 'hdfs[kerberos]' krbcontext
MLSERVER := mlserver==1.7.1 mlserver-sklearn==1.7.1 mlserver-xgboost==1.7.1 skops

.venv-serving/.installed:
	python3 -m venv .venv-serving && .venv-serving/bin/pip install --quiet $(SERVERS) && touch $@

.venv-mlserver/.installed:
	python3 -m venv .venv-mlserver && .venv-mlserver/bin/pip install --quiet $(MLSERVER) && touch $@

serving: java $(addprefix $(VENV)/.installed-,dev kerberos) .venv-serving/.installed .venv-mlserver/.installed
	$(BIN)/python -m pytest -q tests/serving
	$(BIN)/python -m pytest -q --kerberos tests/serving/test_storage_initializer.py

# The contracts of the lake on the API of S3, without a cluster.
objects: java $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2 $(BY_FILE) --durations=10 tests/objects

# The same on servers with the APIs of Google's and Azure's stores; needs Go and Node.js.
EMULATORS := .emulators/bin/fake-gcs-server .emulators/node_modules/.bin/azurite-blob

.emulators/bin/fake-gcs-server:
	GOBIN=$(CURDIR)/.emulators/bin go install github.com/fsouza/fake-gcs-server@v1.56.1

.emulators/node_modules/.bin/azurite-blob:
	npm install --prefix .emulators --silent --no-fund --no-audit --ignore-scripts azurite@3.37.0

other-objects: java $(addprefix $(VENV)/.installed-,dev gcs azure) $(EMULATORS)
	$(BIN)/python -m pytest -q -n 2 $(BY_FILE) --durations=10 --store gs tests/objects
	$(BIN)/python -m pytest -q -n 2 $(BY_FILE) --durations=10 --store abfss tests/objects

# All of them, whatever fails; then the page of what was seen.
matrix: java $(ENVIRONMENTS:=/.installed)
	@failed=0; $(foreach c,$(MATRIX),$(call environment,$(c))/bin/python -m pytest -q --record \
	  tests/matrix $(call versions,$(c)) || failed=1;) \
	$(call environment,$(CORNER))/bin/python -m tests.matrix.page; exit $$failed

bench: java $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks

# Resolves anew, for all platforms, without installing; then run the tests and commit the file.
constraints: | $(VENV)/bin/python
	$(PIP) uv
	PATH="$(BIN):$$PATH" $(BIN)/python -m tests.constraints $(RESOLVED) > constraints.new
	mv constraints.new constraints.txt

# The newest of all that setup.py allows, in an environment of its own.
newest: java
	rm -rf $(NEWEST)
	$(MAKE) VENV=$(NEWEST) CONSTRAINTS= unit one

one: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/cluster/test_launch.py -k 'values_of_all_ranks or torch_ranks'

clean:
	rm -rf $(VENV) .venv-* .emulators build dist docs/_build *.egg-info
