# Everything a newcomer or a contributor does with this tree. Targets set up .venv by themselves; a second run is instant.
.DEFAULT_GOAL := help
.PHONY: help up demo test test-cluster lint bench bundle lock clean
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PY := .venv/bin/python
export PYTHON

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

# `exec` and nothing after it: the terminal's Ctrl-C then reaches the stack itself, once, and make only waits for its end.
up: ## start the whole stack on this machine (address, key and three commands to try are printed; Ctrl-C ends it)
	@scripts/bootstrap.sh run && exec $(PY) -m manager up $(ARGS)

demo: ## play an agent's session against a fresh stack of its own
	@scripts/bootstrap.sh run && exec $(PY) scripts/demo.py $(ARGS)

test: lint ## all checks and all tests (ARGS='-k stdin' goes to pytest)
	@exec $(PY) -m pytest --ignore=tests/cluster $(ARGS)

test-cluster: ## the tests that need Kubernetes: on KUBECONFIG, else on a control plane built here once (needs Go)
	@scripts/bootstrap.sh dev
	@$(PY) -m tests.support.cluster.tools
	@exec $(PY) -m pytest tests/cluster $(ARGS)

lint: ## ruff, mypy --strict, and the layers' contracts
	@scripts/bootstrap.sh dev
	@echo "ruff" && $(PY) -m ruff check .
	@echo "mypy --strict" && $(PY) -m mypy
	@echo "import-linter" && .venv/bin/lint-imports --no-cache | tail -n 6

bench: ## measure commands directly, through the manager and against the floor (benchmarks/results/)
	@scripts/bootstrap.sh dev && exec $(PY) benchmarks/bench_exec.py $(ARGS)

bundle: ## make the executor as one directory for any image, with archives (dist/; needs a C compiler)
	@scripts/bootstrap.sh run && exec $(PY) -m images.bundle.build $(ARGS)

lock: ## resolve the locked versions anew (ARGS=--upgrade for the newest)
	@scripts/lock.sh $(ARGS)

clean: ## remove .venv and caches; data of `make up` stays where it is
	@rm -rf .venv .venv.lock .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
