# Two commands do everything on a fresh machine with Python 3.11+, git and make: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test gpu check bench soak shots clean

help:  ## show what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## make .venv and install overnight into it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "overnight needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11 and run make again.")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing overnight and what it needs into $(VENV) (about 3 minutes, 2.5 GB) ..."
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup  ## run the main job: a sweep through faults, on four fake GPUs
	@$(BIN)/overnight demo

test: setup  ## run all tests (PostgreSQL tests need its binaries; see CONTRIBUTING.md)
	$(BIN)/python -m pytest -m "not soak and not gpu" -n 4 --dist loadfile --no-loadscope-reorder

gpu: setup  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

check: setup  ## lint, types, import rules, migrations
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	@folder=$$(mktemp -d) && url=sqlite:///$$folder/check.db && \
	  $(BIN)/alembic -q -x url=$$url upgrade head && $(BIN)/alembic -x url=$$url check; status=$$?; rm -rf $$folder; exit $$status

bench: setup  ## measure against peers, side by side
	@for b in benchmarks/[!_]*.py; do echo "== $$b"; $(BIN)/python $$b || exit 1; done

soak: setup  ## long tests; stopped, it goes on where it was (folder .soak)
	$(BIN)/python -m pytest -m soak --timeout 7200

shots: setup  ## screenshots for the README
	$(BIN)/python docs/shots.py

clean:  ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
