# `make demo` and `make test` set up .venv by themselves; nothing else needs to be installed first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
STATE := .miles

# Everything a demo leaves behind lies in $(STATE); the tests keep to folders of their own.
export PREFECT_HOME ?= $(CURDIR)/$(STATE)/prefect
export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
export DO_NOT_TRACK ?= 1
# Small models on a few cores: one thread a process beats several.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-slow lint types ui clean

setup: $(READY)

# torch with what it needs on this machine (CUDA libraries or none); all else exactly as locked, nothing to resolve.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' requirements.lock)
	$(PIP) --no-deps -r requirements.lock
	$(PIP) --no-deps --editable .
	touch $@

demo: $(READY)  ## the whole pipeline on the tiny preset
	$(BIN)/miles run --preset tiny

# Whole runs first and alone: each starts a Prefect server and Ray beside it.
test: $(READY) lint types  ## style, types and the quick suite
	$(BIN)/python -m pytest tests/pipeline
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/architecture

test-slow: $(READY)  ## what `make test` leaves out and needs no GPU
	$(BIN)/python -m pytest -m "(slow or chaos) and not gpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

ui: $(READY)  ## Prefect's UI on the demo's runs, at http://127.0.0.1:4200
	$(BIN)/prefect server start

clean:
	rm -rf $(STATE) .pytest_cache .mypy_cache .ruff_cache
