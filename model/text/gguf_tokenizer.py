"""The tokenizer inside a GGUF file: byte-level BPE by its merges, or SentencePiece by its scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from xsake.model.text.sentencepiece import by_scores
from xsake.model.text.tokenizer import Tokenizer, byte_level_bpe

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are never split; the latter are text, such as Gemma's empty lines


def read_tokenizer(path: Path, get: Callable[..., Any]) -> Tokenizer:
    """The tokenizer of the file at `path`; `get(field, *default)` gives the file's fields, checked."""
    kind = get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise NotImplementedError(
            f"{path} has a tokenizer of kind {kind!r}; byte-level BPE ('gpt2') and SentencePiece ('llama') are "
            "read. Use the model's safetensors folder, with its tokenizer.json"
        )
    tokens, kinds = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ValueError(f"{path} has {len(tokens)} tokens, but {len(kinds)} types of tokens")
    special, whole = (
        [t for t, k in zip(tokens, kinds, strict=True) if k == kind] for kind in (_CONTROL, _USER_DEFINED)
    )
    bos = _token(get, "tokenizer.ggml.bos_token_id", tokens, None)
    eos = _token(get, "tokenizer.ggml.eos_token_id", tokens)
    template = get("tokenizer.chat_template", None)
    if kind == "gpt2":
        core = byte_level_bpe(tokens, get("tokenizer.ggml.merges"), get("tokenizer.ggml.pre", "gpt-2"))
    else:
        scores = get("tokenizer.ggml.scores")
        if len(scores) != len(tokens):
            raise ValueError(f"{path} has {len(tokens)} tokens, but {len(scores)} scores")
        unknown = _token(get, "tokenizer.ggml.unknown_token_id", tokens, None)
        add_space = get("tokenizer.ggml.add_space_prefix", True)
        core = by_scores(tokens, scores, never=[*special, *whole], unknown=unknown, add_space=add_space)
    add_bos = get("tokenizer.ggml.add_bos_token", kind == "llama")
    return Tokenizer.of(core, special=special, whole=whole, bos=bos, eos=eos, add_bos=add_bos, template=template)


def _token(get: Callable[..., Any], name: str, tokens: list[str], *default: Any) -> Any:
    number = get(name, *default)
    if number is not None and number >= len(tokens):
        raise ValueError(f"{name}={number} must be below the number of tokens, {len(tokens)}")
    return None if number is None else tokens[number]
