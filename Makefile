# Every target sets itself up in .venv. It needs python3 >= 3.11 with venv, and a package index for the first run.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check bench gpu-check size clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Done once, and again when the declared or the pinned versions change.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(STAMP)  ## train a small language model at stages 0 to 3 on two local ranks and print one table
	$(BIN)/shardwise demo

test: $(STAMP)  ## run the tests, without the large matrix, in two processes
	$(BIN)/python -m pytest -n 2 --dist worksteal

# An absolute path, or processes that tests start elsewhere would leave their data there.
COVERAGE = COVERAGE_FILE="$(CURDIR)/.coverage" $(BIN)/coverage
NOT_CORE := */cli/*,*/train/*,*/testing/*,*/models/*,*/data.py

test-all: $(STAMP)  ## run all tests, the large matrix and the mutations included; report the branch coverage of the core
	$(COVERAGE) erase
	$(COVERAGE) run -m pytest -n 2 --dist worksteal
	$(COVERAGE) combine --quiet
	$(COVERAGE) report --omit='$(NOT_CORE)'
	$(BIN)/python -m pytest -m matrix -n 2 --dist worksteal --ignore=tests/mutations
	$(BIN)/python -m pytest -m matrix tests/mutations

check: $(STAMP)  ## style, types, layers, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

bench: $(STAMP)  ## run the short forms of the benchmarks and write benchmarks/RESULTS.md; about 20 minutes
	$(BIN)/python benchmarks/step.py --reps 1
	$(BIN)/python benchmarks/wire.py --reps 1 --warmup 2 --steps 4
	$(BIN)/python benchmarks/memory.py --reps 1 --steps 3
	$(BIN)/python benchmarks/prefetch.py --reps 1 --warmup 2 --steps 4
	$(BIN)/python benchmarks/host.py --reps 1
	$(BIN)/python benchmarks/optimizer.py
	$(BIN)/python benchmarks/checkpoint.py --reps 2
	$(BIN)/python benchmarks/quality.py
	$(BIN)/python benchmarks/render.py

gpu-check: $(STAMP)  ## run the tests in tests/gpu where there is a CUDA device
	@if ! $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		echo "no CUDA device: not run"; \
	elif [ ! -d tests/gpu ]; then \
		echo "no tests in tests/gpu: not run"; \
	else \
		$(BIN)/python -m pytest tests/gpu; \
	fi

size: $(STAMP)  ## lines, tokens per line, longest function and attributes per class of each file
	$(BIN)/python scripts/size

clean:  ## remove caches and builds, keep .venv
	rm -rf dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
