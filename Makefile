# Every target but test-frameworks and test-torch makes .venv when it is missing, and again when pyproject.toml, constraints.txt or C files change.
# `make PYTHON=python3.11 test` chooses the interpreter; constraints.txt names versions that need 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# What the library of compiled passes is built from, with .venv.
LIBRARY := setup.py $(wildcard commhooks/native/*.c commhooks/native/*.h)
FRAMEWORKS_STAMP := .venv-frameworks/.installed
FRAMEWORKS_PINS := -c constraints.txt -c constraints-frameworks.txt
# Sections of the benchmarks; none: all.
BENCH ?=
# Options of `python -m tests.mutants try`.
MUTANTS ?=
# The documentation's theme advertises its successor at every build.
export NO_MKDOCS_2_WARNING := 1
# Tests start hundreds of processes: none compiles again what another one has, also where no bytecode is to be kept.
export PYTHONDONTWRITEBYTECODE :=
# One test more at a time than there are cores, as many tests wait for others, and at most eight. Each worker begins with
# a run of files, and takes half of what another has left once it has none: few files are divided.
CORES := $(shell n=$$(nproc); echo $$((n < 2 ? 2 : n > 8 ? 8 : n)))
WORKERS := $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
SIDE_BY_SIDE := -n $(WORKERS) --dist worksteal

.PHONY: help demo leaderboard test test-fast test-all test-eager test-frameworks test-processors test-torch test-torch-suite test-virtual-device check bench bench-check docs soak soak-hooks soak-nestings soak-kills soak-network soak-cluster torch-suite guard models mutants gpu many-ranks release-rehearsal clean

help:
	@echo "make demo         train on 2 ranks over an emulated 100 Mbit/s link under five hooks; report in runs/demo"
	@echo "make leaderboard  train under every compressor; report in runs/leaderboard, tables and plots in docs/guide/leaderboard"
	@echo "make test-fast    the tests that start no process, one row of each form of compressor (for editing)"
	@echo "make test         the test suite: every compressor, every mechanism and command once"
	@echo "make test-all     every row, exit, processor, framework and device, and another PyTorch; continues where it was stopped"
	@echo "make test-eager   the compressors' laws again without the passes that are compiled, with the kernels of a processor that has SSE4 alone"
	@echo "make test-frameworks  the integrations with Lightning, Accelerate, Trainer, Ray and torchft, and PEFT, in .venv-frameworks; and the wheel by itself"
	@echo "make test-processors  what depends on a processor's kernels, under two others than its own"
	@echo "make test-torch TORCH=2.15.0  what depends on PyTorch, with this version in an environment of its own, which KEEP=1 keeps;"
	@echo "                  PAGE=1 writes a row of docs/versions.md, PYTHON=python3.12 chooses the interpreter (about 10 minutes and a download),"
	@echo "                  SHORT=1 tries what most often fails"
	@echo "make test-torch-suite  most of PyTorch's own DDP tests, with ddp_core's class in place of theirs"
	@echo "make mutants      sixty seeded faults, each with the tests that come by it, until one finds it (up to an hour);"
	@echo "                  continues where it was stopped; MUTANTS=--fast: only those of make test-fast; MUTANTS=--all: then the whole suite"
	@echo "make guard        programs whose replicas drift apart, and sound ones, under every wrapper: which the guard notices (5 minutes)"
	@echo "make models       eight kinds of model, through five ways in, with three compressors: equal replicas, bytes by formula, and the loss (15 minutes)"
	@echo "make test-virtual-device  the CUDA code, late and in odd orders, on a device that lives in the CPU (needs g++)"
	@echo "make check        lint, format, types, and the documentation built strictly"
	@echo "make docs         build the documentation into site/"
	@echo "make bench        ratios to PyTorch's own DDP and hooks, and to memory copies; writes docs/benchmarks.md and docs/benchmarks/ (40 minutes)"
	@echo "make bench-check  measures again and says which ratios got worse; BENCH='ddp hooks' make bench-check: only those sections"
	@echo "make torch-suite  all of PyTorch's own DDP tests, with both classes side by side"
	@echo "make soak         hundreds of processes that train and end, and other long runs"
	@echo "make soak-hooks   the hooks' part of that: 300 steps, 20 times, over 1 to 40 buckets on 2 to 4 ranks"
	@echo "                  (hours; SOAK_REPETITIONS=1 make soak-hooks repeats less)"
	@echo "make soak-nestings  another: a thousand random nestings of wrappers and compressors, against the laws that hold for all"
	@echo "make soak-kills   another part: ranks are killed 60 times, in runs that must end as if they had not been,"
	@echo "                  and processes that save 200 times; two attempts of one job save into one directory"
	@echo "make many-ranks   another: 16 ranks, PowerSGD and int8, both DDPs; prints seconds, keys and bytes in the store (two minutes)"
	@echo "make soak-network  another: stores that stop answering, cables that are pulled, links and their counters (needs root and iproute2)"
	@echo "make soak-cluster  another: how true the emulated link is, beside hosts at 20 to 500 Mbit/s"
	@echo "make gpu          the tests that need a CUDA device; they are skipped where there is none"
	@echo "make release-rehearsal  carry out RELEASING.md with an index on this machine; what would be uploaded goes to build/release/dist"
	@echo "make clean        remove .venv and everything that was built"

# torch first and by name: with it in place, the rest is resolved against the version that constraints.txt names.
# No build isolation: setuptools then comes from constraints.txt too.
$(STAMP): pyproject.toml constraints.txt $(LIBRARY)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs Python 3.11 or newer for constraints.txt (got " + sys.version.split()[0] + "); say make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

# The frameworks of commhooks.integrations, apart: neither the demo nor the other tests wait for their download.
$(FRAMEWORKS_STAMP): pyproject.toml constraints.txt constraints-frameworks.txt
	test -x .venv-frameworks/bin/python || $(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet $(FRAMEWORKS_PINS) torch setuptools
	.venv-frameworks/bin/python -m pip install --quiet $(FRAMEWORKS_PINS) --no-build-isolation \
		-e '.[lightning,accelerate,transformers,ray,torchft]' peft hypothesis pytest pytest-timeout pytest-xdist tensorboard
	touch $@

demo: $(STAMP)
	$(BIN)/commhooks compare --out runs/demo --overwrite

release-rehearsal:
	rm -rf build/release
	mkdir -p build
	PYTHON=$(PYTHON) .ci/rehearse-release build/release

leaderboard: $(STAMP)
	$(BIN)/python -m experiments.studies leaderboard --out runs/leaderboard --overwrite --docs docs/guide/leaderboard \
		--accuracy commhooks/experiments/accuracy.json

test-fast: $(STAMP)
	$(BIN)/python -m pytest --fast -n $(CORES) --dist worksteal # none of them waits

test: $(STAMP)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

test-all: $(STAMP)
	$(BIN)/python -m tests.all

# With another processor's kernels, too: what is compiled here is not the only thing that a rank elsewhere computes with.
test-eager: $(STAMP)
	COMMHOOKS_COMPILED=off $(BIN)/python -m tests.processors --kernels SSE4 $(SIDE_BY_SIDE) \
		-m "not thorough and not soak" tests/commhooks/test_laws.py tests/commhooks/test_codecs.py tests/commhooks/test_sparse_family.py

test-frameworks: $(FRAMEWORKS_STAMP)
	.venv-frameworks/bin/python -m pytest -m frameworks $(SIDE_BY_SIDE) tests/frameworks

test-processors: $(STAMP)
	$(BIN)/python -m tests.processors $(SIDE_BY_SIDE)

test-torch:
	@test -n "$(TORCH)" || { echo "make test-torch: say which version, such as TORCH=2.15.0"; exit 2; }
	$(PYTHON) -m tests.versions $(TORCH) $(if $(KEEP),--keep) $(if $(PAGE),--page) $(if $(SHORT),--short)

test-torch-suite: $(STAMP)
	$(BIN)/python -m pytest -m "torch_suite and not soak" tests/torch_suite

# `python -m tests.mutants record -n 2 --dist worksteal` finds out anew which tests come by each fault (one run of the suite).
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants try $(MUTANTS)

guard: $(STAMP)
	$(BIN)/python -m tests.guard

models: $(STAMP)
	$(BIN)/python -m tests.models

# A process of its own: the device stays until it ends. VIRTUAL_DEVICE_REQUIRED=1: a device that cannot be built is an error.
test-virtual-device: $(STAMP)
	$(BIN)/python -m pytest -p tests.virtual_device.plugin --virtual-device=late,random:1 \
		-m "(gpu or virtual_device) and not soak" $(SIDE_BY_SIDE) tests/gpu tests/virtual_device

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.virtual_device.mutants | cmp - docs/guide/virtual-device/mutants.md
	$(BIN)/mkdocs build --strict # with --quiet it would overlook warnings

docs: $(STAMP)
	$(BIN)/mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python -m experiments.studies bench $(BENCH) --results docs/benchmarks.json

bench-check: $(STAMP)
	$(BIN)/python -m experiments.studies bench $(BENCH) --check docs/benchmarks.json

torch-suite: $(STAMP)
	$(BIN)/python -m tests.torch_suite

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak -s tests

soak-hooks: $(STAMP)
	$(BIN)/python -m pytest -m soak -v -s tests/commhooks

# All of them, those of `make test` too.
soak-nestings: $(STAMP)
	$(BIN)/python -m pytest -m "" tests/commhooks/test_nestings.py

soak-kills: $(STAMP)
	$(BIN)/python -m pytest -m soak -v -s tests/soak/test_kills.py tests/soak/test_attempts.py

many-ranks: $(STAMP)
	$(BIN)/python -m pytest -m soak -v -s tests/soak/test_many_ranks.py

soak-network: $(STAMP)
	$(BIN)/python -m pytest -m soak -v -s tests/soak/test_silence.py tests/soak/test_cluster.py tests/soak/test_counters.py

soak-cluster: $(STAMP)
	$(BIN)/python -m pytest -m soak -v -s tests/soak/test_slow_cluster.py

gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu -v tests/gpu

clean:
	rm -rf .venv .venv-frameworks .venv-torch-* site build dist *.egg-info commhooks/native/_kernels.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
