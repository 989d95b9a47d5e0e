"""The names of methods, calls, kernels, models and tasks in words, for tables, pictures and the dashboard."""

from __future__ import annotations

from collections.abc import Callable

# Methods of the literature have their usual names; what is compared are our versions of them, which choose blocks.
METHODS = {
    "ada_kv": "AdaKV",
    "big_bird": "BigBird",
    "blasst": "BLASST",
    "cobs": "COBS",
    "duo": "DuoAttention",
    "entropy_infer": "EntropyInfer",
    "flash_prefill": "FlashPrefill",
    "flex_prefill": "FlexPrefill",
    "hads": "HADS",
    "hads_before": "HADS before",
    "hads_equal_heads": "HADS, all heads equally sensitive",
    "hads_estimate_top_k": "HADS's estimate, as many blocks in every row",
    "hads_estimate_top_p": "HADS's estimate, the same share of the attention in every row",
    "hads_group": "HADS, one mask per K/V head",
    "hads_no_burstiness": "HADS, without burstiness",
    "hads_no_exact_rows": "HADS, without exact rows",
    "hads_rule_antidiagonal": "HADS's rule on XAttention's scores",
    "hads_rule_mean_pool": "HADS's rule on mean-pooled scores",
    "hads_shares_top_k": "mean-pooled top-k with HADS's head shares",
    "hads_v1": "HADS, first idea",
    "hads_v1_random": "HADS, first idea, random blocks",
    "kascade": "Kascade",
    "longformer": "Longformer",
    "mean_top_k": "mean-pooled top-k",
    "minference": "MInference",
    "oracle_gain": "oracle",
    "oracle_top_k": "oracle, as many blocks in every row",
    "oracle_top_p": "oracle, the same share of the attention in every row",
    "power": "PowerAttention",
    "prism": "Prism",
    "quest": "Quest",
    "sink_window": "sink + window",
    "sliding_window": "window",
    "sparge": "SpargeAttention",
    "vertical_slash": "vertical-slash (MInference)",
    "x_attention_16": "XAttention, stride 16",
    "x_attention_8": "XAttention",
    "x_attention_8_heads": "XAttention, a threshold per head",
}
# Causal unless a name says otherwise; "32 heads on 8": query heads on heads of keys and values.
CALLS = {
    "cpu4k": "4096 tokens, 8 heads of 64",
    "cpu16k": "16384 tokens, 8 heads of 64",
    "gpt4k": "4 x 4096 tokens, 16 heads of 128",
    "gpt4k_d64": "4 x 4096 tokens, 12 heads of 64",
    "llama32k": "32768 tokens, 32 heads on 8 of 128",
    "full16k": "16384 tokens, 16 heads of 128, not causal",
    "mla16k": "16384 tokens, 16 heads of 192, values of 128",
    "odd10k_d96": "10000 tokens, 16 heads of 96",
    "smollm8k": "8192 tokens, SmolLM2's heads (eight layers)",
}
KERNELS = {
    "cudnn": "cuDNN, dense",
    "cudnn dense": "cuDNN, dense",
    "dense": "dense",
    "dense by cudnn": "cuDNN, dense",
    "ejkernel": "ejkernel",
    "fa4": "FlashAttention-4",
    "fa4 dense": "FlashAttention-4, dense",
    "fa4 dense, deterministic": "FlashAttention-4, dense, deterministic",
    "fastvideo": "FastVideo",
    "flex": "torch FlexAttention",
    "hads": "HADS",
    "jax.nn": "jax.nn",
    "pallas mosaic": "JAX's Pallas kernel for Hopper, dense",
    "pallas triton": "JAX's Pallas kernel for Triton, dense",
    "raw_triton": "XSAKE's raw Triton kernels",
    "sparse": "fixed pattern",
    "xla": "XLA",
    "xsake": "XSAKE",
    "xsake block 64": "XSAKE, blocks of 64",
    "xsake uneven": "XSAKE, heads from 10% to 90%",
    "xsake uniform": "XSAKE, all heads alike",
    "xsake, any order": "XSAKE, deterministic=False",
    "xsake, blocks of 64": "XSAKE, blocks of 64",
}
MODELS = {
    "gemma3-270m": "Gemma 3 270M",
    "gpt2-124m": "GPT-2 (124M)",
    "llama-8b": "Llama 3.1 8B",
    "llama3-8b": "Llama 3 8B",
    "qwen2.5-1.5b": "Qwen2.5-1.5B",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
    "small": "small model",
    "smollm2": "SmolLM2-135M",
    "smollm2-135m": "SmolLM2-135M",
}
DOMAINS = {"code": "Python code", "pydocs": "Python documentation", "rfc": "RFCs"}  # of texts
TASKS = {
    "cwe": "most common words",
    "fwe": "most frequent codes",
    "niah_multikey_1": "needle among 4 keys",
    "niah_multikey_2": "needle among needles",
    "niah_multikey_3": "needle among needles, long keys",
    "niah_multiquery": "4 questions",
    "niah_multivalue": "4 values of one key",
    "niah_single_1": "needle in noise",
    "niah_single_2": "needle in essays",
    "niah_single_3": "needle with a long value",
    "qa_1": "question on one document",
    "qa_2": "question on two documents",
    "vt": "chain of variables",
}


def in_words(name: str) -> str:
    """The name of a method as a person reads it.

    >>> in_words("x_attention_8+forced"), in_words("sparge_older"), in_words("mine")
    ('XAttention + forced blocks', 'SpargeAttention, older version', 'mine')
    """
    plain, plus, _ = name.partition("+forced")
    newest = plain.removesuffix("_older")
    older = ", older version" if newest != plain else ""
    return METHODS.get(newest, newest.replace("_", " ")) + older + (" + forced blocks" if plus else "")


def call(name: str) -> str:
    return CALLS.get(name, name)


def kernel(name: str) -> str:
    return KERNELS.get(name, name)


def model(name: str) -> str:
    return MODELS.get(name, name)


def identity(name: str) -> str:
    """The name of a benchmark's record after that of its kind: a call, or a model and the length of its texts.

    >>> identity("gpt4k_d64"), identity("qwen2.5-coder-1.5b"), identity("cpu")
    ('4 x 4096 tokens, 12 heads of 64', 'Qwen2.5-Coder-1.5B', 'cpu')
    """
    return CALLS.get(name) or MODELS.get(name) or name.replace("_", " ")


COLUMNS: dict[str, Callable[[str], str]] = {  # of records, whose values have words
    "heads": model,
    "implementation": kernel,
    "method": in_words,
    "model": model,
    "preset": model,
    "workload": call,
}
