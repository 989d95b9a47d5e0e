"""Hostile and damaged GGUF files. They are packed here byte by byte, since no library writes such files."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import assert_refused, use

from xsake.model import load_tokenizer, open_model

U32, I32, F32, BOOL, TEXT, LIST, U64, F64 = 4, 5, 6, 7, 8, 9, 10, 12
WIDTH, HEADS, HEAD_DIM, MLP, VOCAB, LAYERS = 8, 2, 4, 16, 16, 1
TOKENS = ["<s>", "</s>", "h", "e", "l", "o", "he", "H", "i", *"abcdfgj"]

LAYER = {
    "attn_norm": (WIDTH,),
    "attn_q": (WIDTH, HEADS * HEAD_DIM),
    "attn_k": (WIDTH, HEAD_DIM),
    "attn_v": (WIDTH, HEAD_DIM),
    "attn_output": (HEADS * HEAD_DIM, WIDTH),
    "ffn_norm": (WIDTH,),
    "ffn_gate": (WIDTH, MLP),
    "ffn_up": (WIDTH, MLP),
    "ffn_down": (MLP, WIDTH),
}
FIELDS: dict[str, tuple[int, Any]] = {
    "general.architecture": (TEXT, "llama"),
    "llama.block_count": (U32, LAYERS),
    "llama.context_length": (U32, 64),
    "llama.embedding_length": (U32, WIDTH),
    "llama.feed_forward_length": (U32, MLP),
    "llama.attention.head_count": (U32, HEADS),
    "llama.attention.head_count_kv": (U32, 1),
    "llama.attention.key_length": (U32, HEAD_DIM),
    "llama.rope.dimension_count": (U32, HEAD_DIM),
    "llama.rope.freq_base": (F32, 1e4),
    "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
    "tokenizer.ggml.model": (TEXT, "gpt2"),
    "tokenizer.ggml.pre": (TEXT, "gpt-2"),
    "tokenizer.ggml.tokens": (LIST, (TEXT, TOKENS)),
    "tokenizer.ggml.token_type": (LIST, (I32, [3, 3, *[1] * 14])),
    "tokenizer.ggml.merges": (LIST, (TEXT, ["h e"])),
    "tokenizer.ggml.bos_token_id": (U32, 0),
    "tokenizer.ggml.eos_token_id": (U32, 1),
    "tokenizer.ggml.add_bos_token": (BOOL, True),
    "tokenizer.chat_template": (TEXT, "{{ messages[0]['content'] }}"),
}
TENSORS: dict[str, tuple[int, ...]] = {"token_embd": (WIDTH, VOCAB), "output_norm": (WIDTH,)} | {
    f"blk.{n}.{name}": shape for n in range(LAYERS) for name, shape in LAYER.items()
}
SCALARS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q", F64: "<d"}


def text(value: str | bytes) -> bytes:
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def packed(kind: int, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value  # as it is, whatever it says
    if kind == TEXT:
        return text(value)
    if kind == LIST:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(packed(item, v) for v in values)
    return struct.pack(SCALARS[kind], value)


def write(
    path: Path,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    field_count: int | None = None,
    tensor_count: int | None = None,
    fields: dict[str, tuple[int, Any] | None] | None = None,
    twice: str = "",
    tensors: dict[str, dict[str, Any] | None] | None = None,
    keep: float = 1.0,
) -> Path:
    """The valid model with these changes: a field's (type, value), parts of a tensor's entry, or None to omit it."""
    given = {name: entry for name, entry in (FIELDS | (fields or {})).items() if entry is not None}
    body = [text(name) + struct.pack("<I", kind) + packed(kind, value) for name, (kind, value) in given.items()]
    body += [body[list(given).index(twice)]] if twice in given else []
    entries, offset = [], 0
    changes = {name: {} for name in TENSORS} | (tensors or {})
    for name, change in changes.items():
        if change is None:
            continue
        entry = dict(name=f"{name}.weight", shape=TENSORS.get(name, (8,)), kind=0, offset=offset) | change
        shape = entry["shape"]
        entries.append(
            text(entry["name"])
            + struct.pack("<I", entry.get("dimensions", len(shape)))
            + b"".join(struct.pack("<Q", size) for size in shape)
            + struct.pack("<IQ", entry["kind"], entry["offset"])
        )
        offset += 4 * math.prod(TENSORS.get(name, (8,)))
    counts = (
        len(entries) if tensor_count is None else tensor_count,
        len(body) if field_count is None else field_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(body + entries)
    weights = np.random.default_rng(0).standard_normal(offset // 4).astype(np.float32).tobytes()
    content = head.ljust(-(-len(head) // 32) * 32, b"\0") + weights
    path.write_bytes(content[: int(keep * len(content))])
    return path


def field(name: str, kind: int, value: Any) -> dict[str, Any]:
    return dict(fields={name: (kind, value)})


def tensor(which: str = "blk.0.ffn_up", **change: Any) -> dict[str, Any]:
    return dict(tensors={which: change})


HUGE = 2**62
CASES: dict[str, tuple[dict[str, Any], str]] = {
    # The bytes.
    "empty": (dict(keep=0.0), "empty file"),
    "cut in the magic": (dict(keep=0.0005), "does not begin with GGUF|ends within the magic"),
    "cut in the header": (dict(keep=0.1), "cannot be read as a GGUF file; is it cut short"),
    "cut in the data": (dict(keep=0.999), "is it cut short.*bytes past the file"),
    "magic": (dict(magic=b"GGUX"), "does not begin with GGUF"),
    "version 1": (dict(version=1), "its version is 1, and versions 2, 3 are read"),
    "big-endian": (dict(version=3 << 24), "its version is 50331648"),
    "field count": (dict(field_count=HUGE), "promises 4611686018427387904 fields"),
    "one field more": (dict(field_count=len(FIELDS) + 1), "cut short"),
    "tensor count": (dict(tensor_count=HUGE), "promises 4611686018427387904 tensors"),
    "one tensor more": (dict(tensor_count=len(TENSORS) + 1), "cut short"),
    "name that is not UTF-8": (dict(fields={"general.name": (TEXT, text(b"\xff\xfe"))}), "is not UTF-8"),
    "text without an end": (field("general.name", TEXT, struct.pack("<Q", HUGE)), "ends within a text"),
    "unknown type": (field("general.name", 77, b""), "type 77, which is not known"),
    "endless list": (field("x", LIST, struct.pack("<IQ", 0, HUGE)), "ends within x"),
    "endless list of texts": (field("x", LIST, struct.pack("<IQ", TEXT, HUGE)), "promises .* texts in x"),
    "list of lists": (field("x", LIST, struct.pack("<IQ", LIST, 1) * 5000), "type 9, which is not known"),
    "list of unknown things": (field("x", LIST, struct.pack("<IQ", 99, 1)), "type 99, which is not known"),
    "field twice": (dict(twice="llama.block_count"), "has llama.block_count twice"),
    "alignment 0": (field("general.alignment", U32, 0), "alignment=0 must be a power of two"),
    "alignment text": (field("general.alignment", TEXT, "x"), "alignment='x' must be a power of two"),
    "alignment huge": (field("general.alignment", U64, 2**63), "bytes past the file"),
    # The tensors' entries.
    "tensor twice": (tensor(name="blk.0.ffn_gate.weight"), "has blk.0.ffn_gate.weight twice"),
    "no dimensions": (tensor(shape=()), "has 0 dimensions"),
    "dimensions without end": (tensor(dimensions=2**32 - 1), "has 4294967295 dimensions"),
    "a size of 0": (tensor(shape=(8, 0)), r"shape \(0, 8\)"),
    "sizes that overflow": (tensor(shape=(2**33, 2**33)), "bytes past the file"),
    "unknown tensor type": (tensor(kind=999), "type 999, which is not known"),
    "integers": (tensor(kind=26), "stored as I32, which cannot be read"),
    "no whole block": (tensor(kind=2), "Q4_0 cannot hold in blocks of 32"),
    "offset": (tensor(offset=HUGE), "bytes past the file"),
    "overlap": (dict(tensors={n: dict(shape=(8, 20), offset=0) for n in TENSORS}), "they overlap"),
    "a matrix with one dimension": (tensor(shape=(128,)), r"has shape \(128,\), but"),
    "a matrix turned": (tensor(shape=(MLP, WIDTH)), r"has shape \(8, 16\), but .* has \(16, 8\)"),
    "an embedding with one dimension": (tensor("token_embd", shape=(128,)), "lacks the tensor token_embd.weight"),
    "no embedding": (dict(tensors={"token_embd": None}), "lacks the tensor token_embd.weight"),
    "no norm": (dict(tensors={"output_norm": None}), "lacks 1 tensors: output_norm.weight"),
    "a bias": (
        dict(tensors={"extra": dict(name="blk.0.attn_q.bias")}),
        "not a plain LlamaForCausalLM: no use for 1 of its tensors: blk.0.attn_q.bias",
    ),
    # The model's shape.
    "layers a million": (field("llama.block_count", U32, 10**6), "block_count=1000000 must be an int .* at most 1024"),
    "layers a quintillion": (field("llama.block_count", U64, 10**18), "must be an int"),
    "layers a thousand": (field("llama.block_count", U32, 1000), "block_count=1000, but there are only 11 tensors"),
    "layers float": (field("llama.block_count", F32, 2.0), "block_count=2.0 must be an int"),
    "layers True": (field("llama.block_count", BOOL, True), "block_count=True must be an int"),
    "layers list": (field("llama.block_count", LIST, (U32, [2])), r"block_count=\[2\] must be an int"),
    "layers negative": (field("llama.block_count", I32, -1), "block_count=-1 must be an int"),
    "no layers": (dict(fields={"llama.block_count": None}), "lacks the field llama.block_count"),
    "heads list": (field("llama.attention.head_count", LIST, (U32, [2, 2])), "must be an int"),
    "KV heads 3": (field("llama.attention.head_count_kv", U32, 3), "q_heads=2 must be divisible by kv_heads=3"),
    "width huge": (field("llama.embedding_length", U32, 2**31 - 8), r"has shape \(16, 8\), but"),
    "head odd": (field("llama.attention.key_length", U32, 3), "head_dim=3 must be even"),
    "base NaN": (field("llama.rope.freq_base", F32, math.nan), "freq_base=nan must be a finite number"),
    "base beyond float32": (field("llama.rope.freq_base", F64, 1e300), "freq_base=1e[+]300 must be a finite number"),
    "epsilon infinite": (field("llama.attention.layer_norm_rms_epsilon", F32, math.inf), "epsilon=inf must be"),
    "epsilon 0": (field("llama.attention.layer_norm_rms_epsilon", F32, 0.0), "epsilon=0.0 must be .* above 0"),
    "scaling a number": (field("llama.rope.scaling.type", U32, 5), "scaling.type=5 must be text"),
    # The tokenizer.
    "tokens are numbers": (field("tokenizer.ggml.tokens", LIST, (U32, [1] * VOCAB)), "must be a list, and each"),
    "too few tokens": (
        field("tokenizer.ggml.tokens", LIST, (TEXT, ["a"])),
        "1 tokens, but an embedding of 16: vocabulary mis",
    ),
    "no tokenizer": (dict(fields={"tokenizer.ggml.model": None}), "lacks the field tokenizer.ggml.model"),
    "no tokens": (dict(fields={"tokenizer.ggml.tokens": None}), "lacks the field tokenizer.ggml.tokens"),
    "too few types": (field("tokenizer.ggml.token_type", LIST, (I32, [1])), "16 tokens, but 1 types"),
    "types are texts": (field("tokenizer.ggml.token_type", LIST, (TEXT, ["a"] * VOCAB)), "each item an int"),
    "merges are numbers": (field("tokenizer.ggml.merges", LIST, (U32, [1])), "merges=.* each item text"),
    "merge of one": (field("tokenizer.ggml.merges", LIST, (TEXT, ["he"])), "merge 'he' must be two tokens"),
    "merge of three": (field("tokenizer.ggml.merges", LIST, (TEXT, ["h e l"])), "must be two tokens"),
    "merge of nothing": (field("tokenizer.ggml.merges", LIST, (TEXT, [" "])), "must be two tokens"),
    "merge of strangers": (field("tokenizer.ggml.merges", LIST, (TEXT, ["x y"])), "no tokenizer can be made"),
    "merge to a stranger": (field("tokenizer.ggml.merges", LIST, (TEXT, ["h o"])), "no tokenizer can be made"),
    "beginning out of range": (field("tokenizer.ggml.bos_token_id", U32, 99), "bos_token_id=99 must be below"),
    "end out of range": (field("tokenizer.ggml.eos_token_id", U32, VOCAB), "eos_token_id=16 must be below"),
    "end negative": (field("tokenizer.ggml.eos_token_id", I32, -1), "eos_token_id=-1 must be an int"),
    "template endless": (
        field("tokenizer.chat_template", TEXT, "{{ 'x'.center(10**12) }}"),
        "needs more memory than it may have",
    ),
}
for _name, (_kind, _) in FIELDS.items():
    _other = (U32, 5) if _kind == TEXT else (TEXT, "x")
    CASES[f"{_name} of another type"] = field(_name, *_other), f"{_name}=.* must be"
    if _name.startswith("llama.") and _kind == U32:
        CASES[f"{_name} 0"] = field(_name, U32, 0), f"{_name}=0 must be an int of at least 1"


def test_the_file_that_is_changed_is_a_good_one(tmp_path):
    use(write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", CASES)
def test_hostile_files_are_refused_in_one_line(tmp_path, name):
    changes, message = CASES[name]
    assert_refused(write(tmp_path / "m.gguf", **changes), message)


def test_what_is_no_file_is_refused(tmp_path):
    """A pipe would wait for its writer for ever."""
    os.mkfifo(tmp_path / "m.gguf")
    assert_refused(tmp_path / "m.gguf", "is no file")


def test_any_cut_and_any_changed_byte_of_the_header_ends_well(tmp_path):
    """Either the model loads, or it is refused in one line."""
    content = write(tmp_path / "good.gguf").read_bytes()
    rng = np.random.default_rng(0)
    for attempt in range(60):
        changed = bytearray(content)
        changed[int(rng.integers(2200))] = int(rng.integers(256))
        path = tmp_path / "m.gguf"
        path.write_bytes(changed if attempt % 2 else content[: int(rng.integers(len(content)))])
        try:
            load_tokenizer(open_model(path))
        except (ValueError, NotImplementedError) as error:
            assert type(error) in (ValueError, NotImplementedError) and "\n" not in str(error)
