# The two commands: `make demo` and `make test`. Both create .venv and install first when needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt CMakeLists.txt \
  $(shell find src/inferloop/engine/compute/native/cpp -name '*.cpp' -o -name '*.h')
HAS_NATIVE := $(BIN)/python -c 'import inferloop.engine.compute.native._native' 2>/dev/null

.PHONY: setup demo test check peers clean

setup: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, found: $$($(PYTHON) --version)"; exit 3; }
	@$(PYTHON) -m venv $(VENV) || { echo "The venv module is missing: apt-get install python3-venv"; rm -rf $(VENV); exit 3; }

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP_INSTALL) -e .
	@$(HAS_NATIVE) || { \
	  echo "The native engine was not built: that takes a C++20 compiler and Python's headers"; \
	  echo "(apt-get install g++ python3-dev, then make clean demo; what went wrong: $(BIN)/pip install -v -e .)."; \
	  echo "Installing torch, which computes the same more slowly and starts in seconds, not at once."; \
	  $(PIP_INSTALL) -e '.[torch]'; }
	@touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(PIP_INSTALL) -e '.[torch,dev]'
	@$(HAS_NATIVE) || echo "The native engine was not built (apt-get install g++ python3-dev, then make clean test): its tests are skipped."
	@touch $(VENV)/.installed $@

demo: $(VENV)/.installed
	$(BIN)/inferloop up contracts/assistant.yaml --once

test: setup
	scripts/test

check: setup
	scripts/check

peers: setup  # for `python -m lab.peers.run` and `python -m lab.load_generators.run`
	lab/peers/install

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
