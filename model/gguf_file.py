"""Llama models in GGUF files: llama.cpp's format, weights quantised or not, the tokenizer inside."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xsake.model import llama_names
from xsake.model.config import ModelConfig
from xsake.model.fields import Flag, Kind, ListOf, Text, Whole, check

if TYPE_CHECKING:
    from xsake.model.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are never split

# The fields that are read, except for those of the model's shape, which `llama_names` has.
_FIELDS: dict[str, Kind] = {
    "general.architecture": Text(),
    "llama.rope.scaling.type": Text(),
    "llama.rope.dimension_count": Whole(),
    "tokenizer.ggml.model": Text(),
    "tokenizer.ggml.tokens": ListOf(Text()),
    "tokenizer.ggml.token_type": ListOf(Whole(0)),
    "tokenizer.ggml.merges": ListOf(Text()),
    "tokenizer.ggml.pre": Text(),
    "tokenizer.ggml.bos_token_id": Whole(0),
    "tokenizer.ggml.eos_token_id": Whole(0),
    "tokenizer.ggml.add_bos_token": Flag(),
    "tokenizer.chat_template": Text(),
}


class GGUFFile:
    """One model; a tensor is dequantised when it is read."""

    def __init__(self, path: Path):
        from xsake.model.gguf_header import read_header

        self.path = path
        try:
            self._data = np.memmap(path, np.uint8, "r")
            header = read_header(self._data)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path} cannot be read as a GGUF file; is it cut short? ({error})") from error
        self._fields, self._tensors = header.fields, header.tensors
        self.config = self._read_config()
        self.names = llama_names.gguf_names(self.config)

    @property
    def tensor_names(self) -> set[str]:
        return set(self._tensors)

    @property
    def formats(self) -> dict[str, int]:
        """How many tensors are stored in which way, such as {"F32": 61, "Q4_1": 210, "Q8_0": 1}."""
        names = [tensor.kind.name for tensor in self._tensors.values()]
        return {name: names.count(name) for name in sorted(set(names))}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32; matrices are [out, in], and rotary pairs are i and i + D/2."""
        import gguf

        tensor = self._tensors[name]
        stored = self._data[tensor.start : tensor.start + tensor.size]
        try:
            weight = gguf.dequantize(stored.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: {name} is stored as {tensor.kind.name}, which cannot be read") from error
        for part, heads in (("attn_q", self.config.q_heads), ("attn_k", self.config.kv_heads)):
            if f".{part}." in name:
                weight = _pairs_to_halves(weight, heads)
        return weight

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file holds."""
        from xsake.model import tokenizer

        kind = self._get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise NotImplementedError(
                f"{self.path} has a tokenizer of kind {kind!r}; only byte-level BPE ('gpt2') is read. Use the "
                f"model's safetensors folder, with its tokenizer.json"
            )
        tokens, kinds = self._get("tokenizer.ggml.tokens"), self._get("tokenizer.ggml.token_type")
        if len(kinds) != len(tokens):
            raise ValueError(f"{self.path} has {len(tokens)} tokens, but {len(kinds)} types of tokens")
        try:
            return tokenizer.byte_level_bpe(
                tokens=tokens,
                merges=self._get("tokenizer.ggml.merges"),
                split=self._get("tokenizer.ggml.pre", "gpt-2"),
                special=[t for t, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)],
                bos=self._token("tokenizer.ggml.bos_token_id", tokens, None),
                eos=self._token("tokenizer.ggml.eos_token_id", tokens),
                add_bos=self._get("tokenizer.ggml.add_bos_token", False),
                template=self._get("tokenizer.chat_template", None),
            )
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _token(self, name: str, tokens: list[str], *default: Any) -> Any:
        number = self._get(name, *default)
        if number is not None and number >= len(tokens):
            raise ValueError(f"{name}={number} must be below the number of tokens, {len(tokens)}")
        return None if number is None else tokens[number]

    def _read_config(self) -> ModelConfig:
        architecture = self._get("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{self.path} holds a model of architecture {architecture!r}; only 'llama' can be loaded")
        scaling = self._get("llama.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._tensors:
            raise NotImplementedError(f"{self.path} scales its rotary positions ({scaling!r}), which is not supported")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError(f"{self.path} lacks the tensor token_embd.weight, a matrix")
        vocab_size = embedding.shape[0]
        if (tokens := self._get("tokenizer.ggml.tokens", None)) is not None and len(tokens) != vocab_size:
            raise ValueError(
                f"{self.path} has {len(tokens)} tokens, but an embedding of {vocab_size}: vocabulary mismatch"
            )
        found = {"vocab_size": vocab_size, "tied": "output.weight" not in self._tensors}
        config = llama_names.read_config(
            self.path, self._fields, llama_names.GGUF_FIELDS, found, tensors=len(self._tensors)
        )
        turned = self._get("llama.rope.dimension_count", config.head_dim)
        if turned != config.head_dim:
            raise NotImplementedError(
                f"{self.path} turns {turned} of {config.head_dim} features of a head by position; it must turn all"
            )
        return dataclasses.replace(config, rope_base=_decimal(config.rope_base), norm_eps=_decimal(config.norm_eps))

    def _get(self, name: str, *default: Any) -> Any:
        if name in self._fields:
            check(name, self._fields[name], _FIELDS[name], self.path)
            return self._fields[name]
        if default:
            return default[0]
        raise ValueError(f"{self.path} lacks the field {name}")


def _pairs_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from rotary pairs (0, 1), (2, 3), ... to pairs (0, D/2), (1, D/2 + 1), ..."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _decimal(x: float) -> float:
    """The number that was meant: 1e-05 is stored as the float32 9.999999747378752e-06."""
    return float(str(np.float32(x)))
