# make demo | test | lint: each installs into .venv first (exact pins of constraints.txt). PYTHON picks the interpreter.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do command -v $$p >/dev/null 2>&1 && \
  $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
SITE ?= local

.PHONY: demo test lint gate gpu-test baselines constraints clean install

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or 3.12 with the venv module is needed (apt-get install python3 python3-venv)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools wheel torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@$(BIN)/python -c 'from rdkit.Chem import Draw' 2>/dev/null || { \
	  echo "make: RDKit lacks system libraries: apt-get install libxrender1 libxext6 libexpat1" >&2; exit 2; }
	touch $@

demo: $(STAMP)
	$(BIN)/snakemake --profile cluster/$(SITE)
	@printf '\nReport     %s\nTables     %s\nFigures    %s\nNotebooks  %s\nRecords    %s\n' \
	  $(addprefix $(CURDIR)/results/$(SITE)/,report.html tables figures notebooks records)

# Two test files at a time, each on one thread.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile workflow
	$(BIN)/lint-imports
	$(BIN)/nbstripout --verify analysis/notebooks/*.ipynb

gate: $(STAMP)
	MEGAFOLD_GATE=full $(BIN)/python -m pytest -m gate

gpu-test: $(STAMP)
	$(BIN)/python -m pytest -m gpu

# The peers of the kernels sweep; openfold3 and protenix without their own (older) pins.
baselines: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[baselines]'
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement experiments/peers.txt

# Resolve the pins again (needs uv); torch is held at the release that the tests run with.
constraints:
	echo 'torch==2.13.0' | uv pip compile --quiet --universal --python-version 3.11 --all-extras pyproject.toml \
	  --no-annotate --no-header --constraint - --output-file constraints.txt

clean:
	rm -rf .venv results .snakemake
