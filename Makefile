# Two commands: `make demo` and `make test`. Both set up .venv by themselves.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.weft-ready
JOBS ?= 2

.PHONY: demo test lint setup bench clean
setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Weft needs Python 3.11 or newer: install it, or set PYTHON=/path/to/python" >&2; exit 2; }
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m weft.warm
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py --out out/demo

lint: $(READY)
	$(BIN)/ruff check weft tests benchmarks examples
	$(BIN)/mypy -p weft -p benchmarks.policy_training

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

bench: $(READY)
	$(BIN)/python -m benchmarks.all

clean:
	rm -rf $(VENV) out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
