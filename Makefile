# Two commands do everything on a fresh machine: `make tune` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: tune test test-all check install clean

tune: install
	$(BIN)/tune --config search_spaces/quickstart.yaml

# The longest tests with some of their cases; tests/brief.txt says which. Tests wait for processes of
# their own: three workers leave two cores idle for a fifth of the time or more, four for less.
test: install
	$(BIN)/python -m pytest --brief -n 4 --dist loadfile --no-loadscope-reorder

test-all: install
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# Formatting, lint and types; what CONTRIBUTING.md asks for before a change is sent.
check: install
	$(BIN)/ruff format --check tuner tests benchmarks
	$(BIN)/ruff check
	$(BIN)/mypy

install: .venv/.installed

.venv/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $$($(PYTHON) --version) is too old; next: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 3; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
