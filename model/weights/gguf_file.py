"""Models in GGUF files: llama.cpp's format, weights quantised or not, the tokenizer inside."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xsake._ground.fields import check
from xsake._ground.kinds import FLAG, TEXT, Kind, list_of, number, whole
from xsake.model.network import families
from xsake.model.network.config import ModelConfig
from xsake.model.network.rope import yarn_gain

if TYPE_CHECKING:
    from xsake.model.text.tokenizer import Tokenizer
    from xsake.model.weights.gguf_header import GGUFHeader

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # how llama.cpp names the parts of one model
_DIVISORS = "rope_freqs.weight"  # of the rotary frequencies: llama.cpp's form of Llama 3's scaling
_GEMMA3_27B_LAYERS = 62  # llama.cpp knows by this number that it scales its queries otherwise than the smaller ones

# The fields that are read, except for those of the model's shape, which `families` has. After "*" comes what follows
# the architecture.
_FIELDS: dict[str, Kind] = {
    "general.architecture": TEXT,
    "split.count": whole(),
    "*.rope.scaling.type": TEXT,
    "*.rope.scaling.factor": number(least=1),
    "*.rope.scaling.original_context_length": whole(),
    "*.rope.scaling.finetuned": FLAG,
    "*.rope.scaling.yarn_beta_fast": number(above=0),
    "*.rope.scaling.yarn_beta_slow": number(above=0),
    "*.rope.dimension_count": whole(),
    "*.attention.sliding_window_pattern": Kind(
        lambda value: whole().allows(value) or list_of(FLAG).allows(value), "an int of at least 1, or a list of flags"
    ),
    "*.attn_logit_softcapping": number(),
    "*.final_logit_softcapping": number(),
    "tokenizer.ggml.model": TEXT,
    "tokenizer.ggml.tokens": list_of(TEXT),
    "tokenizer.ggml.token_type": list_of(whole(0)),
    "tokenizer.ggml.scores": list_of(number()),
    "tokenizer.ggml.merges": list_of(TEXT),
    "tokenizer.ggml.pre": TEXT,
    "tokenizer.ggml.bos_token_id": whole(0),
    "tokenizer.ggml.eos_token_id": whole(0),
    "tokenizer.ggml.unknown_token_id": whole(0),
    "tokenizer.ggml.add_bos_token": FLAG,
    "tokenizer.ggml.add_space_prefix": FLAG,
    "tokenizer.chat_template": TEXT,
}


class GGUFFile:
    """One model, in one file or in several that llama.cpp split; a tensor is dequantised when it is read."""

    def __init__(self, path: Path):
        self.path = path
        parts = [_open(part) for part in _parts(path)]
        self._fields = parts[0][1].fields
        self._tensors: dict[str, Any] = {}
        for data, header in parts:
            if twice := sorted(self._tensors.keys() & header.tensors.keys()):
                raise ValueError(f"{path}: {twice[0]} is in several of the model's files")
            self._tensors |= {name: (data, tensor) for name, tensor in header.tensors.items()}
        if (count := self.get("split.count", 1)) != len(parts):
            raise ValueError(
                f"{path} is one of {count} files that make one model, and {len(parts)} was found: keep them together, "
                f"named NAME-00001-of-{count:05}.gguf and so on"
            )
        self.architecture = self.get("general.architecture")
        self.family = families.find(path, "architecture", self.architecture)
        self.config = self._read_config()
        self.names = families.gguf_names(self.config, self.family)

    @property
    def tensor_names(self) -> set[str]:
        return set(self._tensors) - {_DIVISORS}

    @property
    def formats(self) -> dict[str, int]:
        """How many tensors are stored in which way, such as {"F32": 61, "Q4_1": 210, "Q8_0": 1}."""
        names = [tensor.kind.name for _, tensor in self._tensors.values()]
        return {name: names.count(name) for name in sorted(set(names))}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1].shape

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """A tensor, or some of its rows, in float32; matrices are [out, in], and rotary pairs are i and i + D/2."""
        import gguf

        data, tensor = self._tensors[name]
        stored = data[tensor.start : tensor.start + tensor.size].reshape(*tensor.shape[:-1], -1)
        try:
            weight = gguf.dequantize(stored[rows] if len(tensor.shape) > 1 else stored, tensor.kind)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: {name} is stored as {tensor.kind.name}, which cannot be read") from error
        if self.family.gguf_pairs and (".attn_q." in name or ".attn_k." in name):
            weight = _pairs_to_halves(weight, self.config.q_heads if ".attn_q." in name else self.config.kv_heads)
        return weight

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the file holds."""
        from xsake.model.text.gguf_tokenizer import read_tokenizer

        try:
            return read_tokenizer(self.path, self.get)
        except ValueError as error:
            said = str(error)
            raise ValueError(said if said.startswith(str(self.path)) else f"{self.path}: {said}") from error

    def _read_config(self) -> ModelConfig:
        if caps := [name for name in ("attn", "final") if self.get(f"*.{name}_logit_softcapping", 0)]:
            raise NotImplementedError(f"{self.path}: not supported: {caps[0]}_logit_softcapping")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None or len(embedding[1].shape) != 2:
            raise ValueError(f"{self.path} lacks the tensor token_embd.weight, a matrix")
        vocab_size = embedding[1].shape[0]
        if (tokens := self.get("tokenizer.ggml.tokens", None)) is not None and len(tokens) != vocab_size:
            raise ValueError(
                f"{self.path} has {len(tokens)} tokens, but an embedding of {vocab_size}: vocabulary mismatch"
            )
        found = {"vocab_size": vocab_size, "tied": "output.weight" not in self._tensors} | self._scaling()
        names = families.gguf_fields(self.architecture)
        config = families.read_config(self.path, self._fields, names, found, self.family, tensors=len(self._tensors))
        turned = self.get("*.rope.dimension_count", config.head_dim)
        if turned != config.head_dim:
            raise NotImplementedError(
                f"{self.path} turns {turned} of {config.head_dim} features of a head by position; it must turn all"
            )
        config = dataclasses.replace(config, rope_base=_decimal(config.rope_base), norm_eps=_decimal(config.norm_eps))
        if self.architecture == "gemma3":
            if config.layers == _GEMMA3_27B_LAYERS:
                config = dataclasses.replace(config, scale_dim=config.width / config.q_heads)
            self._check_windows(config)
        return self._divided(config) if _DIVISORS in self._tensors else config

    def _check_windows(self, config: ModelConfig) -> None:
        """The layers with a window are Gemma 3's, if the file names them."""
        pattern = self.get("*.attention.sliding_window_pattern", config.full_every)
        windowed = [config.window_of(layer) is not None for layer in range(config.layers)]
        if pattern != (config.full_every if isinstance(pattern, int) else windowed):
            raise NotImplementedError(
                f"{self.path}: not supported: attention.sliding_window_pattern other than {config.full_every}"
            )

    def _scaling(self) -> dict[str, Any]:
        """The fields of scaled rotary positions."""
        kind, start = self.get("*.rope.scaling.type", "none"), "*.rope.scaling."
        if kind == "none":
            return {}
        known = [name for name in _FIELDS if name.startswith(start)]
        given = [f"*{name.removeprefix(self.architecture)}" for name in self._fields]
        unknown = [name for name in given if name.startswith(start) and name not in known]
        if kind not in ("linear", "yarn") or unknown:
            what = ", ".join([repr(kind), *(name.removeprefix(start) for name in unknown)])
            raise NotImplementedError(f"{self.path} scales its rotary positions ({what}), which is not supported")
        found = {"rope_scaling": kind, "rope_factor": self.get("*.rope.scaling.factor")}
        if kind == "yarn":
            found |= {
                "rope_context": self.get("*.rope.scaling.original_context_length"),
                "rope_low": self.get("*.rope.scaling.yarn_beta_slow", 1),
                "rope_high": self.get("*.rope.scaling.yarn_beta_fast", 32),
                "rope_gain": yarn_gain(found["rope_factor"]),
            }
        return found

    def _divided(self, config: ModelConfig) -> ModelConfig:
        """The configuration with Llama 3's scaling, of which GGUF files hold only the result."""
        from xsake.model.network import rope

        if self.shape(_DIVISORS) != (config.head_dim // 2,):
            raise ValueError(
                f"{self.path}: {_DIVISORS} has shape {self.shape(_DIVISORS)}, not ({config.head_dim // 2},)"
            )
        stored = self.read(_DIVISORS)
        if not np.isfinite(stored).all() or stored.max() < 1:
            raise ValueError(f"{self.path}: {_DIVISORS} must hold finite numbers of at least 1")
        scaled = dataclasses.replace(config, rope_factor=float(stored.max()))
        plain = rope.frequencies(config)
        if not np.allclose(rope.divisors(scaled, plain), stored, rtol=1e-3):
            raise NotImplementedError(
                f"{self.path} scales its rotary positions ({_DIVISORS}) by another rule than Llama 3's, which is not "
                "supported"
            )
        return scaled

    def get(self, name: str, *default: Any) -> Any:
        """A field's value, checked; "*" stands for the architecture. Without a default, the field must be there."""
        kind = _FIELDS[name]
        name = name.replace("*", getattr(self, "architecture", "*"))
        if name in self._fields:
            check(name, self._fields[name], kind, self.path)
            return self._fields[name]
        if default:
            return default[0]
        raise ValueError(f"{self.path} lacks the field {name}")


def _parts(path: Path) -> list[Path]:
    """All files of the model that the file is a part of."""
    if (split := _SPLIT.fullmatch(path.name)) is None:
        return [path]
    name, _, count = split.groups()
    parts = [path.with_name(f"{name}-{number:05}-of-{count}.gguf") for number in range(1, int(count) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise FileNotFoundError(f"{path} is one of {count} files, and {missing[0]} is not beside it")
    return parts


def _open(path: Path) -> tuple[np.ndarray, GGUFHeader]:
    """(the file's bytes, memory-mapped; its header)."""
    from xsake.model.weights.gguf_header import read_header

    try:
        data = np.memmap(path, np.uint8, "r")
        return data, read_header(data)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a GGUF file; is it cut short? ({error})") from error


def _pairs_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head from rotary pairs (0, 1), (2, 3), ... to pairs (0, D/2), (1, D/2 + 1), ..."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _decimal(x: float) -> float:
    """The number that was meant: 1e-05 is stored as the float32 9.999999747378752e-06."""
    return float(str(np.float32(x)))
