"""Llama models in GGUF files: llama.cpp's format, weights quantised or not, the tokenizer inside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xsake.model import llama_names
from xsake.model.config import ModelConfig

if TYPE_CHECKING:
    from xsake.model.tokenizer import Tokenizer

_CONTROL, _USER_DEFINED = 3, 4  # kinds of token that text is never split inside


class GGUFFile:
    """One model; nothing is dequantised before it is asked for."""

    def __init__(self, path: Path):
        import gguf

        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, OSError) as error:
            raise ValueError(f"{path} cannot be read as a GGUF file; is it cut short? ({error})") from error
        self._fields = dict(reader.fields)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._read_config()
        self.names = llama_names.gguf_names(self.config)

    @property
    def tensor_names(self) -> set[str]:
        return set(self._tensors)

    @property
    def formats(self) -> dict[str, int]:
        """How many tensors are stored in which way, such as {"F32": 61, "Q4_1": 210, "Q8_0": 1}."""
        names = [tensor.tensor_type.name for tensor in self._tensors.values()]
        return {name: names.count(name) for name in sorted(set(names))}

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32; matrices are [out, in], and rotary pairs are i and i + D/2."""
        import gguf

        tensor = self._tensors[name]
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
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
        bos = self._get("tokenizer.ggml.bos_token_id", None)
        return tokenizer.byte_level_bpe(
            tokens=tokens,
            merges=self._get("tokenizer.ggml.merges"),
            split=self._get("tokenizer.ggml.pre", "gpt-2"),
            special=[t for t, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)],
            bos=None if bos is None else tokens[bos],
            eos=tokens[self._get("tokenizer.ggml.eos_token_id")],
            add_bos=self._get("tokenizer.ggml.add_bos_token", False),
            template=self._get("tokenizer.chat_template", None),
        )

    def _read_config(self) -> ModelConfig:
        architecture = self._get("general.architecture")
        if architecture != "llama":
            raise ValueError(f"{self.path} holds a model of architecture {architecture!r}; only 'llama' can be loaded")
        scaling = self._get("llama.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._tensors:
            raise NotImplementedError(f"{self.path} scales its rotary positions ({scaling!r}), which is not supported")
        width, q_heads = self._get("llama.embedding_length"), self._get("llama.attention.head_count")
        head_dim = self._get("llama.attention.key_length", width // q_heads)
        turned = self._get("llama.rope.dimension_count", head_dim)
        if turned != head_dim:
            raise NotImplementedError(f"{self.path} turns {turned} of {head_dim} features of a head; all must be")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise ValueError(f"{self.path} lacks the tensor token_embd.weight")
        vocab_size = int(embedding.shape[1])
        if (tokens := self._fields.get("tokenizer.ggml.tokens")) is not None and len(tokens.data) != vocab_size:
            raise ValueError(
                f"{self.path} has {len(tokens.data)} tokens, but an embedding of {vocab_size}: vocabulary mismatch"
            )
        return ModelConfig(
            vocab_size=vocab_size,
            layers=self._get("llama.block_count"),
            width=width,
            q_heads=q_heads,
            kv_heads=self._get("llama.attention.head_count_kv", q_heads),
            head_dim=head_dim,
            mlp_width=self._get("llama.feed_forward_length"),
            context=self._get("llama.context_length"),
            rope_base=_decimal(self._get("llama.rope.freq_base", 10_000.0)),
            norm_eps=_decimal(self._get("llama.attention.layer_norm_rms_epsilon")),
            tied="output.weight" not in self._tensors,
        )

    def _get(self, name: str, *default: Any) -> Any:
        field = self._fields.get(name)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise ValueError(f"{self.path} lacks the field {name}")


def _pairs_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from rotary pairs (0, 1), (2, 3), ... to pairs (0, D/2), (1, D/2 + 1), ..."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _decimal(x: float) -> float:
    """The number that was meant: 1e-05 is stored as the float32 9.999999747378752e-06."""
    return float(str(np.float32(x)))
