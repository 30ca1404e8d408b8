# One command each: every target does its own set-up first, and a second call skips it.
#   make demo | make serve ARGS="--dtype float32" | make test | make test-full | make check | make soak
#   make experts | make bench-peers ARGS="--quick" | bench-decode | bench-memory | bench-faults | bench-idle
#   make bench-online ARGS="--quick" | bench-shifts | bench-speeds | bench-lengths | bench-grid | bench-adapters
#   make bench-medusa | bench-routes | bench-router | bench-traffic | bench-conversation | bench-defaults | bench-proof | test-cluster | test-clients
# PYTHON=python3.12        the interpreter for .venv (3.11 or newer)
# TORCH_INDEX=<index url>  where torch comes from; empty: pip's default (CUDA build on Linux)

SHELL := /bin/sh
.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STAMPS := $(VENV)/.stamps
CLIENTS := .venv-clients
PY := $(BIN)/python
PIP := $(PY) -m pip install -qq --no-input --constraint constraints.txt
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)
MIN_PYTHON := import sys; sys.exit(sys.version_info < (3, 11))

# ninja (for DeepSpeed's op build) is a wheel in .venv: it must be found by name.
export PATH := $(BIN):$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DS_BUILD_OPS := 0
export VIRTUAL_ENV :=
export PYTHONPATH :=

.PHONY: help setup demo serve experts bench-peers bench-decode bench-memory bench-faults soak \
	bench-online bench-shifts bench-speeds bench-lengths bench-grid bench-adapters bench-medusa \
	bench-routes bench-router bench-traffic bench-idle bench-conversation bench-defaults bench-proof test test-full test-clients test-cluster test-gpu check \
	format clean

help:
	@sed -n '2,8s/^# *//p' Makefile

setup: $(STAMPS)/ops
	@:

$(STAMPS)/venv:
	@set -e; python=; \
	for candidate in $(PYTHON) python3 python3.11 python3.12 python3.13; do \
	  if "$$candidate" -c '$(MIN_PYTHON)' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	test -n "$$python" || { echo "paceline: needs Python 3.11 or newer (set PYTHON=...)" >&2; exit 1; }; \
	command -v c++ >/dev/null || command -v g++ >/dev/null || \
	  { echo "paceline: needs a C++ compiler (c++ or g++) on PATH" >&2; exit 1; }; \
	"$$python" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || \
	  { echo "paceline: needs Python's C headers (Debian: python3-dev)" >&2; exit 1; }; \
	echo "paceline: making $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv --clear $(VENV) || \
	  { echo "paceline: needs Python's venv module (Debian: python3-venv)" >&2; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

# torch first and alone: DeepSpeed's build imports it.
$(STAMPS)/torch: $(STAMPS)/venv constraints.txt
	@echo "paceline: installing $(TORCH)"
	@$(PIP) pip setuptools wheel
	@$(PIP) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

$(STAMPS)/packages: $(STAMPS)/torch pyproject.toml
	@echo "paceline: installing the pinned dependencies"
	@$(PIP) --no-build-isolation --editable . --group dev
	@touch $@

# DeepSpeed's communication op for CPUs, once: a trainer must not compile while it serves.
$(STAMPS)/ops: $(STAMPS)/packages
	@echo "paceline: building DeepSpeed's CPU op (about a minute, once)"
	@$(PY) -m paceline.actors.training.deepspeed_setup
	@touch $@

demo: setup
	@$(PY) -m paceline.deploy.cli.main demo $(ARGS)

serve: setup
	@exec $(PY) -m paceline.deploy.cli.main serve $(ARGS)

# Studies: benchmarks/README.md.
experts: setup
	@$(PY) benchmarks/experts.py $(ARGS)

bench-decode bench-memory bench-router bench-idle bench-faults bench-conversation bench-defaults: bench-%: setup
	@$(PY) benchmarks/$*.py $(ARGS)

# Paceline over HTTP against llama.cpp, OpenVINO, vLLM and transformers: all modes of each on the same
# weights, ARGS="--target FOLDER_OR_GGUF --data FOLDER". Their environments (11 GB) are made once in
# Paceline's cache.
bench-peers: setup
	@PYTHONPATH=benchmarks $(PY) -m peers $(ARGS)

soak: setup
	@$(PY) benchmarks/soak.py $(ARGS)

bench-shifts bench-speeds bench-lengths bench-grid bench-medusa bench-traffic bench-routes: bench-%: setup
	@PYTHONPATH=benchmarks $(PY) -m online.$* $(ARGS)

bench-adapters: setup
	@PYTHONPATH=benchmarks $(PY) -m online.grid --adapters $(ARGS)

bench-online: setup
	@PYTHONPATH=benchmarks $(PY) -m online.streams $(ARGS)

# All studies of docs/results.md, hours: ARGS="--data FOLDER", or "--data hf", or "--quick". What is
# there is kept.
bench-proof: bench-online bench-lengths bench-shifts bench-speeds bench-grid bench-routes bench-medusa \
	bench-traffic

check: $(STAMPS)/packages
	ruff check .
	ruff format --check .
	mypy -p paceline
	mypy tests/gpu  # which run on few machines
	lint-imports

format: setup
	ruff check --fix .
	ruff format .

# By files, whose fixtures take long to make, over two processes: each of them computes on one
# thread, and none starts Ray.
SHARED_OUT := --numprocesses auto --maxprocesses 2 --dist loadfile

# Each tier in a process of its own: what one sets (threads, environment) the next must not feel.
# What needs one core runs beside the rest of the set-up.
test: $(STAMPS)/packages
	@{ $(MAKE) --no-print-directory check && $(PY) -m pytest -m "not full" tests/packaging; } & \
	  first=$$!; $(MAKE) --no-print-directory setup && wait $$first
	$(PY) -m pytest -m "not full" $(SHARED_OUT) tests/unit tests/property
	$(PY) -m pytest -m "not full" --durations=8 tests/serve
	$(PY) -m pytest -m "not full" --durations=8 tests/distributed

test-full: setup check $(CLIENTS)/.made
	$(PY) -m pytest tests/packaging
	$(PY) -m pytest $(SHARED_OUT) tests/unit tests/property
	$(PY) -m pytest -rs tests/serve
	$(PY) -m pytest -rs tests/distributed
	$(PY) -m pytest -rs tests/clients

# Other people's clients against the default server (docs/clients.md), some minutes. Their environment
# has 2.6 GB: what one of them pins must not decide what Paceline runs on.
test-clients: setup $(CLIENTS)/.made
	$(PY) -m pytest -v tests/clients $(ARGS)

$(CLIENTS)/.made: $(STAMPS)/venv tests/clients/requirements.txt constraints.txt
	@echo "paceline: making $(CLIENTS), the environment of tests/clients"
	@$(PY) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install -qq --no-input "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@$(CLIENTS)/bin/python -m pip install -qq --no-input --requirement tests/clients/requirements.txt
	@touch $@

# Three hosts of this machine's own, `ray up` and the death of one: root, and Debian's iproute2,
# openssh-server and rsync. Eight minutes on two cores that have nothing else to do.
test-cluster: setup
	$(PY) -m pytest -v tests/cluster $(ARGS)

# On a machine with a GPU: CUDA graphs, the engine, training and the whole system on it. The engine's
# unit tests have their models there with PACELINE_TEST_DEVICE=cuda; some of them ask what CPUs do.
test-gpu: setup
	$(PY) -m pytest -v tests/gpu $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .cache build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
