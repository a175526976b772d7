# Everything happens in .venv, which is made when it is needed; all that the machine must have is Python and pip.
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=

.PHONY: install test lint format demo

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

test: install
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

# Two trainings and a page that compares them, in some seven minutes; QUICK=1 takes one.
demo: install
	$(BIN)/python benchmarks/demo.py $(if $(QUICK),--quick)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
