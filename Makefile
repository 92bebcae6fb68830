# Every target makes its own environment first: .venv, installed as the README says.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help replay check test test-gpu bench bench-gpu chaos fuzz protocol clean
help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

replay: $(STAMP)  ## replay the bundled trace through a whole deployment and print a table
	$(BIN)/tensorferry replay examples/traces/servegen.jsonl --config configs/local.yaml --speed 0.5

check: $(STAMP)  ## ruff, format, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/lint-imports

test: check  ## check, then every test
	$(BIN)/python -m pytest -n 2

bench: $(STAMP)  ## the floors of docs/performance.md, measured here
	$(BIN)/python -m benchmarks.run

test-gpu: $(STAMP)  ## the tests that need a CUDA device; those for peers need two
	$(BIN)/python -m pytest -m gpu tests/gpu

bench-gpu: $(STAMP)  ## hand-overs in GPU memory, measured here; PEER=DIR: beside the incumbent's, unpacked there
	$(BIN)/python -m benchmarks.gpu_handoff $(if $(PEER),--peer $(PEER))

chaos: $(STAMP)  ## random stages killed and stopped under load, for six minutes; SEED=N repeats a run
	$(BIN)/python -m benchmarks.chaos $(if $(SEED),--seed $(SEED))

fuzz: $(STAMP)  ## a million malformed messages at every socket beside good traffic, for seven minutes; SEED=N repeats them
	$(BIN)/python -m benchmarks.fuzz $(if $(SEED),--seed $(SEED))

protocol: $(STAMP)  ## the lease protocol's long runs: more schedules, more seeds
	TENSORFERRY_PROTOCOL=long $(BIN)/python -m pytest -s tests/protocol tests/test_death.py

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist src/*.egg-info
