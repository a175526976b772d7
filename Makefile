# Everything runs in .venv, which is created when needed. The machine only needs Python and pip.
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=

MINUTES ?= 10

.PHONY: install test check attack lint format demo paper docs docs-check dist

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

# All tests: about 14 minutes on two cores.
test: install
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

# Lint and the fast tests: two minutes.
check: lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "not slow" $(PYTEST_ARGS)

# Kill the commands, damage their files and pass them random input. Prints the seed, and how to repeat failures.
attack: install
	$(BIN)/python benchmarks/attack.py --minutes $(MINUTES)

# Train a U-ViT plain and with the residual start at the same time, and write a page that compares the two runs: about
# nine minutes on two cores, or one minute with QUICK=1.
demo: install
	$(BIN)/scalelong demo $(if $(QUICK),--quick)

# Rerun all figures, tables and theorems of the paper, which takes days, or at most five minutes for each with QUICK=1.
# Finished runs are lines in docs/paper and are not repeated.
paper: install
	$(BIN)/scalelong paper all $(if $(QUICK),--quick,--output_dir docs/paper)

# Serve the documentation on http://127.0.0.1:8000. It is built anew when a page or a docstring changes.
docs: .venv/installed-docs
	$(BIN)/mkdocs serve

# Build the documentation, and fail at broken links.
docs-check: .venv/installed-docs
	$(BIN)/mkdocs build --strict --site-dir build/site

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

# Build the wheel and the source distribution, and check them. A tag such as v0.1.0 publishes them.
dist: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[release]"
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/wording.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
