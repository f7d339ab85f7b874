# Two commands from nothing: `make demo` and `make test`. Everything lives in $(VENV).
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
PYTEST = $(RUN) -m pytest

.PHONY: demo test test-slow test-gpu lint bench clean

# The stamp is newer than pyproject.toml once all is installed.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[test]'
	touch $@

demo: $(VENV)/.installed  ## train, save, restore, export: about 3 minutes on 2 cores
	$(RUN) examples/quickstart.py

test: $(VENV)/.installed  ## the default suite, under 10 minutes on 2 cores
	$(PYTEST) -m "not slow and not gpu"

test-slow: $(VENV)/.installed  ## the rest that needs no accelerator
	$(PYTEST) -m "slow and not gpu"

test-gpu: $(VENV)/.installed  ## on an NVIDIA GPU, with the gpu extra installed
	$(PYTEST) -m gpu

lint: $(VENV)/.installed  ## formatter, linter, types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyright --pythonpath $(RUN)

bench: $(VENV)/.installed  ## grouped products on this CPU, beside a dense product and ragged_dot
	$(RUN) benchmarks/grouped_matmul_cpu.py

clean:
	rm -rf $(VENV) out
