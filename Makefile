# Two commands from nothing: `make demo` and `make test`. Everything lives in $(VENV).
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
PYTEST = $(RUN) -m pytest

.PHONY: demo test test-slow test-parity test-triton test-tpu test-tpu-long test-gpu lint bench clean

# The stamp is newer than pyproject.toml once all is installed.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[test]'
	touch $@

demo: $(VENV)/.installed  ## train, save, restore, export: about 3 minutes on 2 cores
	$(RUN) examples/quickstart.py

DEFAULT = not slow and not interpret and not parity and not triton and not gpu

test: $(VENV)/.installed  ## the default suite, under 10 minutes on 2 cores
	$(PYTEST) -n auto -m "$(DEFAULT)"

test-slow: $(VENV)/.installed  ## more meshes, larger cases
	$(PYTEST) -n auto -m slow --ignore=tests/kernels/fused_ep

test-tpu: $(VENV)/.installed  ## the TPU kernel in Pallas' interpreter, without a TPU
	$(PYTEST) -m interpret tests/kernels/fused_ep --timeout 1500

test-tpu-long: $(VENV)/.installed  ## the same on more devices, sizes, dtypes and meshes
	$(PYTEST) -m slow tests/kernels/fused_ep --timeout 1500

$(VENV)/.parity: $(VENV)/.installed
	$(RUN) -m pip install --quiet --editable '.[test,parity]'
	touch $@

test-parity: $(VENV)/.parity  ## transformers itself beside the converters
	$(PYTEST) -m parity

test-triton: $(VENV)/.installed  ## GPU kernels compiled and interpreted without a GPU; Python 3.12+
	$(RUN) -m pip install --quiet 'jax==0.11.2' 'jaxlib==0.11.2' 'jax-triton==0.4.1' 'triton==3.8.0'
	$(RUN) -m pip install --quiet --no-deps 'jax-cuda13-plugin==0.11.2' 'jax-cuda13-pjrt==0.11.2'
	$(PYTEST) -m triton

test-gpu: $(VENV)/.installed  ## on an NVIDIA GPU, with the gpu extra installed
	JAX_PLATFORMS=cuda $(PYTEST) -m gpu

lint: $(VENV)/.installed  ## formatter, linter, types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyright --pythonpath $(RUN)

bench: $(VENV)/.installed  ## grouped products on this CPU, beside a dense product and ragged_dot
	$(RUN) benchmarks/grouped_matmul_cpu.py

clean:
	rm -rf $(VENV) out
