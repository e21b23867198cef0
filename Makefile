# `make demo` and `make test` set everything up by themselves on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
SITE := $(VENV)/.site
SPREAD := --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations 15

.DEFAULT_GOAL := help
.PHONY: help install demo demo-offline test test-all check lint types format layout docs models clean

help:  ## Show this list.
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 14

install: $(READY)  ## Make .venv and install the project with the tried versions.

$(READY): pyproject.toml constraints.txt
	@echo 'Installing PyTorch and drafthead into $(VENV): 2 GB or more, some minutes'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt setuptools wheel
	$(BIN)/python -m pip install --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation -e '.[lab,serve]'
	-$(BIN)/python -m drafthead.backends.cpu.kernels.library  # else it is compiled when it is needed
	touch $(READY)

$(TOOLS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation -e '.[lab,serve,dev]'
	touch $(TOOLS)

$(SITE): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation -e '.[lab,serve,docs]'
	touch $(SITE)

demo: $(READY)  ## On SmolLM2-135M: an answer of the shipped head, then a build of 8 minutes.
	$(BIN)/drafthead fetch smollm2
	$(BIN)/drafthead generate --target smollm2 --draft smollm2-eagle3 --draft lookup --max-new-tokens 128 \
		--prompt "How does photosynthesis work?"
	$(BIN)/drafthead build --target smollm2 --prompts assets/smollm2_prompts/train.jsonl --max-new-tokens 128 \
		--minutes 8 --output runs/smollm2

demo-offline: $(READY)  ## A build of 5 minutes on the small model of the tests, without a network.
	$(BIN)/drafthead build --target assets/demo_target --prompts assets/demo_prompts/train.jsonl \
		--minutes 5 --output runs/demo

test: $(TOOLS)  ## Prove each claim once: twelve minutes on 2 cores, at most four are used.
	$(BIN)/python -m pytest $(SPREAD)

test-all: $(TOOLS)  ## Run the tests of both stages, all cases of each claim: an hour on 2 cores.
	$(BIN)/python -m pytest $(SPREAD) -m 'not slow and not gpu'

check: lint types test  ## Lint, types and tests.

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TOOLS)
	$(BIN)/mypy

format: $(TOOLS)  ## Format the code.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

layout: $(TOOLS)  ## Print every module in a sentence.
	$(BIN)/python tests/layout.py

docs: $(SITE)  ## Write the documentation as a site, to runs/site; a dead link is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

models: $(READY)  ## Train the demo models again: hours on 2 cores, minutes on a GPU. Resumable.
	PYTHONPATH=benchmarks $(BIN)/python -m demo_models.build_models

clean:  ## Remove the virtual environment and all runs.
	rm -rf $(VENV) runs
