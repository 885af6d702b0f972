# Two commands do everything on a machine that has only Python 3.11+ and make:
#   make train    creates .venv, installs, trains a small model that is larger than its fast memory
#   make test     the suite, in six minutes on two cores
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
STAMP := $(VENV)/.installed

.PHONY: train repeat test test-all faults test-gpu sanitize lint format clean

# torch first and alone: the CPU build is named by its version, and nothing later may replace it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(RUN)python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: $(STAMP)
	$(RUN)vb train --config tiny --fast-memory 14MiB --host-memory 24MiB --disk-memory 1GiB

# Twenty starts of the default run on the CPU: equal metrics.jsonl, but for times.
repeat: $(STAMP)
	$(RUN)python benchmarks/repeat_runs.py -- --device cpu

# Files in their own order: sorted by their number of tests, which is the default, the few long tests come last and alone.
# Bytecode is kept whatever the environment says: two workers and their processes would compile the same sources each.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN)python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(PYTEST) -m "not gpu and not multi_gpu and not slow"

# And all configurations, formats, architectures and combinations, of which `test` takes a selection.
test-all: $(STAMP)
	$(PYTEST) -m "not gpu and not multi_gpu"

# Real processes against real faults, all of them, and the page that tells what held. `test` draws a sample.
faults: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN)python -m tests.faults --seed 35 --write docs/reliability.md

# Run where the GPU is, with the environment that is active, because GPU machines often bring their own torch, and with
# this checkout, installed or not. Twelve processes share the GPU and 16 cores. What each_value and each_pair leave to
# test-all needs no GPU. pytest-benchmark, which nothing here uses, warns of xdist, and warnings are errors.
test-gpu:
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" OMP_NUM_THREADS=1 python3 -m pytest -q -n 12 --dist worksteal -p no:benchmark -m "gpu or multi_gpu or (slow and not each_value and not each_pair)" -rs --durations=25

# compute-sanitizer over small shapes of every kernel, on a GPU machine with the CUDA toolkit; ends with a table.
sanitize:
	python3 -m tests.kernels.sanitize

lint: $(STAMP)
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)pyright

format: $(STAMP)
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .hypothesis
