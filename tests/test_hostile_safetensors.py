"""Hostile and damaged safetensors folders: weights, config.json, tokenizer.json, tokenizer_config.json."""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import assert_refused, use

from xsake.model.data.tokenizer import train_tokenizer

WIDTH, MLP, VOCAB = 8, 16, 270
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "hidden_size": WIDTH,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": MLP,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_theta": 1e4,
}
LAYER = {
    "input_layernorm": (WIDTH,),
    "self_attn.q_proj": (8, WIDTH),
    "self_attn.k_proj": (4, WIDTH),
    "self_attn.v_proj": (4, WIDTH),
    "self_attn.o_proj": (WIDTH, 8),
    "post_attention_layernorm": (WIDTH,),
    "mlp.gate_proj": (MLP, WIDTH),
    "mlp.up_proj": (MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
}
SHAPES: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, WIDTH), "model.norm": (WIDTH,)} | {
    f"model.layers.0.{name}": shape for name, shape in LAYER.items()
}
TOKENIZER = json.loads(train_tokenizer(["hello hello world"], 270).to_str())
TOKENIZER_CONFIG = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages[0]['content'] }}"}
UP = "model.layers.0.mlp.up_proj.weight"

Change = Callable[[Any], Any]


def weights(header: Change = lambda header: header, *, size: int | None = None, keep: float = 1.0) -> bytes:
    """A safetensors file whose header is changed, or promised to have another size."""
    entries: dict[str, Any] = {}
    end = 0
    for name, shape in SHAPES.items():
        start, end = end, end + 4 * int(np.prod(shape))
        entries[f"{name}.weight"] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    changed = header(entries)
    head = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
    data = np.random.default_rng(0).standard_normal(end // 4).astype(np.float32).tobytes()
    content = struct.pack("<Q", len(head) if size is None else size) + head + data
    return content[: int(keep * len(content))]


def entry(**change: Any) -> bytes:
    return weights(lambda header: header | {UP: header[UP] | change})


GOOD: dict[str, Any] = {
    "model.safetensors": weights(),
    "config.json": CONFIG,
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": TOKENIZER_CONFIG,
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    """The valid folder with these files in place of its own: bytes, a value to write as JSON, or None for no file."""
    for name, content in (GOOD | files).items():
        if content is not None:
            (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


def config(**changes: Any) -> dict[str, Any]:
    return {"config.json": {k: v for k, v in (CONFIG | changes).items() if v is not ...}}


def tokenizer(**changes: Any) -> dict[str, Any]:
    return {"tokenizer.json": TOKENIZER | changes}


def model(**changes: Any) -> dict[str, Any]:
    return {"tokenizer.json": TOKENIZER | {"model": TOKENIZER["model"] | changes}}


def named(**changes: Any) -> dict[str, Any]:
    return {"tokenizer_config.json": TOKENIZER_CONFIG | changes}


def replacing(count: int) -> dict[str, Any]:
    double = {"type": "Replace", "pattern": {"String": "H"}, "content": "HH"}
    return {"type": "Sequence", "normalizers": [double] * count}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[Q]", "type_id": 0}}], "pair": []}
DEEP = b"[" * 100_000
CASES: dict[str, tuple[dict[str, Any], str]] = {
    # The weights.
    "empty": ({"model.safetensors": b""}, "cut short"),
    "cut in the header": ({"model.safetensors": weights(keep=0.05)}, "cut short"),
    "cut in the data": ({"model.safetensors": weights(keep=0.95)}, "cut short"),
    "header too long": ({"model.safetensors": weights(size=2**62)}, "cannot be read as a safetensors file"),
    "header past the file": ({"model.safetensors": weights(size=2**26)}, "cannot be read as a safetensors file"),
    "header is no JSON": ({"model.safetensors": weights(lambda _: b"{]")}, "cannot be read as a safetensors file"),
    "header is a list": ({"model.safetensors": weights(lambda _: [1])}, "cannot be read as a safetensors file"),
    "header is deep": ({"model.safetensors": weights(lambda _: DEEP)}, "cannot be read as a safetensors file"),
    "offset past the file": ({"model.safetensors": entry(data_offsets=[0, 2**40])}, "cannot be read as a safet"),
    "offset backwards": ({"model.safetensors": entry(data_offsets=[512, 0])}, "cannot be read as a safetensors"),
    "offset of another": ({"model.safetensors": entry(data_offsets=[0, 512])}, "cannot be read as a safetensors"),
    "shape too large": ({"model.safetensors": entry(shape=[2**40, 2**40])}, "cannot be read as a safetensors"),
    "shape negative": ({"model.safetensors": entry(shape=[-16, -8])}, "cannot be read as a safetensors file"),
    "unknown type": ({"model.safetensors": entry(dtype="F99")}, "cannot be read as a safetensors file"),
    "integers": ({"model.safetensors": entry(dtype="I32")}, f"{UP} is stored as I32; weights are read of F64"),
    "matrix turned": ({"model.safetensors": entry(shape=[WIDTH, MLP])}, r"has shape \(8, 16\), but .* \(16, 8\)"),
    "matrix of one dimension": ({"model.safetensors": entry(shape=[128])}, r"has shape \(128,\), but"),
    "no weights": ({"model.safetensors": None}, "holds no .safetensors file"),
    "tensor in two files": ({"more.safetensors": weights()}, "which another file of .* has too"),
    "no use": ({"more.safetensors": weights(lambda h: {"x": h[UP]}, keep=0)}, "cannot be read as a safetensors"),
    # The shape.
    "config empty": ({"config.json": b""}, "config.json is not JSON"),
    "config no JSON": ({"config.json": b"{'a': 1}"}, "config.json is not JSON"),
    "config no text": ({"config.json": b"\xff\xfe\x00"}, "config.json is not JSON"),
    "config deep": ({"config.json": DEEP}, "nested too deeply"),
    "config huge": ({"config.json": b" " * ((1 << 24) + 1)}, "more than 16,777,216 bytes"),
    "config a list": ({"config.json": [1, 2]}, r"must hold a JSON object, not \[1, 2\]"),
    "config a number": ({"config.json": b"1" * 5000}, "config.json is not JSON"),
    "config null": ({"config.json": None}, "config.json must be beside"),
    "kind missing": (config(model_type=...), "model_type None, which is not known"),
    "layers a million": (config(num_hidden_layers=10**6), "num_hidden_layers=1000000 must be an int"),
    "layers a googol": (config(num_hidden_layers=10**100), "num_hidden_layers=1000.* must be an int"),
    "layers a thousand": (config(num_hidden_layers=1000), "num_hidden_layers=1000, but there are only 11 tensors"),
    "layers float": (config(num_hidden_layers=1.0), "num_hidden_layers=1.0 must be an int"),
    "layers null": (config(num_hidden_layers=None), "lacks the field num_hidden_layers"),
    "heads 0 and no size": (config(num_attention_heads=0, head_dim=...), "num_attention_heads=0 must be an int"),
    "heads too many": (config(num_attention_heads=100, head_dim=...), "head_dim=0 must be an int"),
    "KV heads 3": (config(num_key_value_heads=3), "q_heads=2 must be divisible by kv_heads=3"),
    "head odd": (config(head_dim=3), "head_dim=3 must be even"),
    "width huge": (config(hidden_size=2**31 - 8), r"has shape \(270, 8\), but"),
    "vocabulary too small": (config(vocab_size=5), r"the tokenizer has \d+ tokens, but the model only 5"),
    "context True": (config(max_position_embeddings=True), "max_position_embeddings=True must be an int"),
    "epsilon NaN": (config(rms_norm_eps=float("nan")), "rms_norm_eps=nan must be a finite number"),
    "base too large for a float": (config(rope_theta=10**400), "rope_theta=1000.* must be a finite number"),
    "base negative": (config(rope_theta=-1.0), "rope_theta=-1.0 must be a finite number, above 0"),
    "base a list in a table": (config(rope_parameters={"rope_theta": [1]}), r"rope_theta=\[1\] must be a finite"),
    "rope a list": (config(rope_scaling=[1]), r"rope_scaling=\[1\] must be a table"),
    "rope text": (config(rope_parameters="linear"), "rope_parameters='linear' must be a table"),
    "bias a number": (config(attention_bias=1), "attention_bias=1 must be True or False"),
    "activation a list": (config(hidden_act=["silu"]), r"hidden_act=\['silu'\] must be text"),
    # tokenizer.json.
    "no tokenizer": ({"tokenizer.json": None}, "tokenizer.json does not exist"),
    "tokenizer empty": ({"tokenizer.json": b""}, "is no tokenizer file"),
    "tokenizer deep": ({"tokenizer.json": DEEP}, "is no tokenizer file"),
    "tokenizer without a model": (tokenizer(model=None), "is no tokenizer file"),
    "vocabulary of texts": (model(vocab={"a": "x"}, merges=[]), "is no tokenizer file"),
    "token number negative": (model(vocab={"a": -1}, merges=[]), "is no tokenizer file"),
    "token number huge": (model(vocab={"H": 2**31}, merges=[]), "has 2147483649 tokens, but the model only 270"),
    "merges that are no pairs": (model(merges=["he"]), "is no tokenizer file"),
    "merges of three": (model(merges=[["h", "e", "l"]]), "is no tokenizer file"),
    "merges of numbers": (model(merges=[[1, 2]]), "is no tokenizer file"),
    "merges of strangers": (model(merges=[["q1", "q2"]]), "is no tokenizer file"),
    "a prefix longer than its tokens": (model(continuing_subword_prefix="####"), "is no tokenizer file"),
    "split no regex": (tokenizer(pre_tokenizer=split("((")), "is no tokenizer file"),
    "split without end": (tokenizer(pre_tokenizer=split("(a+)+$")), "cannot encode this text: .*retry-limit"),
    "split by nothing": (tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}), "cannot encode this text"),
    "template of strangers": (tokenizer(post_processor=TEMPLATE | {"special_tokens": {}}), "cannot encode this text"),
    "texts that double": (tokenizer(normalizer=replacing(60)), "more than 1024 times as long"),
    # tokenizer_config.json.
    "names no JSON": ({"tokenizer_config.json": b"{"}, "tokenizer_config.json is not JSON"),
    "names a list": ({"tokenizer_config.json": []}, "must hold a JSON object"),
    "names deep": ({"tokenizer_config.json": DEEP}, "nested too deeply"),
    "end a number": (named(eos_token=5), "eos_token=5 must be text"),
    "end an empty table": (named(eos_token={}), "eos_token={} must be text"),
    "end a table of numbers": (named(eos_token={"content": 5}), "eos_token=5 must be text"),
    "beginning a list": (named(bos_token=["a"]), r"bos_token=\['a'\] must be text"),
    "template a number": (named(chat_template=5), "chat_template=5 must be text"),
    "templates without a default": (named(chat_template=[{"name": "x", "template": "y"}]), "must be text"),
    "template a table": (named(chat_template={"default": "x"}), "chat_template={'default': 'x'} must be text"),
}
for _name, _value in CONFIG.items():
    CASES[f"{_name} a table"] = config(**{_name: {}}), f"{_name}={{}} must be"
    if type(_value) is int:
        CASES[f"{_name} negative"] = config(**{_name: -_value}), f"{_name}=-{_value} must be an int of at least 1"
        CASES[f"{_name} 0"] = config(**{_name: 0}), f"{_name}=0 must be an int of at least 1"


def test_the_folder_that_is_changed_is_a_good_one(tmp_path):
    templates = [{"name": "tools", "template": "{{"}, {"name": "default", "template": "{{ messages[0]['content'] }}"}]
    fixed = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding = fixed | {"pad_type_id": 0, "pad_token": "x"}
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
    use(write(tmp_path, named(chat_template=templates) | tokenizer(padding=padding, truncation=cut)))


@pytest.mark.parametrize("name", CASES)
def test_hostile_folders_are_refused_in_one_line(tmp_path, name):
    changes, message = CASES[name]
    assert_refused(write(tmp_path, copy.deepcopy(changes)), message)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_what_is_no_file_is_refused(tmp_path, name):
    """A pipe would wait for its writer for ever."""
    os.mkfifo(write(tmp_path, {name: None}) / name)
    assert_refused(tmp_path, "safetensors is no file|must be beside|does not exist")
