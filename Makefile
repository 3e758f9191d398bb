# `make demo`: a bare machine -> an answer from a real model.   `make test`: everything that needs no GPU.
# `make demo MODEL=nano`: from our own small model, which is in models/; MODEL=PATH: from any other.
# Only Python 3.11+ and make are assumed. All use .venv in this folder.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Extra pip options, e.g. TORCH_INDEX='<URL printed by PyTorch's install selector for CPU>' for the small CPU build.
TORCH_INDEX ?=
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
GGUF   := models/SmolLM2-135M-Instruct.Q4_1.gguf
SMOL   := models/smollm2-135m-instruct.ninfer
NANO   := models/ninfer-nano.ninfer
# Tests run in so many processes of one thread each: threads that wait for each other take twice as long.
WORKERS ?= 2
MODEL  := $(SMOL)
CHOSEN := $(if $(filter nano,$(MODEL)),$(NANO),$(MODEL))
ifeq ($(CHOSEN),$(NANO))
PROMPT ?= What is 2718 + 3141?
DEMO_OPTIONS ?= --greedy --presence-penalty 0
endif
PROMPT ?= Name three things that fly, and say in one sentence why a plane stays in the air.

.PHONY: demo chat test soak lint check bench clean

demo: $(VENV)/.run $(filter $(SMOL),$(CHOSEN))
	$(BIN)/ninfer "$(CHOSEN)" --prompt "$(PROMPT)" --max-new 200 $(DEMO_OPTIONS)

chat: $(VENV)/.run $(filter $(SMOL),$(CHOSEN))
	$(BIN)/ninfer "$(CHOSEN)" $(DEMO_OPTIONS)

test: $(VENV)/.dev $(GGUF)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

soak: $(VENV)/.dev $(GGUF)
	$(BIN)/python -m pytest -q -m soak

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(VENV)/.dev $(SMOL)
	$(BIN)/python -m bench.smollm2 --artifact $(SMOL) --gguf $(GGUF)
	$(BIN)/python -m bench.startup --artifact $(SMOL)
	$(BIN)/python -m bench.http_overhead --artifact $(SMOL)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "NInfer needs Python 3.11 or later; set PYTHON=/path/to/python3.11 (found: $$($(PYTHON) --version 2>&1))." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	@echo "Installing PyTorch into $(VENV) (once) ..."
	@$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.run: pyproject.toml constraints.txt $(VENV)/.torch
	@echo "Installing NInfer into $(VENV) ..."
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Installing test tools into $(VENV) ..."
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(GGUF): | $(VENV)/.run
	@$(BIN)/python tools/fetch_smollm2.py $@

$(SMOL): $(GGUF) | $(VENV)/.run
	@rm -f $@ $@.conversion.json
	$(BIN)/ninfer-convert --model $(GGUF) --out $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
