# Every target sets itself up: a virtual environment in .venv (or .venv-jax-VERSION with JAX=VERSION), then the job.
JAX ?=
VENV := .venv$(if $(JAX),-jax-$(JAX))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(shell for p in python3.12 python3.13 python3.14 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && echo $$p && break; done)

.PHONY: test kernel demo docs lint bench slow interpret pretrained compile-gpu compile-tpu compare-code peer-tests recipes recipe-flax recipe-tokamax recipe-keras recipe-ejkernel recipe-easydel parity-transformers test-torch torch-peer-tests test-trackers serve-test wheel clean web check-web test-web browser

# With INTERPRETED=1 also what `make interpret` runs, in the same processes: each imports the package only once.
test: $(STAMP)
	@echo "pytest, a process per core: all tests that need neither minutes nor an accelerator. Two cores take a quarter of an hour; 'make kernel K=forward' tries one kernel in a minute."
	$(BIN)/python -m pytest -q -n auto --dist loadgroup $(if $(INTERPRETED),-m "not slow and not gpu and not tpu and not compile and not pretrained")

# One kernel, after every edit: three interpreted calls, and what became of its machine code; alone, it lists the kernels.
# K=forward, AGAINST=REVISION or a folder. Machine code needs .venv-cuda, which compare-code makes.
kernel: $(STAMP)
	@PYTHONPATH=src:tests $(BIN)/python -m tests.try_kernel $(K) --against '$(or $(AGAINST),HEAD)' \
		$(if $(wildcard .venv-cuda/.installed),--compiler .venv-cuda/bin/python)

slow: $(STAMP)
	$(BIN)/python -m pytest -q -m "slow and not gpu and not tpu"

# Only the files whose tests take `implementation`: importing the others would take as long as many tests.
interpret: $(STAMP)
	$(BIN)/python -m pytest -q -n auto -m "interpret and not slow and not gpu and not tpu" $$(grep -l 'implementation[,):]' tests/test_*.py)

# Fetches 330 MB once, into the user's cache.
pretrained: $(STAMP)
	$(BIN)/xsake model fetch smollm2
	$(BIN)/xsake model fetch gemma3-270m
	$(BIN)/python -m pytest -q -m pretrained

# Compilers of chips that are not here. Theirs are large wheels of their own: each has an environment of its own.
compile-gpu: .venv-cuda/.installed
	.venv-cuda/bin/python -m pytest -q -rs -m compile tests/test_compile_gpu.py
	TRITON_INTERPRET=1 .venv-cuda/bin/python -m pytest -q -rs -m interpret tests/test_raw_triton.py

# What this checkout changes in the machine code of the Hopper kernels; AGAINST=REVISION or a folder, CALLS='one;another'.
compare-code: .venv-cuda/.installed
	PYTHONPATH=tests .venv-cuda/bin/python -m tests.compare_machine_code --against '$(or $(AGAINST),HEAD)' $(if $(CALLS),--calls '$(CALLS)')

.venv-cuda/.installed: JAX_NOW = $(shell $(BIN)/python -c 'import jax; print(jax.__version__)')
.venv-cuda/.installed: $(STAMP)
	$(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet -e '.[dev,triton]' jax==$(JAX_NOW) jaxlib==$(JAX_NOW) nvidia-cuda-nvcc nvidia-nvvm
	.venv-cuda/bin/python -m pip install --quiet --no-deps jax-cuda13-plugin==$(JAX_NOW) jax-cuda13-pjrt==$(JAX_NOW)
	@touch $@

# With XSAKE_TPU_PYTHON, an interpreter that has libtpu, no environment is made; without libtpu it says so and skips.
compile-tpu: $(if $(XSAKE_TPU_PYTHON),,$(STAMP))
	PYTHONPATH=src $(or $(XSAKE_TPU_PYTHON),$(BIN)/python) -m xsake.kernels_pallas_tpu.ahead $(ARGS)

# JAX's, Flax's, tokamax's and ejkernel's own attention tests; PEERS="flax tokamax" runs only those two. See tests/peers.
peer-tests: $(STAMP)
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -e . -r tests/peers/requirements.txt
	.venv-peers/bin/python -m pip install --quiet --no-deps ejkernel==0.0.80.3
	.venv-peers/bin/python tests/peers/run.py $(PEERS)

# The recipes of docs/coming_from.md, run with the real libraries; RECIPES="keras easydel" runs only these two. ejkernel and
# EasyDeL ask for an older JAX: each has an environment of its own. EasyDeL's has torch, some gigabytes.
RECIPES ?= flax tokamax keras ejkernel easydel
recipes: $(addprefix recipe-,$(RECIPES))

recipe-flax recipe-tokamax recipe-keras:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -e . -r tests/peers/requirements.txt
	KERAS_BACKEND=jax .venv-peers/bin/python examples/$(@:recipe-%=%)_*.py

recipe-ejkernel:
	$(PYTHON) -m venv .venv-ejkernel
	.venv-ejkernel/bin/python -m pip install --quiet -e . ejkernel==0.0.80.3
	.venv-ejkernel/bin/python examples/ejkernel_attention.py

recipe-easydel:
	$(PYTHON) -m venv .venv-easydel
	.venv-easydel/bin/python -m pip install --quiet -e . -r tests/peers/easydel_requirements.txt
	.venv-easydel/bin/python -m pip install --quiet --no-deps easydel==0.3.0 eformer==0.0.99.12 ejkernel==0.0.78
	.venv-easydel/bin/python examples/easydel_model.py

# transformers' own generation tests, on torch: an environment of its own, of some gigabytes. See tests/peers.
torch-peer-tests:
	$(PYTHON) -m venv .venv-torch-peers
	.venv-torch-peers/bin/python -m pip install --quiet -e '.[torch]' -r tests/peers/torch_requirements.txt
	.venv-torch-peers/bin/python tests/peers/run.py transformers

# Every family of models against transformers' own; torch is some gigabytes, so it has an environment of its own.
parity-transformers:
	$(PYTHON) -m venv .venv-transformers
	.venv-transformers/bin/python -m pip install --quiet -e '.[model]' torch transformers sentencepiece
	.venv-transformers/bin/python tests/parity_transformers.py

# Models of transformers that attend by xsake, in the same environment, and torch's flex_attention beside xsake.compat.flex.
test-torch:
	$(PYTHON) -m venv .venv-transformers
	.venv-transformers/bin/python -m pip install --quiet -e '.[dev,torch]'
	.venv-transformers/bin/python -m pytest -q -rs tests/test_torch.py tests/test_torch_hads.py tests/test_torch_gpu.py
	.venv-transformers/bin/python tests/peers/flex_torch.py

# sglang-jax on the CPU, with xsake in it, asked by a real client. It pins a JAX: an environment of its own, 1 GB.
serve-test:
	$(PYTHON) -m venv .venv-serve
	.venv-serve/bin/python -m pip install --quiet -r tests/serve_requirements.txt
	.venv-serve/bin/python -m pip install --quiet --no-deps sglang-jax==0.1.0rc0
	PYTHONPATH=src .venv-serve/bin/python -m pytest -q -rs -W default tests/test_serving.py

# Weights & Biases, Trackio and TensorBoard are 200 MB: they have an environment of their own.
test-trackers: $(STAMP)
	$(PYTHON) -m venv .venv-track
	.venv-track/bin/python -m pip install --quiet -e '.[dev,track]' tensorboard
	.venv-track/bin/python -m pytest -q -rs tests/test_train_trackers.py

demo: $(STAMP)
	$(BIN)/xsake demo

# After mypy, where both are asked for: the tests beside them have compiled Python by then.
docs: $(STAMP) | $(filter lint,$(MAKECMDGOALS))
	$(BIN)/python -m sphinx -q -W --keep-going -n -b html docs docs/_build/html
	@echo docs/_build/html/index.html

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The first run on a machine records its baseline. A machine that is too busy for a verdict is no failure.
bench: $(STAMP)
	$(BIN)/python -m benchmarks.gate || [ $$? -eq 3 ]
	$(BIN)/python -m pytest benchmarks -q -rs -p no:xdist -p no:cacheprovider

# The pages of the dashboard, from dashboard/web into dashboard/static, which is committed: users need no Node.
web:
	dashboard/web/build

check-web:
	dashboard/web/build --check

# The pages in a real browser: Debian's chromium, driven by playwright, which downloads no browser of its own. With both,
# `make test` opens the pages too.
test-web: browser
	$(BIN)/python -m pytest -q -rs tests/web

browser: $(STAMP)
	@command -v $${XSAKE_CHROMIUM:-/usr/bin/chromium} >/dev/null || \
		{ apt-get update --quiet && apt-get install --yes --quiet --no-install-recommends chromium; } || \
		{ echo "Install chromium (Debian: apt-get install chromium), or name one: make test-web XSAKE_CHROMIUM=/path/to/chromium" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet 'playwright>=1.50'

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf .venv .venv-jax-* .venv-cuda .venv-peers .venv-ejkernel .venv-easydel .venv-track .venv-transformers .venv-serve build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks docs/_build out dashboard/web/node_modules

# By uv, which is faster; by pip, whose settings uv does not read, where uv finds no packages.
# Every editable installation warns of folders that may take precedence over the package: here they are the package.
$(STAMP): export PYTHONWARNINGS = ignore:Editable installation
$(STAMP): PINS = $(if $(JAX),jax==$(JAX) jaxlib==$(JAX))
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "xsake needs Python 3.12 or newer, and none was found. Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Installing into $(VENV), once: about a minute."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python --quiet -e '.[dev]' $(PINS) || $(BIN)/python -m pip install --quiet -e '.[dev]' $(PINS)
	@touch $@
