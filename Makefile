# Every target does its own set-up: the first one on a fresh machine makes .venv, the others use it.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
DEMO := $(VENV)/.installed-demo
STAMP := $(VENV)/.installed
OLDEST := .venv-oldest
FRONTENDS := .venv-frontends
ARGS ?=
BENCH ?= curvature
# Every script with a command line of its own, and the experiments.
BENCHES := $(sort $(patsubst benchmarks/%.py,%,$(shell grep -l '^if __name__' benchmarks/*.py)) \
  $(patsubst benchmarks/%/__main__.py,%,$(wildcard benchmarks/*/__main__.py)))
# Two test processes of one thread each: more would fight over two cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test quick mutants test-device test-oldest test-frontends lint typecheck docs docs-serve bench tables gpu dist clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' Makefile
	@echo "benchmarks: $(BENCHES)"

demo: $(DEMO) ## the demonstration on digits: decisions, then every score; options of the second go into ARGS="..." (ARGS=--help lists them)
	$(PY) -m benchmarks.decisions
	$(PY) -m benchmarks.experiments --table demo $(ARGS)

test: $(STAMP) lint typecheck ## lint, types and all tests that are not marked slow; pytest options go into ARGS="..."
	$(ONE_THREAD) $(PY) -m pytest -n 2 --dist worksteal -m "not slow" --hypothesis-profile=ci $(ARGS)

# The oracle, the contract, every source of a fit, towers, online, predictions, p-values, save, load, export, report and retriever; waits.
ON_DEVICE := tests/laplace/test_contract.py::TestTorchFunc tests/losses/test_derivatives.py tests/losses/test_own_losses.py \
  tests/test_doors.py tests/structures tests/laplace/test_laplace_predict.py tests/network/test_any_encoder_calls.py tests/report \
  $(addprefix tests/fit/test_,ggn.py anchor_fits.py dataset.py sampling.py waits.py) tests/towers tests/online/test_online_step.py \
  tests/embedding/test_known.py tests/embedding/test_embedding_rows.py tests/pretrained/test_pretrained_round_trip.py

test-device: $(STAMP) ## on a device that is pretended on the CPU, and refuses and waits as a GPU: a minute or two
	PRETEND_DEVICE=1 $(ONE_THREAD) $(PY) -m pytest -n 2 --dist worksteal -m "not slow" --hypothesis-profile=device $(ON_DEVICE) $(ARGS)

# The oracle, the contract of the default backend, every structure with every loss and fix, and bad input at the public entry points.
QUICK := tests/laplace/test_contract.py::TestTorchFunc tests/losses/test_derivatives.py tests/fit/test_ggn.py tests/structures tests/test_bad_input.py

quick: $(STAMP) ## what one runs while working, under a minute; pytest options go into ARGS="..."
	$(ONE_THREAD) $(PY) -m pytest -n 2 --dist worksteal -q --hypothesis-profile=quick $(QUICK) $(ARGS)

mutants: $(STAMP) ## wrong signs, factors and terms in the core, each of which a test has to notice; half an hour; ARGS="--only fit/"
	$(PY) tests/mutants.py --jobs 2 $(ARGS)

test-oldest: $(OLDEST)/.installed ## the same tests with the oldest versions that pyproject.toml allows, on Python 3.11, in an environment of its own
	$(ONE_THREAD) $(OLDEST)/bin/python -m pytest -n 2 --dist worksteal -m "not slow" --hypothesis-profile=ci $(OLDEST_WITHOUT) $(ARGS)

# Not there: the extras docs, ray and recipes, whose packages move too fast for bounds that would hold for long, and onnx, which
# needs a later torch. Their tests are left out or skipped, as are those of the benchmarks, which are no part of the package.
OLDEST_EXTRAS := benchmarks,faiss,miners,parquet,test
OLDEST_WITHOUT := $(addprefix --ignore=tests/,docs benchmarks jobs/test_on_ray.py)

test-frontends: $(STAMP) $(FRONTENDS)/.installed ## tools that wrap laplace-torch, their newest releases, around our encoder
	PYTHONPATH=$(FRONTENDS):. $(ONE_THREAD) $(PY) -W ignore -m pytest -q -rs -W ignore tests/laplace/test_frontends.py $(ARGS)

# Their requirements conflict with ours and with each other's (curvlinops, scikit-learn, Python), so they lie before the packages
# of .venv, with what they import at the top of their modules, and no further requirement of theirs is installed.
OF_FRONTENDS := torch-uncertainty lightning-uq-box
WHAT_THEY_IMPORT := einx ema-pytorch frozendict gpytorch h5py kornia kornia-rs loguru omegaconf segmentation-models-pytorch \
  torch-einops-utils uncertainty-toolbox vector-quantize-pytorch

lint: $(STAMP) ## ruff: rules and formatting
	$(PY) -m ruff check
	$(PY) -m ruff format --check

typecheck: $(STAMP) ## mypy on the package
	$(PY) -m mypy

# The variable leaves out mkdocs-material's note about its successor; the site is built from one well-known set of versions.
docs: $(STAMP) ## build the site into build/docs, without a network; a dead link or an undocumented public name is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

docs-serve: $(STAMP) ## show the site while its pages are edited, on http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

bench: $(STAMP) ## a benchmark: BENCH=curvature (default) or another name below, options in ARGS="..."; the paper's tables: BENCH=experiments ARGS="--table 2"
	@case " $(BENCHES) " in *" $(BENCH) "*) ;; *) echo "BENCH: expected one of $(BENCHES), got $(BENCH)" >&2; exit 2;; esac
	$(PY) -m benchmarks.$(BENCH) $(ARGS)

tables: $(STAMP) ## measure what every backend can do, and write it into docs/backends.md
	$(PY) -W ignore tests/backend_tables.py docs/backends.md

# A machine with a GPU may have no network: then a Python with torch, and wheels of the rest in .whl (CONTRIBUTING.md).
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),$(PYTHON))
GPU_SITE := build/site

gpu: ## on a GPU: tests, contract, benchmarks, table 2, in under 40 minutes, CONTRIBUTING.md; ARGS=--rehearse: tiny, on the CPU
	@if [ "$(GPU_PYTHON)" != "$(PY)" ] && ls .whl/*.whl >/dev/null 2>&1; then \
	  $(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target $(GPU_SITE) .whl/*.whl; fi
	@PYTHONPATH="$(GPU_SITE):.:$$PYTHONPATH" $(GPU_PYTHON) -m benchmarks.gpu $(ARGS)

# A machine that only builds needs no .venv: make dist DIST_PYTHON=python3, a Python with the package `build`.
DIST_PYTHON ?= $(PY)

dist: $(if $(filter $(PY),$(DIST_PYTHON)),$(STAMP)) ## the wheel and the source archive, into dist/
	rm -rf dist
	$(DIST_PYTHON) -m build

clean: ## remove caches and build products (to make the environment anew as well, delete .venv)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -type d \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +

# A stamp is newer than pyproject.toml and constraints.txt when .venv holds what they ask for: what the demonstration needs,
# and what tests, docs and benchmarks need beyond it.
# pip: -qq still prints errors, and leaves out the warnings about a machine's own index settings, one line per package.
INSTALL = $(PY) -m pip install -qq --disable-pip-version-check -c constraints.txt -e
ALL_EXTRAS := benchmarks,docs,faiss,miners,onnx,parquet,ray,recipes,test

$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "setting up $(VENV): 5.8 GB, of which torch 5.2, and about two minutes the first time"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) ".[benchmarks]"
	@touch $@

$(STAMP): $(DEMO)
	@echo "adding what tests, docs and benchmarks need to $(VENV): 1.7 GB and about two minutes the first time"
	$(INSTALL) ".[$(ALL_EXTRAS)]"
	@touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "Python 3.11 is needed, constraints-oldest.txt is for it; name one: make PYTHON=python3.11 test-oldest" >&2; exit 2; }
	@echo "setting up $(OLDEST): 6 GB and about five minutes the first time"
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-oldest.txt -e ".[$(OLDEST_EXTRAS)]"
	@touch $@

$(FRONTENDS)/.installed: Makefile
	@echo "setting up $(FRONTENDS): 50 MB before the packages of $(VENV)"
	$(PY) -m pip install -qq --disable-pip-version-check --no-deps --ignore-requires-python --upgrade \
	  --target $(FRONTENDS) $(OF_FRONTENDS) $(WHAT_THEY_IMPORT)
	@touch $@
