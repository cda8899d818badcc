# The commands of this project. `make` alone lists them.
#
# Needs: Python 3.11 or newer with pip, make, git. Not needed: uv, virtualenv, ensurepip (Debian splits that off).
# Everything pip installs is locked by hash in requirements/*.txt; a stamp in the venv remembers which lock it has.

PYTHON ?= python3
ARGS ?=

VENV := .venv
BENCH_VENV := .venv-bench
BIN := $(VENV)/bin

# Settings of the caller's own pip or Python that would put packages elsewhere or refuse ours. Those that say how to
# reach a package index (PIP_INDEX_URL, PIP_CERT, PIP_TRUSTED_HOST, …) stay as they are.
unexport PYTHONHOME PYTHONPATH PYTHONSTARTUP PYTHONUSERBASE PYTHONSAFEPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV
unexport PIP_USER PIP_TARGET PIP_PREFIX PIP_ROOT PIP_PYTHON PIP_REQUIRE_VIRTUALENV PIP_REQUIREMENT PIP_CONSTRAINT
unexport PIP_REQUIRE_HASHES PIP_EDITABLE PIP_NO_DEPS PIP_DRY_RUN PIP_REPORT PIP_IGNORE_INSTALLED PIP_NO_BINARY
unexport PIP_ONLY_BINARY PIP_PLATFORM PIP_ABI PIP_IMPLEMENTATION PIP_PYTHON_VERSION PIP_PRE PIP_UPGRADE PIP_QUIET
unexport PIP_USE_PEP517 PIP_NO_BUILD_ISOLATION PIP_CONFIG_SETTINGS PIP_GLOBAL_OPTION PIP_LOG PIP_SRC PYTEST_ADDOPTS
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1
export PIP_ROOT_USER_ACTION := ignore

# The system's pip installs into the venv from outside, so that the venv needs none of its own.
pip_install = $(PYTHON) -m pip --python $(1)/bin/python install --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- setting up -------------------------------------------------------------------------------------------------------

.PHONY: setup
setup: $(VENV)/.run ## create .venv; the command is then .venv/bin/coatcheck
	@echo 'ready: $(BIN)/coatcheck'

$(VENV)/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Coatcheck needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3' >&2; exit 1; }
	@$(PYTHON) -m pip --version >/dev/null \
	  || { echo 'Coatcheck needs pip 22.3 or newer for $(PYTHON) (Debian: apt-get install python3-pip)' >&2; exit 1; }
	$(PYTHON) -m venv --clear --without-pip $(VENV)

$(VENV)/.run: requirements/run.txt pyproject.toml $(VENV)/pyvenv.cfg
	$(call pip_install,$(VENV)) --require-hashes --no-deps -r requirements/run.txt
	$(call pip_install,$(VENV)) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.run
	$(call pip_install,$(VENV)) --require-hashes --no-deps -r requirements/test.txt
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.test
	$(call pip_install,$(VENV)) --require-hashes --no-deps -r requirements/dev.txt
	@touch $@

# Node's packages, for real clients. Without npm, or without its registry, their tests are skipped and say so.
$(VENV)/.node: tests/e2e/programs/package-lock.json $(VENV)/pyvenv.cfg
	@mkdir -p $(VENV)/node && cp tests/e2e/programs/package.json tests/e2e/programs/package-lock.json $(VENV)/node
	@if ! command -v npm >/dev/null; then echo 'no npm: the tests of undici will be skipped'; \
	elif npm ci --prefix $(VENV)/node --ignore-scripts --no-audit --no-fund --silent; then touch $@; \
	else echo 'npm could not install undici: its tests will be skipped'; fi

$(VENV)/.fuzz: requirements/fuzz.txt $(VENV)/.test
	$(call pip_install,$(VENV)) --require-hashes --no-deps -r requirements/fuzz.txt
	@touch $@

$(BENCH_VENV)/.bench: requirements/bench.txt
	$(PYTHON) -m venv --clear --without-pip $(BENCH_VENV)
	$(call pip_install,$(BENCH_VENV)) --require-hashes --no-deps -r requirements/bench.txt
	@touch $@

# --- daily ------------------------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(VENV)/.run ## show the whole idea on this machine, step by step, checked on the wire
	$(BIN)/coatcheck demo $(ARGS)

.PHONY: check
check: $(VENV)/.dev ## formatting, lint, types, import contracts (under a minute)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: $(VENV)/.dev ## put the formatting right
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: test
test: $(VENV)/.test $(VENV)/.node ## every test but the long ones (under 10 minutes on two cores)
	$(BIN)/python -m pytest -m "not long" -n 2 $(ARGS)

.PHONY: test-long
test-long: $(VENV)/.test $(VENV)/.node ## kills, waits and full sweeps (under 25 minutes)
	$(BIN)/python -m pytest -m long -n 2 $(ARGS)

.PHONY: mutants
mutants: $(VENV)/.test ## apply each security test's one-line change and see the test turn red
	$(BIN)/python -m tests.mutants.run $(ARGS)

FUZZ_SECONDS ?= 300

.PHONY: fuzz
fuzz: $(VENV)/.fuzz ## coverage-guided fuzzing of framing, finder and scrubber, FUZZ_SECONDS for each target
	$(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_SECONDS) $(ARGS)

SOAK_MINUTES ?= 30

.PHONY: soak
soak: $(VENV)/.test ## real processes under mixed load and faults for SOAK_MINUTES; fails where anything grows
	$(BIN)/python -m tests.soak.run --minutes $(SOAK_MINUTES) $(ARGS)

# RUNLEVEL=1: it is installed, not started.
install = { test "$$(id -u)" = 0 && apt-get update -qq && RUNLEVEL=1 apt-get install -y -qq $(1); }

.PHONY: bench
bench: $(VENV)/.test $(BENCH_VENV)/.bench ## this proxy beside nginx, haproxy, Envoy, mitmproxy (15 minutes; one part: ARGS="--only reverse")
	@command -v nginx >/dev/null || test -x /usr/sbin/nginx || $(call install,nginx-light) \
	  || { echo 'the benchmark compares with nginx (Debian: apt-get install nginx-light)' >&2; exit 1; }
	@command -v haproxy >/dev/null || test -x /usr/sbin/haproxy || $(call install,haproxy) \
	  || echo 'without haproxy its rows are left out (Debian: apt-get install haproxy)' >&2
	$(if $(findstring --only,$(ARGS)),,$(BIN)/python -m bench.rotation)
	$(if $(findstring --only,$(ARGS)),,$(BIN)/python -m bench.control_plane --seconds 2)
	$(BIN)/python -m bench.run $(ARGS)

# --- now and then -----------------------------------------------------------------------------------------------------

lock = $(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links --no-annotate \
  --python-version 3.11 --custom-compile-command 'make lock'

.PHONY: lock
lock: $(VENV)/.dev ## compile requirements/*.txt again (ARGS=--upgrade takes newer versions)
	$(lock) pyproject.toml --extra dev -o requirements/dev.txt $(ARGS)
	$(lock) pyproject.toml --extra test -c requirements/dev.txt -o requirements/test.txt $(ARGS)
	$(lock) pyproject.toml -c requirements/dev.txt -o requirements/run.txt $(ARGS)
	$(lock) requirements/bench.in -o requirements/bench.txt $(ARGS)
	$(lock) requirements/fuzz.in -c requirements/dev.txt -o requirements/fuzz.txt $(ARGS)

.PHONY: clean
clean: ## remove the venvs, caches and what was built
	rm -rf $(VENV) $(BENCH_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
