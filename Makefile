# Two commands from nothing: `make demo` and `make test`. Everything lives in $(VENV).
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
PYTEST = $(RUN) -m pytest

.PHONY: demo test test-slow test-parity test-triton test-tpu test-tpu-long test-tpu-compile test-gpu \
	sanitize-gpu lint bench clean

# The stamp is newer than pyproject.toml once all is installed.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable '.[test]'
	touch $@

demo: $(VENV)/.installed  ## train, save, restore, export: about 3 minutes on 2 cores
	$(RUN) examples/quickstart.py

DEFAULT = not slow and not interpret and not parity and not triton and not gpu and not tpu

test: $(VENV)/.installed  ## the default suite, under 10 minutes on 2 cores
	$(PYTEST) -n auto -m "$(DEFAULT)"

test-slow: $(VENV)/.installed  ## more meshes, larger cases
	$(PYTEST) -n auto -m "slow and not gpu" --ignore=tests/kernels/fused_ep \
		--ignore=tests/parallel/test_fused.py

INTERPRETED = tests/kernels/fused_ep tests/parallel/test_fused.py

test-tpu: $(VENV)/.installed  ## the TPU kernel in Pallas' interpreter, without a TPU
	$(PYTEST) -m interpret $(INTERPRETED) --timeout 1500

test-tpu-long: $(VENV)/.installed  ## the same on more devices, sizes, dtypes and meshes
	$(PYTEST) -m slow $(INTERPRETED) --timeout 1500

# Where libtpu is installed, JAX looks for a TPU first: a virtual environment apart.
TPU_VENV ?= $(VENV)-tpu

$(TPU_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TPU_VENV)/bin/python -m pip install --quiet --editable '.[test,tpu]'
	touch $@

test-tpu-compile: $(TPU_VENV)/.installed  ## layers compiled for TPUs that are not there
	$(TPU_VENV)/bin/python -m pytest -m tpu --timeout 900 \
		tests/test_compile_report.py tests/kernels/test_grouped_matmul_tpu.py

$(VENV)/.parity: $(VENV)/.installed
	$(RUN) -m pip install --quiet --editable '.[test,parity]'
	touch $@

test-parity: $(VENV)/.parity  ## transformers itself beside the converters
	$(PYTEST) -m parity

# jax-triton fits no other jax: a virtual environment apart, so that the other commands keep theirs.
TRITON_VENV ?= $(VENV)-triton

$(TRITON_VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("test-triton needs Python 3.12 or newer: make test-triton PYTHON=python3.12" if sys.version_info < (3, 12) else 0)'
	$(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TRITON_VENV)/bin/python -m pip install --quiet --editable '.[test]' \
		'jax==0.11.2' 'jaxlib==0.11.2' 'jax-triton==0.4.1' 'triton==3.8.0'
	$(TRITON_VENV)/bin/python -m pip install --quiet --no-deps \
		'jax-cuda13-plugin==0.11.2' 'jax-cuda13-pjrt==0.11.2'
	touch $@

test-triton: $(TRITON_VENV)/.installed  ## GPU kernels compiled and interpreted without a GPU; Python 3.12+
	$(TRITON_VENV)/bin/python -m pytest -m triton tests/kernels

test-gpu: $(VENV)/.installed  ## on an NVIDIA GPU, with the gpu extra installed
	JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false $(PYTEST) -m gpu

# Every buffer is an allocation of its own, so that reads and writes past it are seen.
SANITIZE = JAX_PLATFORMS=cuda XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer \
	--error-exitcode 9 --kernel-name kernel_substring=_kernel
SANITIZED = tests/kernels/test_triton_gpu.py tests/kernels/test_triton_kept_gpu.py \
	tests/kernels/test_float8_gpu.py -m gpu -k against_the_reference

sanitize-gpu: $(VENV)/.installed  ## memory errors and races of the kernels, on an NVIDIA GPU
	$(SANITIZE) --tool memcheck $(PYTEST) $(SANITIZED) --timeout 0
	$(SANITIZE) --tool racecheck $(PYTEST) $(SANITIZED) --timeout 0

lint: $(VENV)/.installed  ## formatter, linter, types
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m pyright --pythonpath $(RUN)

bench: $(VENV)/.installed  ## grouped products on this CPU, beside a dense product and ragged_dot
	$(RUN) benchmarks/grouped_matmul_cpu.py

clean:
	rm -rf $(VENV) $(TPU_VENV) $(TRITON_VENV) out
