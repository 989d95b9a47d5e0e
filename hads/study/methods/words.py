"""The names of methods in words, for tables and pictures.

Methods of the literature have their usual names; what is compared are our versions of them, which choose blocks.
"""

from __future__ import annotations

NAMES = {
    "ada_kv": "AdaKV",
    "big_bird": "BigBird",
    "blasst": "BLASST",
    "cobs": "COBS",
    "duo": "DuoAttention",
    "entropy_infer": "EntropyInfer",
    "flash_prefill": "FlashPrefill",
    "flex_prefill": "FlexPrefill",
    "hads": "HADS",
    "hads_equal_heads": "HADS, all heads equally sensitive",
    "hads_estimate_top_k": "HADS's estimate, as many blocks in every row",
    "hads_estimate_top_p": "HADS's estimate, the same share of the attention in every row",
    "hads_group": "HADS, one mask per K/V head",
    "hads_no_burstiness": "HADS, without burstiness",
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


def in_words(method: str) -> str:
    """
    >>> in_words("x_attention_8+forced"), in_words("sparge_older"), in_words("mine")
    ('XAttention + forced blocks', 'SpargeAttention, older version', 'mine')
    """
    plain, plus, _ = method.partition("+forced")
    name = plain.removesuffix("_older")
    older = ", older version" if name != plain else ""
    return NAMES.get(name, name.replace("_", " ")) + older + (" + forced blocks" if plus else "")
