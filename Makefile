# Every target works on a bare clone: it makes .venv first and renews it when a dependency changes.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install -qq -c constraints.txt
# One process a core, and one thread a process: more only take turns.
PYTEST = $(BIN)/pytest -n auto --dist worksteal
ROOMS := $(shell sed -n 's/^"mycelia\.[a-z]*" = "\([a-z]*\)".*/\1/p' pyproject.toml)
# mypy and import-linter cannot see an editable install, so they read the rooms through these links.
LINKS := build/links

.PHONY: help demo test soak lint style layout types imports format proto bench docs clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

demo: $(VENV)/.core ## install, then simulate a federation of 100 clients
	@$(BIN)/mycelia simulate quickstart

test: $(VENV)/.dev ## everything but the long schedules
	@$(PYTEST) -m "not slow"

soak: $(VENV)/.dev ## the long schedules
	@$(PYTEST) -m slow

lint: style layout types imports ## style, types and import directions (-k: go on after a failure)

style: $(VENV)/.dev
	@echo "ruff check"
	@$(BIN)/ruff check .

layout: $(VENV)/.dev
	@echo "ruff format"
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev $(LINKS)
	@echo "mypy"
	@MYPYPATH=$(LINKS) $(BIN)/mypy --strict $(ROOMS:%=-p mycelia.%) | sed 's|^$(LINKS)/mycelia/||'

imports: $(VENV)/.dev $(LINKS)
	@echo "import-linter"
	@PYTHONPATH=$(LINKS) $(BIN)/lint-imports --no-logo --cache-dir build/imports

format: $(VENV)/.dev ## let ruff fix and format what it can
	@$(BIN)/ruff check -q --fix . || true
	@$(BIN)/ruff format .

proto: $(VENV)/.dev $(LINKS) ## write the Python of the wire messages from federation.proto
	@$(BIN)/python -m grpc_tools.protoc -I $(LINKS) --python_out=$(LINKS) --pyi_out=$(LINKS) mycelia/aggregator/wire/federation.proto

bench: $(VENV)/.core ## every benchmark, one JSON object each
	@for script in $(sort $(wildcard benchmarks/[a-z]*.py)); do echo "$$script" >&2; $(BIN)/python "$$script"; done

docs: $(VENV)/.dev ## links and examples of README, docs/ and docstrings
	@$(BIN)/pytest docs

clean: ## remove what the other targets made, .venv included
	@rm -rf .venv build dist .nox *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Mycelia needs Python 3.11 or newer, and '$(PYTHON)' is not. Name another: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2> /dev/null \
	  || { echo "'$(PYTHON)' cannot make a virtual environment. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Making $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.core: $(VENV)/.made pyproject.toml constraints.txt
	@echo "Installing Mycelia (PyTorch is large: the first time takes a minute or more) ..."
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "Installing the test and lint tools ..."
	@$(PIP) --no-build-isolation -e '.[dev]'
	@$(PIP) --no-deps torchattacks # its pins ask for an old requests and for torchvision, which it does not use
	@touch $@

$(LINKS): pyproject.toml
	@rm -rf $@
	@mkdir -p $@/mycelia
	@for room in $(ROOMS); do ln -s ../../../$$room $@/mycelia/$$room; done
