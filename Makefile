# From a clean checkout, `make demo` and `make test` alone set everything up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Tests that measure memory or storm the machine, or drive a browser: they run one after the other.
# All others find what is theirs by a TMPDIR of their own and run in two processes, a file in one of them.
ALONE := tests/storms tests/acceptance/test_storms.py tests/browser

.PHONY: demo test check bench bench-peers bench-check soak docs clean

$(STAMP): pyproject.toml lemon_kernel/_version.py $(wildcard kernelspec/lemon/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts -e '.[dev]'
	@touch $@

## the main job on real input: the Python standard library's own source
demo: $(STAMP)
	@$(BIN)/python examples/demo.py

## lint, types, layers, then every test
test: check
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile $(addprefix --ignore=,$(ALONE)) tests
	@$(BIN)/python -m pytest -q $(ALONE)

check: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@PYTHONPATH=provisioner:shim:. $(BIN)/lint-imports

## ratios against peers, interleaved in one run; writes benchmarks/results/
bench: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check matplotlib
	@$(BIN)/python -m benchmarks

## the closest peers beside ours, in a virtual environment of their own
bench-peers: $(STAMP)
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check hermes-agent smolagents 'autogen-ext[jupyter-executor]'
	@$(BIN)/python -m benchmarks peers

## fails when a ratio got worse than the committed baseline by more than 30 %
bench-check: $(STAMP)
	@$(BIN)/python -m benchmarks.check

## the long storms: kills, aborts, starts, fuzz
soak: $(STAMP)
	@LEMON_TEST_SOAK=1 $(BIN)/python -m pytest -q tests --timeout 1800

## pages that are generated from the code and its tests
docs: $(STAMP)
	@for page in tools/generate_*.py; do $(BIN)/python $$page; done
	@WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/acceptance/test_parity.py -k the_page_of_differences

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
