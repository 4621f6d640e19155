# Every target makes its environment first; VENV=elsewhere uses another environment.
VENV ?= .venv
# PYTHON=python makes nothing, and measures with the patched SGLang of your current environment.
ifneq ($(origin PYTHON),command line)
PYTHON := $(VENV)/bin/python
READY := patch
endif
export OMP_NUM_THREADS ?= 1
# cpu: nothing here uses this machine's GPU, and the environment is for machines without a GPU.
export SGLANG_XSHARE_DEVICE ?=
GPU := $(if $(SGLANG_XSHARE_DEVICE),,$(shell nvidia-smi >/dev/null 2>&1 && echo yes))

.PHONY: help venv patch release-check wheel sglang-wheel lint test test-long test-cuda bench eval harness demo records gpu gpu-bundle clean

help:           ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/' | expand -t 16

venv:           ## the environment: pinned SGLang and its dependencies in .venv
	@VENV="$(VENV)" scripts/make_venv.sh

patch: venv     ## apply the patch queue to the installed release
	@$(VENV)/bin/sglang-xshare patch apply

SGLANG ?= 0.5.23
release-check: venv ## how each hunk of the queue fits an SGLang release, and a verdict: SGLANG=0.5.16
	@$(PYTHON) -m scripts.release_check $(SGLANG)

wheel: venv     ## the wheel of sglang-xshare in dist/
	@VENV="$(VENV)" scripts/make_wheel.sh

sglang-wheel: wheel ## a wheel of SGLang with the queue applied, in dist/: SGLANG=0.5.23
	@$(PYTHON) -m scripts.sglang_wheel $(SGLANG)

lint: venv      ## ruff, mypy, patch lint
	@VENV=$(VENV) scripts/lint.sh

ifeq ($(GPU),)
test: patch lint ## lint and the tests; under 25 minutes on two cores
	$(PYTHON) -m pytest -n 2 --dist loadfile --hypothesis-profile fixed

test-long: patch ## the tests that take longer, in resumable parts, two at once: LANES=2; one alone: PART=patching/test_kill
	@PYTHON=$(PYTHON) PART='$(PART)' LANES='$(LANES)' scripts/test_long.sh
else
# The kernels' tests run on the GPU. All other tests use no device, or need servers with upstream's CPU kernels.
KERNEL_TESTS := $(addprefix test/selection/test_,triton.py backends.py alignment.py triton_budgets.py routing_data.py) \
	test/stage/test_mask.py test/benchmark/gpu/test_replay.py
ON_CPU := SGLANG_XSHARE_DEVICE=cpu VENV=build/venv-cpu
test: patch
	$(PYTHON) -m pytest -m "" -k "not upstream" -n 4 $(KERNEL_TESTS)
	@$(MAKE) test $(ON_CPU)

test-long:
	@$(MAKE) test-long $(ON_CPU)
endif

test-cuda:      ## SGLang for CUDA served on a stand-in for a GPU (10 GB in build/cuda, over an hour; docs/gpu.md); some: PART=switches
	@SGLANG='$(SGLANG)' PART='$(PART)' scripts/test_cuda.sh

bench: $(READY) ## compare policies in the server: POLICIES="vanilla xshare:k0=1,add=24 oea:k0=3"; PYTHON=python: with your own SGLang
	$(PYTHON) -m benchmark.serving $(foreach policy,$(POLICIES),'$(policy)') $(BENCH_ARGS)

TASKS ?= arithmetic_domain
eval: $(READY) harness  ## lm-evaluation-harness with the policy off and on: TASKS="gsm8k ifeval", URL= of a running server; PYTHON=python, as for bench
	$(PYTHON) -m benchmark.evaluation $(TASKS) $(if $(URL),--url $(URL)) $(EVAL_ARGS)

# The constraint keeps the version of each installed package. pip accepts none with a path or an address.
harness: $(READY)
	@mkdir -p build
	@$(PYTHON) -m pip freeze --exclude-editable | grep '^[^@]*==[^@]*$$' >build/installed.txt
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-input -c build/installed.txt -r benchmark/evaluation/requirements.txt

demo: patch     ## serve a checkpoint with the policy off and on, and print what the policy changed
	$(PYTHON) -m benchmark.demo $(DEMO_ARGS)

records: patch  ## measure all that a CPU can, from a clean checkout (five hours on two cores), and write the pages' tables
	$(PYTHON) -m benchmark.records $(RECORDS_ARGS)

EXPERIMENT ?= all
gpu:            ## on an NVIDIA GPU: check, time and tabulate everything; QUICK=1: 9 minutes a call; one experiment: EXPERIMENT=layer, or its PARTS=...
	@scripts/gpu.sh $(EXPERIMENT) $(PARTS)

gpu-bundle:     ## fill .gpu/ for a GPU machine that can install nothing: FROM=folder with SGLang's archive
	@FROM=$(FROM) scripts/gpu_bundle.sh

clean:          ## remove what the other targets made, the environment included
	@VENV="$(VENV)" scripts/make_venv.sh --remove
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
