# `make demo` and `make test` need Python >= 3.11 and nothing else: they make their own environment in $(VENV).
PYTHON ?= python3
# Versions of all packages: constraints.txt or, in an environment of its own, constraints-newest.txt.
CONSTRAINTS ?= constraints.txt
VENV ?= .venv$(patsubst constraints%.txt,%,$(CONSTRAINTS))
BIN = $(VENV)/bin
READY = $(VENV)/.ready
# Of what is installed little is ever imported, and that is compiled when it is.
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# The oldest and the newest tested Triton: `make test-deep` compiles with these, each from a folder of its own.
TRITONS = $(shell sed -n 's|^TESTED_TRITON = ("\([^"]*\)".*"\([^"]*\)")$$|\1 \2|p' kernels/common/trust.py)
# Tests use two processes; raise it on a bigger machine.
JOBS ?= 2
PYTEST = $(BIN)/pytest --numprocesses $(JOBS) --dist worksteal --durations 20 -m
QUICK = "not gpu and not deep"
DEEP = "not gpu"
COMPILES = tests/kernels/test_compiles.py
MUTANTS = tests/test_planted_bugs.py
# Tests start many processes: what one of them has compiled, the others find, also where the environment forbids it.
export PYTHONDONTWRITEBYTECODE =
PROMPT ?= a red circle moving to the right over a dark grey background

.PHONY: help demo finetune-demo test test-deep compiles mutants lint types site package check clean

help:
	@echo "make demo    the same video by full attention, near-lossless and fast, on the embedded model (CPU, two minutes)"
	@echo "make finetune-demo  finetune the embedded model to VMonarch and export it (CPU, minutes)"
	@echo "make test    run the tests that find every planted bug, in five minutes; CONSTRAINTS=constraints-newest.txt: with the newest torch and Triton"
	@echo "make test-deep  run all tests, and compile with the oldest and the newest Triton (before a release; not part of check)"
	@echo "make compiles  compile every kernel, for the architectures that differ"
	@echo "make mutants   plant bugs in the kernels and elsewhere; the tests have to find them"
	@echo "make lint    ruff"
	@echo "make types   mypy"
	@echo "make site    build the documentation in build/site/html; broken links end it"
	@echo "make package  build the sources' archive and the wheel in build/package, and check them"
	@echo "make check   lint, types, site, package, test, compiles and mutants"
	@echo "make clean   remove the environment and outputs of the tools"

$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "vmonarch needs Python >= 3.11, but $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=…"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	# torch first and by its exact version, so that the build which fits the machine is the one that stays
	$(PIP) "$$(grep '^torch==' $(CONSTRAINTS))"
	$(PIP) --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $(READY)

$(VENV)/triton-%: | $(READY)
	rm -rf $@.partial
	$(PIP) --no-deps --target $@.partial triton==$*
	mv $@.partial $@

# Not `vmonarch`: a model that is not finetuned to it makes no good video in that way.
demo: $(READY)
	@echo "The same video by full attention, near-lossless and fast, and what they differ by." \
		"A video of this size has 960 tokens and is no faster; the gain begins above 3840, on a GPU (480p has 32760)."
	$(BIN)/vmonarch compare "$(PROMPT)" --methods full near-lossless fast --output-dir outputs/demo
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
		$(BIN)/vmonarch bench kernels --shapes 16x28x52 --head-dims 128 --passes forward --methods cudnn vmonarch vmonarch-lite \
			--output outputs/demo/bench.json; \
	else echo "There is no GPU here to show the gain on."; fi

finetune-demo: $(READY)
	$(BIN)/vmonarch preprocess --procedural 16 --model embedded --output outputs/finetune-demo/clips
	$(BIN)/vmonarch preprocess --procedural 4 --model embedded --output outputs/finetune-demo/held-out seed=1
	$(BIN)/vmonarch compare "$(PROMPT)" --methods full vmonarch --output-dir outputs/finetune-demo/before
	ACCELERATE_USE_CPU=true $(BIN)/vmonarch finetune --config embedded-demo
	test -d outputs/finetune-demo/model || $(BIN)/vmonarch export outputs/finetune-demo/run --output outputs/finetune-demo/model
	$(BIN)/vmonarch compare "$(PROMPT)" --model outputs/finetune-demo/model --methods full vmonarch \
		--output-dir outputs/finetune-demo/after

test: $(READY)
	$(PYTEST) $(QUICK) --ignore $(COMPILES) --ignore $(MUTANTS)

test-deep: $(READY) $(TRITONS:%=$(VENV)/triton-%)
	$(PYTEST) $(DEEP)
	for triton in $(TRITONS); do COMPILE_WITH_TRITON=$$triton $(PYTEST) "not gpu" $(COMPILES) || exit 1; done

compiles: $(READY)
	$(PYTEST) $(QUICK) $(COMPILES)

mutants: $(READY)
	$(PYTEST) $(QUICK) $(MUTANTS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# All tracked files, as links need them; and the package without links between folders, which the reader of docstrings
# does not follow, and with an __init__.py everywhere.
site: $(READY)
	rm -rf build/site
	mkdir -p build/site/docs build/site/python
	git ls-files -z -- ':!tests' ':!*.safetensors' | tar --create --null --files-from - | tar --extract --directory build/site/docs
	find build/site/docs -type l -delete
	cp -RL vmonarch build/site/python/vmonarch
	find build/site/python -type d -exec touch {}/__init__.py \;
	env $$(sed -n 's/^Repository = "\(.*\)"$$/REPOSITORY=\1/p' pyproject.toml) $(BIN)/zensical build --strict --clean

# The wheel makes a video away from the repository: all that it needs is in it.
package: $(READY)
	rm -rf build/package build/installed
	$(BIN)/python -m build --outdir build/package
	$(BIN)/python -m build --wheel --outdir build/package pipelines/embedded_wheel
	$(BIN)/twine check --strict build/package/*
	$(PIP) --no-deps --target build/installed build/package/*.whl
	cd build/installed && $(abspath $(BIN))/python -m vmonarch generate "a red circle" --quiet --steps 1 --num-frames 5 --height 32 --width 32

# `compiles` and `mutants` in one run, in which no process waits for the other's last test.
check: lint types site package test
	$(PYTEST) $(QUICK) $(COMPILES) $(MUTANTS)

clean:
	rm -rf $(VENV) build .cache .pytest_cache .mypy_cache .ruff_cache *.egg-info
