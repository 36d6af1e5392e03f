# Each target does all of its own set-up: a .venv in the checkout, made once, reused while nothing changed.
SHELL := /bin/bash
.DELETE_ON_ERROR:
PYTHON ?= python3
BIN := .venv/bin
# One thread per process: two threads on a busy two-core machine can be 50 times slower.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE
# Compiled modules are kept: every process of a test would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-system check format bench site image clean help

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

.venv/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Secateur needs Python 3.11 or newer; name one: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/dev: .venv/core
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray,dp,flower,onnx,hf,site]'
	@touch $@

demo: .venv/core  ## audit a small network on embedded data, invert a few updates, and write a page of each
	$(BIN)/secateur audit --out runs/demo
	$(BIN)/secateur invert --out runs/demo-updates --targets 4 --iterations 300

test: .venv/dev  ## the fast tests (under 8 minutes on two cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not system"

test-system: .venv/dev  ## the long tests: kills, browser, servers (under 25 minutes)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 20 -m system \
	  $$(grep -rl --include='test_*.py' 'mark\.system' tests | sort)

check: .venv/dev  ## lint, formatting, types, layers, words, the table of results
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/words.py src
	$(BIN)/python results/table.py --check
	$(BIN)/python results/recommend.py --check

format: .venv/dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/dev  ## print ratios against plain references, measured in one run
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/training.py
	@if [ -n "$$SECATEUR_DATA" ]; then $(BIN)/python benchmarks/audit.py; \
	else echo "left out: benchmarks/audit.py, as SECATEUR_DATA does not name a folder of real data"; fi

site: .venv/dev  ## build the site of docs/ into site/, without the network
	$(BIN)/python docs/site.py

image:  ## build the image of the Dockerfile and try it (BUILDER=docker, podman or buildah)
	.ci/image $(or $(BUILDER),docker)

clean:  ## remove the environment and the caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
