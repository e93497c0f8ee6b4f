# A fresh machine needs Python 3.10 or newer and make: `make demo` and `make test` do the rest.
#     make test PYTHON=python3.12     another interpreter (the environment is rebuilt for it)
#     make test PYTEST_ARGS='-k relu -x'
#     make golden BASE=main CASES='resnet compiled'
#     make test-matrix NOX_ARGS='-p 3.11 -- tests/reset'

PYTHON      ?= python3
VENV        ?= .venv
WORKERS     ?= 2
PYTEST_ARGS ?=
BASE        ?= f3a698c
CASES       ?=
NOX_ARGS    ?=

BIN     := $(VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# The stamps name the Python version, so that another $(PYTHON) is noticed. The demo needs less than the tests.
LAB     := $(VENV)/.installed-lab-$(VERSION)
STAMP   := $(VENV)/.installed-$(VERSION)
ZOO     := $(VENV)/.installed-zoo-$(VERSION)
DOCS    := $(VENV)/.installed-docs-$(VERSION)
PIP     := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo report methods docs docs-serve test test-slow test-matrix test-zoo zoo-report golden lint types format venv clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(LAB) ## watch backprop lose its plasticity, and the right resets keep it: about 90 seconds on two cores
	$(BIN)/gxd demo

report: $(LAB) ## our numbers beside the paper's as one page, build/report/index.html, from the digests in results/
	$(BIN)/gxd report results --out build/report

methods: $(LAB) ## what every method costs beside backprop, measured, and docs/methods.md with it: about three minutes
	$(BIN)/gxd bench methods --json results/methods.json
	$(BIN)/python -m gxd.lab.method_page results/methods.json docs/methods.md

docs: $(DOCS) ## the site of the documentation, build/site/index.html; the notebooks are run, a warning is an error
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet

docs-serve: $(DOCS) ## the same on a local port, anew after every change
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs serve

test: lint types ## everything that must pass: lint, types, then the tests on two workers
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow' $(PYTEST_ARGS)

test-slow: $(STAMP) ## the tests that test leaves out: several processes, compilers, a cluster on this machine
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(PYTEST_ARGS)

test-matrix: $(STAMP) ## the tests with the oldest and the newest Python and torch, each in an environment of its own (noxfile.py)
	$(BIN)/nox $(NOX_ARGS)

test-zoo: $(ZOO) ## slow, not part of test: 60 models of timm and 60 of Hugging Face, each plan proved on the model
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n $(WORKERS) --show-capture=no tests/model_zoo/suite.py $(PYTEST_ARGS)

zoo-report: $(ZOO) ## how much of each of these models is covered and why not all, as zoo-coverage.csv
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.model_zoo --out zoo-coverage.csv

golden: $(STAMP) ## the same training with BASE=<commit> and with this tree, compared bit for bit: about five minutes
	@folder=$$(mktemp -d); status=0; tool='$(BIN)/python -m tests.golden'; export OMP_NUM_THREADS=1 PYTHONPATH; \
	trap 'git worktree remove --force "$$folder/tree"; rm -rf "$$folder"' EXIT; trap 'exit 1' INT TERM; \
	git worktree add --quiet --detach "$$folder/tree" $(BASE) || exit 1; \
	PYTHONPATH="$$folder/tree/src"; $$tool record "$$folder/base.pt" $(CASES) || status=1; \
	PYTHONPATH="$(CURDIR)/src"; $$tool record "$$folder/this.pt" $(CASES) || status=1; \
	$$tool compare "$$folder/base.pt" "$$folder/this.pt" && exit $$status

lint: $(STAMP) ## ruff: rules and formatting, nothing is changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy on src
	$(BIN)/mypy

format: $(STAMP) ## ruff: fix what can be fixed, then format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

venv: $(STAMP) ## make or update the environment in .venv

# A stamp is removed first and written last. Without one the environment is made anew, because an interrupted install
# may have left half a package; with an outdated one it is brought up to date in place.
$(LAB): pyproject.toml constraints.txt src/gxd/version.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo "gxd needs Python 3.10 or newer; choose one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@if [ -e $@ ]; then rm -f $@ $(STAMP) $(ZOO) $(DOCS); else echo "making $(VENV) with Python $(VERSION)"; $(PYTHON) -m venv --clear $(VENV); fi
	@echo "installing gxd[lab] with the versions of constraints.txt; the first time this takes minutes"
	@$(PIP) hatchling
	@$(PIP) --no-build-isolation -e '.[lab]'
	@touch $@

$(STAMP): $(LAB)
	@echo "installing gxd[dev]"
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

# timm comes without its dependencies: they include torchvision, which would bring another build of torch.
$(ZOO): $(STAMP)
	@echo "installing gxd[zoo] and timm"
	@$(PIP) --no-build-isolation -e '.[zoo]'
	@$(PIP) --no-deps timm
	@touch $@

$(DOCS): $(LAB)
	@echo "installing gxd[docs]"
	@$(PIP) --no-build-isolation -e '.[docs]'
	@touch $@

clean: ## remove the environment, caches and build products
	rm -rf $(VENV) gxd-demo zoo-coverage.csv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .nox
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
