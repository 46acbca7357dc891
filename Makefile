PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Else every process of the tests would compile this package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test pytest lint browser core-check docs reproduction bench clean

FIGURE ?= runs/demo/demo.png

demo: .venv/demo.done  ## FedAvg, FedAdam, contextual as printed and the default on two data sets: tables and a picture
	$(BIN)/fedcontext compare --dataset synthetic-1-1,synthetic-iid --rounds 60 --seeds 0,1,2 \
	  --algorithms fedavg,fedadam,fedavg-contextual,fedavg-memory --out runs/demo --figure $(FIGURE)

test: lint pytest  ## Everything CI checks

pytest: .venv/test.done browser
	$(BIN)/pytest --numprocesses 2 --dist loadgroup

lint: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

browser:  ## A Chromium for the tests of the report page, where this machine lets us install one
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	  && apt-get install -y -qq --no-install-recommends chromium fonts-liberation >/dev/null; } \
	  || echo "no Chromium here: the tests that need it are skipped"

core-check:  ## The wheel with the core's own dependencies alone, in an empty environment
	rm -rf build/core && $(PYTHON) -m venv build/core
	build/core/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/core/dist .
	build/core/bin/pip install --quiet --disable-pip-version-check build/core/dist/*.whl
	cd build/core && bin/fedcontext --version && bin/fedcontext run --rounds 2 --quiet --json && bin/fedcontext recommend

docs: .venv/test.done  ## The documentation site in build/docs
	$(BIN)/sphinx-build -q -W docs build/docs

reproduction: .venv/test.done  ## All experiments of the paper in full, the figures and docs/reproduction.md
	$(BIN)/fedcontext reproduce all --out runs/paper
	$(BIN)/fedcontext reproduce claims --out runs/paper --docs docs

bench: .venv/test.done  ## Us and the peers side by side, each in its own environment; ARGS=--quick for a trial
	$(BIN)/python benchmarks/run.py $(ARGS)

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/demo.done: pyproject.toml constraints.txt | .venv/bin/pip
	$(PIP) --editable '.[plot,numba]'
	touch $@

.venv/test.done: pyproject.toml constraints.txt | .venv/bin/pip
	$(PIP) --editable '.[test]'
	touch $@ .venv/demo.done

clean:
	rm -rf .venv dist build
