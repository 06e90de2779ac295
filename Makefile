# Two commands do everything on a fresh machine: `make tune` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: tune test test-all test-sanitized check install clean

tune: install
	$(BIN)/tune --config search_spaces/quickstart.yaml

# The longest tests with some of their cases; tests/brief.txt says which. Tests wait for processes of
# their own, so two cores have three workers. Four leave them idle for less, but took 616 s, 959 of the
# processor, where three took 554 and 835, one behind the other (2026-12-03).
test: install
	$(BIN)/python -m pytest --brief -n 3 --dist loadfile --no-loadscope-reorder

test-all: install
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# Generated C++ under gcc's address and undefined-behaviour sanitizers: the tests that call it in
# their own process. Tensors come from the sanitizer's malloc, which knows where each ends.
SANITIZED := across any_module batched_modules batched_products binding converted_products eval_mode \
	fast_paths half_convolutions image_tiles in_place kinks means operations partitions permuted \
	pooling_gradients product_epilogues product_moments ranges results_of_steps returned rewrites \
	rules_of_steps scans steps steps_statistics templates_cpu trained_modules
test-sanitized: install
	bin=$$(mktemp -d); for name in g++ c++; do \
		ln -s $(CURDIR)/tests/sanitizing_compiler.sh $$bin/$$name; done; \
	libraries="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)"; \
	TUNER_TESTS_CXX=$$(command -v g++) PATH=$$bin:$$PATH LD_PRELOAD="$$libraries" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONMALLOC=malloc \
	$(BIN)/python -m pytest --brief -n 2 --dist loadfile $(SANITIZED:%=tests/test_%.py); \
	status=$$?; rm -r $$bin; exit $$status

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
