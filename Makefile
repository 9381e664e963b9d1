# make demo and make test are all a newcomer needs; both set up .venv first.
PYTHON ?= python3
BIN := .venv/bin
BENCH ?= entries
PARTS ?=
DATA ?= $(HCURV_DATA)
TORCH ?=
SECONDS ?= 600
SEED ?= 0
TORCH_INDEX ?=
TORCH_VENV := .venv-torch-$(if $(TORCH),$(subst *,x,$(TORCH)),newest)

.PHONY: setup demo test lint docs unit package test-interop test-torch test-plans fuzz faults soak bench clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m hcurv.experiments.demo demo

test: lint docs unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The first variable silences an advertisement of the theme's, the second one of mkdocs' successor.
docs: setup
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Wheel and sdist, built in dist/, and what an installation without extras can do.
package: setup
	rm -rf dist
	$(BIN)/python -m build --quiet --outdir dist
	$(BIN)/python tests/check_package.py dist

# What hcurv.interop does with other libraries, in an environment of its own. They are installed
# without their dependencies: some ask for torchvision and others that these tests do not need.
test-interop:
	@if $(MAKE) .venv-interop/installed; then \
	  OMP_NUM_THREADS=1 HCURV_DATA=$(DATA) .venv-interop/bin/python -m pytest -rs tests/interop; \
	else \
	  echo "test-interop: skipped, because the libraries could not be installed"; \
	fi

.venv-interop/installed: pyproject.toml constraints.txt tests/interop/requirements.txt
	test -x .venv-interop/bin/python || $(PYTHON) -m venv .venv-interop
	.venv-interop/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	.venv-interop/bin/python -m pip install --quiet --no-deps --requirement tests/interop/requirements.txt
	touch $@

# The tests under another version of torch, in an environment of its own:
#   make test-torch TORCH='2.4.*'   the oldest that is supported
#   make test-torch                 the newest
# On Linux, torch's usual wheels bring gigabytes of CUDA libraries with them; TORCH_INDEX= may name
# a package index whose wheels are for CPUs alone.
test-torch: $(TORCH_VENV)/installed
	$(TORCH_VENV)/bin/python -c 'import torch; print("torch", torch.__version__)'
	OMP_NUM_THREADS=1 $(TORCH_VENV)/bin/python -m pytest -n 2

$(TORCH_VENV)/installed: pyproject.toml
	test -x $(TORCH_VENV)/bin/python || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pip install --quiet --upgrade \
	  $(addprefix --index-url ,$(TORCH_INDEX)) 'torch$(addprefix ==,$(TORCH))'
	$(TORCH_VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

test-plans: setup
	HCURV_DATA=$(DATA) $(BIN)/python -m pytest -m slow

# Random models, losses, data, options and files against a dense oracle: make fuzz SECONDS=600 SEED=1
fuzz: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS) --seed $(SEED)

# 1000 interruptions and 200 killed processes; and mixed calls for a long time: make soak SECONDS=1800
faults: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults --seed $(SEED)

soak: setup
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m faults soak --seconds $(SECONDS) --seed $(SEED)

# curvlinops and backpack are installed without their dependencies: they ask for torchvision,
# which the parts used here do not need.
bench: setup
	$(BIN)/python -m pip install --quiet --no-deps --requirement benchmarks/requirements.txt
	$(BIN)/python benchmarks/$(BENCH).py $(PARTS) $(if $(DATA),--data $(DATA))

clean:
	rm -rf .venv .venv-interop .venv-torch-* demo dist site
