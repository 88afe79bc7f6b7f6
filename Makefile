# make demo         three peers train a model on this machine, in minutes
# make quick        style, types and the tests that need no process and no network, in two minutes
# make test         what a change must pass: style, types, modules, real processes
# make slices       and short slices of the large families: simulated swarms, hostile swarms, real limited links
# make nightly      all of these families and every other test, for hours
# make proto        the code generated from protocol/murmur.proto
# make dist         the wheel and the sdist of a release, in dist/
# make image        the volunteer's image, by a Docker engine: murmuration:VERSION and murmuration:latest
# make image-check  builds it for real, with or without an engine, and uses it
# make clean        removes what make built; runs/ stays

PYTHON ?= python3
BIN := .venv/bin
VERSION := $(shell sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml)
# A family too large for each change has a slice for it; the rest has the mark nightly. `make nightly` runs both.
SLICE := and not nightly
nightly: SLICE :=
nightly: export MURMUR_EXAMPLES := 60
# To collect all ten thousand tests takes each pytest, and each of its workers, five seconds.
PROCESSES := tests/swarm tests/pipelines tests/test_package.py tests/benchmarks/test_merge.py \
	tests/node/processes/test_process_environment.py
SEEDS := tests/simulation tests/protocol/pipeline
# Where Python is to keep no bytecode, each of the tests' hundreds of processes would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test check warmup modules processes slices hostile seeds links nightly proto dist image image-check clean

demo: .venv/installed
	$(BIN)/murmur up configs/demo.toml --drill || [ $$? -eq 130 ]  # Ctrl-C is no error

quick: check warmup
	$(BIN)/pytest -q -n logical --dist loadfile -m "not swarm and not netlab and not seeds and not slow $(SLICE)"

test: check modules processes

slices: seeds hostile links

nightly: check modules processes slices

check: .venv/installed-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy

warmup: .venv/installed-for-tests  # compile the kernels once for all processes of the tests
	$(BIN)/python -m optim.kernels.warmup

modules: warmup
	$(BIN)/pytest -n logical --dist loadfile --no-loadscope-reorder -m "not swarm and not netlab and not seeds $(SLICE)" --durations 30

processes: .venv/installed-for-tests  # two swarms at a time: peers wait for each other, and for what starts
	$(BIN)/pytest $(PROCESSES) -n 2 --dist loadfile -m "swarm and not hostile $(SLICE)" --durations 30

hostile: .venv/installed-for-tests
	$(BIN)/pytest tests/hostile -m "hostile $(SLICE)"

seeds: .venv/installed-for-tests
	$(BIN)/pytest $(SEEDS) -n logical --dist worksteal --timeout 900 -m "seeds $(SLICE)"

links: .venv/installed-for-tests  # two laboratories at a time: links wait more than they compute
	$(BIN)/pytest tests/netlab -n 2 --dist loadfile -m "netlab $(SLICE)"

proto: .venv/installed-for-tests
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I . \
		--python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=. protocol/murmur.proto

dist: .venv/installed-for-tests
	rm -rf dist
	$(BIN)/python -m hatchling build

image:
	docker build -f docker/Dockerfile --build-arg VERSION=$(VERSION) -t murmuration:$(VERSION) -t murmuration:latest .

image-check:
	$(PYTHON) -m tests.docker.image_check

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

# On a terminal pip shows what it downloads.
PIP_INSTALL = $(BIN)/python -m pip install $(if $(MAKE_TERMOUT),,--quiet) --disable-pip-version-check
INSTALLING := installing the Python packages into .venv, once; after Ctrl-C, the same command continues

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "$(INSTALLING)"
	$(PIP_INSTALL) -c constraints.txt -e .
	touch $@

.venv/installed-for-tests: .venv/bin/python pyproject.toml constraints.txt
	@echo "$(INSTALLING)"
	$(PIP_INSTALL) -c constraints.txt -e '.[test]'
	touch $@ .venv/installed
