# Every target works as the first command after a clone: it creates .venv and installs its dependencies, once.
# Needs Python 3.11 or newer and make. `make help` lists the targets.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements-dev.lock
# The versions in $(LOCK). pip accepts hashes only where each requirement has one, and bulltask itself has none.
CONSTRAINTS := $(VENV)/constraints.txt
SOURCES := pyproject.toml $(LOCK) bulltask/lua/manifest.json bulltask/lua/build_hook.py
NODE_CLIENT := tests/interop/node_modules/.package-lock.json
AZURITE := $(VENV)/azurite/node_modules/.package-lock.json
# One environment per major version of the official Python client: tests/interop/official/requirements-2.txt and so on.
OFFICIAL := $(patsubst tests/interop/official/requirements-%.txt,$(VENV)/official-%/installed.stamp,\
	$(wildcard tests/interop/official/requirements-*.txt))
CELERY := $(VENV)/celery/installed.stamp
CELERY_SUITE := $(VENV)/celery-suite/installed.stamp
RELEASE := $(VENV)/release/installed.stamp
ARGS ?=
comma := ,
TESTS ?= tests
# Half of the tests wait for processes to exit and locks to expire, so six processes keep two cores busy.
WORKERS ?= 6

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# In CI, uv installs packages in half of pip's time. If uv fails (it ignores pip's configuration), pip installs them.
# By default, uv does not compile modules: the first import does, but PYTHONDONTWRITEBYTECODE prevents it from saving the
# result.
UV := $(VENV)/uv/bin/uv
define install
$(if $(CI),$(UV) pip install -q $(if $(PYTHONDONTWRITEBYTECODE),--compile-bytecode) --python $(1)/bin/python $(2) || )$(BIN)/pip --python $(1)/bin/python install -q $(2)
endef

.PHONY: help demo demo-spark test test-quick lint docs sync bench clean
help:  ## list the targets (this is the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp  ## run jobs, with a retry and the recovery from a crash, on a temporary server
	$(BIN)/python examples/demo/run.py $(ARGS)

demo-spark: $(VENV)/demo-spark.stamp  ## run the data pipeline: 40,000 jobs from a DataFrame, tables of their events, a report; needs Java
	$(BIN)/python examples/history/run.py $(ARGS)

# Tests start a thousand processes. With PYTHONDONTWRITEBYTECODE, each would compile bulltask again, which takes 0.3 s.
COMPILE = $(BIN)/python -m compileall -q bulltask

test: $(VENV)/dev.stamp externals cds-archive $(VENV)/collected.stamp  ## run the tests; ARGS="-k name" selects tests, ARGS="-m extended" the ones that only CI runs
	@$(COMPILE)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not extended" $(TESTS) $(ARGS)

# pytest rewrites the assertions of the test modules, which takes up to 15 s in each process unless they are cached.
# pytest updates this cache itself when a module changes, unless PYTHONDONTWRITEBYTECODE is set.
$(VENV)/collected.stamp: $(VENV)/dev.stamp $(if $(PYTHONDONTWRITEBYTECODE),$(shell find tests -name '*.py' -not -path '*/node_modules/*'))
	@echo "make: byte-compiling the tests for all processes"
	-@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --collect-only -q tests >/dev/null 2>&1
	@touch $@

# What has no fast tests is not even collected: this saves a quarter of the time before the first test.
NOT_QUICK = tests/fuzz tests/interop tests/mixed_versions tests/spark/local tests/spark/cluster tests/spark/worker \
	tests/chaos/test_matrix.py tests/dashboard/test_browser.py

test-quick: $(VENV)/dev.stamp $(VENV)/collected.stamp  ## run the fast tests, without Java or Node.js, and some of workers; TESTS=tests/spark selects a directory
	@$(COMPILE)
	$(BIN)/python -m pytest -n 4 --dist loadfile --hypothesis-profile=quick \
		-m "not (spark or interop or bench or slow or extended) and (quick or not process)" \
		$(addprefix --ignore ,$(NOT_QUICK)) --ignore-glob "tests/process/test_*.py" $(TESTS) $(ARGS)

lint: $(VENV)/dev.stamp  ## run ruff, mypy and pyright; check import contracts and spelling; find unused code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell
	@echo "$(BIN)/vulture"; ! $(BIN)/vulture | grep "^bulltask/"
	$(BIN)/pyright --pythonpath $(BIN)/python tests/typing

docs: $(VENV)/docs.stamp  ## build the documentation in build/docs; fails on a dead link or anchor
	@rm -rf build/docs
	$(BIN)/python -m sphinx -q -n -W --keep-going -j auto -c docs . build/docs
	@echo "make: open build/docs/index.html"

sync: $(VENV)/dev.stamp  ## generate bulltask/queue/sync from bulltask/queue/aio
	$(BIN)/python tools/generate_sync.py
	PYTHONPATH=. $(BIN)/python tools/generate_setting_types.py

bench: $(VENV)/bench/installed.stamp $(if $(shell command -v npm),$(NODE_CLIENT))  ## compare the speed with other frameworks; ARGS="--only bulltask,huey" selects frameworks
	$(VENV)/bench/bin/python benchmarks/run.py $(ARGS)

# A separate environment, so that Celery and its dependencies do not conflict with the development tools.
$(VENV)/bench/installed.stamp: $(SOURCES) benchmarks/requirements.txt $(CONSTRAINTS) | $(BIN)/python
	@echo "make: installing into $(VENV)/bench"
	test -x $(VENV)/bench/bin/python || $(BIN)/python -m venv $(VENV)/bench
	$(VENV)/bench/bin/pip install -q -c $(CONSTRAINTS) -e '.[embedded]' -r benchmarks/requirements.txt
	@touch $@

# A separate environment, so that the list of components has none of these tools.
$(RELEASE): tools/requirements-release.txt | $(BIN)/python
	@echo "make: installing into $(@D)"
	$(BIN)/python -m venv $(@D)
	$(call install,$(@D),--require-hashes -r $<)
	@touch $@

clean:  ## remove all generated files, including .venv
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* tests/interop/node_modules examples/*/node_modules history-demo bulltask/lua/official
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The lock file constrains every set of extras, so the demos run with the tested versions of their dependencies.
$(VENV)/dev.stamp: $(SOURCES) $(CONSTRAINTS) | $(BIN)/python
	@echo "make: installing into $(VENV)"
	$(call install,$(VENV),-c $(CONSTRAINTS) -e '.[dev]')
	@touch $@ $(VENV)/demo.stamp $(VENV)/demo-spark.stamp $(VENV)/docs.stamp

$(VENV)/demo.stamp: $(SOURCES) $(CONSTRAINTS) | $(BIN)/python
	@echo "make: installing into $(VENV)"
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[demo]'
	@touch $@

$(VENV)/demo-spark.stamp: $(SOURCES) $(CONSTRAINTS) | $(BIN)/python
	@echo "make: installing into $(VENV), including Spark: a few minutes and 900 MB"
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[demo,report,spark]' duckdb
	@touch $@ $(VENV)/demo.stamp

$(VENV)/docs.stamp: pyproject.toml $(LOCK) $(CONSTRAINTS) | $(BIN)/python
	@echo "make: installing into $(VENV)"
	$(BIN)/pip install -q -c $(CONSTRAINTS) -e '.[docs]'
	@touch $@

$(CONSTRAINTS): $(LOCK) | $(BIN)/python
	@sed -e '/^ *--hash/d' -e 's/ *\\$$//' $< >$@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: bulltask needs Python 3.11 or newer; found none of: $(CANDIDATES)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(if $(CI),-$(PYTHON) -m venv $(VENV)/uv && $(VENV)/uv/bin/pip install -q uv)

# Whether $(TESTS) contains all tests, a path with one of the words $(1), or one of the directories $(2) as a whole. What
# no selected test needs is not installed.
selects = $(strip $(filter . tests tests/ $(2) $(addsuffix /,$(2)),$(TESTS)) $(foreach word,$(1),$(findstring $(word),$(TESTS))))

# Missing programs are reported, not installed. CI has all of them.
.PHONY: externals
externals: $(if $(call selects,interop mixed_versions fuzz dashboard test_docs test_examples,tests/unit tests/process),$(if $(shell command -v npm),$(NODE_CLIENT)))
externals: $(if $(call selects,interop mixed_versions),$(OFFICIAL))
externals: $(if $(call selects,tests/django),$(VENV)/django-6/installed.stamp)
externals: $(if $(call selects,celery,tests/process),$(CELERY))
externals: $(if $(call selects,spark),$(if $(CI),$(VENV)/connect/installed.stamp))
externals: $(if $(call selects,spark lake),$(if $(CI),$(if $(shell command -v npm),$(AZURITE))))
externals:
	@command -v npm >/dev/null || echo "make: no Node.js (18 or newer, with npm): the interop tests need it"
	@command -v redis-server >/dev/null || echo "make: no redis-server: the tests that start Redis need it (the others use the embedded Valkey)"
	@command -v spin >/dev/null || echo "make: no spin: the tests that check the model of the worker protocol need it, and gcc"
	@command -v podman >/dev/null || test -S /var/run/docker.sock || echo "make: no container engine (podman and crun, or Docker): the tests that run servers in containers need one"
	@test ! -d tests/spark || command -v java >/dev/null || echo "make: no Java (a JRE, 17 or newer): the Spark tests need it"

# With a CDS archive of Spark's classes (Java's class data sharing), each JVM of the tests takes 6 CPU seconds less.
.PHONY: cds-archive
cds-archive: $(if $(call selects,spark lake),$(if $(shell command -v java),$(VENV)/spark-cds-archive/created.stamp))

$(VENV)/spark-cds-archive/created.stamp: $(VENV)/dev.stamp
	@echo "make: creating a CDS archive of Spark's classes for the tests: a minute, once"
	@mkdir -p $(@D)
	-@$(BIN)/python -m tests.support.spark_archive >$(@D)/create.log 2>&1
	@touch $@

$(NODE_CLIENT): tests/interop/package.json tests/interop/package-lock.json
	cd tests/interop && npm ci --silent --no-audit --no-fund
	@touch $@

# A server with the API of Azure's object store takes 360 MB, so it is installed only in CI.
$(AZURITE):
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(VENV)/azurite azurite@3.37.0
	@touch $@

# A separate environment, because the client pins an older redis-py. Leaving out pip saves a second.
$(VENV)/official-%/installed.stamp: tests/interop/official/requirements-%.txt | $(BIN)/python
	@echo "make: installing into $(@D)"
	$(BIN)/python -m venv --without-pip $(@D)
	$(call install,$(@D),--no-deps -r $<)
	@touch $@

# Celery and Django, to run examples/from_celery as it is before the migration.
$(CELERY): tests/celery_parity/requirements.txt | $(BIN)/python
	@echo "make: installing into $(@D)"
	$(BIN)/python -m venv --without-pip $(@D)
	$(call install,$(@D),--no-deps -r $<)
	@touch $@

# Celery's tests and user guide are only in its source distribution. Nothing of it enters the repository. It needs an
# older python-dateutil than freezegun has.
$(CELERY_SUITE): tests/celery_parity/requirements.txt $(SOURCES) $(CONSTRAINTS) | $(BIN)/python
	@echo "make: installing into $(@D)"
	$(BIN)/python -m venv --without-pip $(@D)
	@sed '/^python-dateutil=/d' $(CONSTRAINTS) > $(@D)/constraints.txt
	$(call install,$(@D),-c $(@D)/constraints.txt -e '.[embedded]' pytest pytest-timeout -r $<)
	$(BIN)/pip download -q --no-deps --no-binary celery -d $(@D) $$(grep ^celery== $<)
	@rm -rf $(@D)/source; mkdir $(@D)/source
	tar xzf $(@D)/celery-*.tar.gz -C $(@D)/source --strip-components=1 --wildcards '*/t/*' '*/docs/userguide/*'
	@touch $@

# Only Django's source distribution contains the tests of its tasks. Without Python 3.12, the directory remains empty.
NEW_PYTHONS = python3 python3.14 python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python)
$(VENV)/django-6/installed.stamp: tests/django/requirements-6.txt | $(BIN)/python
	@echo "make: installing into $(@D)"
	@mkdir -p $(@D)
	for p in $(NEW_PYTHONS); do \
		$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && \
		exec $$p -m venv --without-pip $(@D); \
	done; true
	$(if $(CI),test -x $(@D)/bin/python)
	if test -x $(@D)/bin/python; then $(call install,$(@D),--no-deps -r $<) && \
		$(BIN)/pip --python $(@D)/bin/python download -q --no-deps --no-binary django -d $(@D) \
			$$(grep ^django== $<) && \
		tar xzf $(@D)/django-*.tar.gz -C $(@D) --strip-components=1 --wildcards '*/tests/tasks'; fi
	@touch $@

# The thin client of Spark Connect contains a separate pyspark (250 MB), so it is installed only in CI.
$(VENV)/connect/installed.stamp: tests/spark/cluster/requirements-connect.txt | $(BIN)/python
	@echo "make: installing into $(@D)"
	$(BIN)/python -m venv --without-pip $(@D)
	$(call install,$(@D),--no-deps -r $<)
	@touch $@
