# Every target sets up what it needs in $(VENV) and uses it again until pyproject.toml or the C++ sources change.
#
#   make test PYTHON=python3.13 VENV=.venv313 WITH='jax==0.12.0'
#
# PYTHON  the interpreter that the virtual environment is made with
# VENV    where it goes
# WITH    requirements to add, such as one jax release
# JOBS    processes that run tests
# TESTS   what pytest is to run, and how
# ARGS    flags of the example or benchmark
# CUDA    ON or OFF: whether to compile the CUDA kernels, which takes minutes; by default where there is an NVIDIA GPU
PYTHON ?= python3
VENV ?= .venv
WITH ?=
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
TESTS ?=
ARGS ?=
CUDA ?= $(if $(shell nvidia-smi -L 2>/dev/null),ON,OFF)

export CMAKE_ARGS ?= -DOPTAX_LOWPREC_CUDA=$(CUDA)
export PIP_DISABLE_PIP_VERSION_CHECK = 1
SOURCES := pyproject.toml $(wildcard xla_ffi/*)

.PHONY: demo test lint bench clean
.NOTPARALLEL:

demo: $(VENV)/.examples
	$(VENV)/bin/python examples/train_lm.py $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -n $(JOBS) $(TESTS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyink --check --quiet .
	$(VENV)/bin/mypy

bench: $(VENV)/.test
	$(VENV)/bin/python benchmarks/step_time.py $(or $(ARGS),--tree 50m --steps 3)

clean:
	rm -rf $(VENV) build dist

# $(VENV)/.examples stands for an environment with the package (editable) and its extra "examples"; "dev" has all.
$(VENV)/.%: $(SOURCES)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --editable '.[$*]' $(WITH)
	$(VENV)/bin/python -m optax_lowprec
	@touch $@ $(if $(filter dev,$*),$(VENV)/.examples $(VENV)/.test)
