# Two commands: `make test` runs every check, `make catalog` builds and serves the cell catalog.
# Both set up their own Python environment in .venv, pinned by constraints.txt.

PYTHON ?= python3
PORT ?= 8000
ONCE ?=
MINUTES ?= 60
BIN := .venv/bin
STAMP := .venv/.ready

.PHONY: help setup test catalog conformance lint format fragments fuzz mutants lock clean

help:
	@echo "make test         every check: lint, types, tests, conformance, snippets, docs"
	@echo "make catalog      build the cell catalog and serve it (PORT=8000; ONCE=1 only builds)"
	@echo "make conformance  the numerics contract, clause by clause"
	@echo "make lint         the linter, the formatter's check and the type checker"
	@echo "make format       rewrite the code in the project's format"
	@echo "make fragments    write the generated pieces of the documentation again"
	@echo "make fuzz         property tests with new random cases (MINUTES=60)"
	@echo "make mutants      which small changes of the package the tests notice"
	@echo "make lock         write constraints.txt again from a fresh environment"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/setup.sh tools/katex/package-lock.json
	@PYTHON="$(PYTHON)" bash tools/setup.sh

test: $(STAMP)
	@$(BIN)/python tools/check.py

catalog: $(STAMP)
	@$(BIN)/python tools/catalog.py --port $(PORT) $(if $(ONCE),--once)

conformance: $(STAMP)
	@$(BIN)/python -m pytest conformance

lint: $(STAMP)
	@$(BIN)/python tools/check.py lint format types

format: $(STAMP)
	@$(BIN)/ruff check --fix --exit-zero .
	@$(BIN)/ruff format .

fragments: $(STAMP)
	@$(BIN)/python tools/fragments.py

fuzz: $(STAMP)
	@$(BIN)/python tools/fuzz.py --minutes $(MINUTES)

mutants: $(STAMP)
	@$(BIN)/python tools/mutants.py

lock:
	@PYTHON="$(PYTHON)" bash tools/setup.sh --lock

clean:
	rm -rf .venv site build dist tools/katex/node_modules
