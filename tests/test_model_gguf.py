"""GGUF files: what is written as llama.cpp writes it is loaded as the same model, and anything else is refused."""

from __future__ import annotations

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Q
from tiny_model import TINY, assert_same_weights, build

from xsake.model import load_pretrained, load_tokenizer, open_model
from xsake.model.network import families

FIELDS = {
    "llama.block_count": TINY.layers,
    "llama.context_length": TINY.context,
    "llama.embedding_length": TINY.width,
    "llama.feed_forward_length": TINY.mlp_width,
    "llama.attention.head_count": TINY.q_heads,
    "llama.attention.head_count_kv": TINY.kv_heads,
    "llama.attention.key_length": TINY.head_dim,
    "llama.rope.dimension_count": TINY.head_dim,
}
VOCABULARY = [*map(chr, range(33, 127)), "he", "ll", "hell", "hello", "<s>", "</s>"]


def write(path, model=None, *, architecture="llama", fields=FIELDS, kind=Q.F32, edit=dict, tokens=512, more=None):
    """As llama.cpp's converter does: matrices [out, in], and the features of queries and keys in rotary pairs."""
    model = build() if model is None else model
    weights = {path: np.asarray(x[...]) for path, x in nnx.to_flat_state(nnx.state(model))}
    tensors = {}
    family = families.find(path, "architecture", architecture) if architecture != "mamba" else None
    for at, name in families.gguf_names(model.config, family).items():
        weight = weights[at].T if at[-1] == "kernel" else weights[at]
        if at[-2] in ("query", "key") and architecture in ("llama", "smollm3"):
            rows, columns = weight.shape
            halves = weight.reshape(-1, 2, TINY.head_dim // 2, columns)
            weight = halves.swapaxes(1, 2).reshape(rows, columns)
        tensors[name] = np.ascontiguousarray(np.concatenate([tensors[name], weight]) if name in tensors else weight)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    writer.add_float32(f"{architecture}.rope.freq_base", model.config.rope_base)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", model.config.norm_eps)
    if tokens:
        vocabulary = VOCABULARY + [f"unused{i}" for i in range(tokens - len(VOCABULARY))]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(vocabulary)
        writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in vocabulary])
        writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
        writer.add_bos_token_id(VOCABULARY.index("<s>"))
        writer.add_eos_token_id(VOCABULARY.index("</s>"))
        writer.add_add_bos_token(True)
    if more is not None:
        more(writer)
    for name, weight in edit(tensors).items():
        if kind == Q.F32 or weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_model_comes_out(tmp_path, tied):
    model = build(config=dataclasses.replace(TINY, tied=tied))
    assert_same_weights(load_pretrained(write(tmp_path / "m.gguf", model)), model)


def test_quantised_weights_are_within_their_step(tmp_path):
    path = write(tmp_path / "m.gguf", kind=Q.Q8_0)
    assert open_model(path).formats == {"F32": 5, "Q8_0": 15}
    for found, exact in zip(*(jax.tree.leaves(nnx.state(m)) for m in (load_pretrained(path), build())), strict=True):
        step = jnp.abs(exact).max() / 127
        error = jnp.abs(found - exact).max()
        assert (error == 0) if exact.ndim == 1 else (0 < error < 0.6 * step)  # half a step, and that of its float16


def test_weights_take_the_dtype_that_is_asked_for(tmp_path):
    model = load_pretrained(write(tmp_path / "m.gguf"), dtype=jnp.float16, param_dtype=jnp.bfloat16)
    assert model.blocks[0].mlp.up.kernel.dtype == jnp.bfloat16
    assert model.blocks[0].mlp.up.dtype == jnp.float16


def test_the_tokenizer_inside(tmp_path):
    tokenizer = load_tokenizer(open_model(write(tmp_path / "m.gguf")))
    numbers = tokenizer.encode("hello12</s>")
    assert [tokenizer.core.id_to_token(n) for n in numbers] == ["<s>", "hello", "1", "2", "</s>"]
    assert tokenizer.decode(numbers) == "hello12"
    assert tokenizer.stop == {VOCABULARY.index("</s>")}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("llama.rope.scaling.type", "longrope", "scales its rotary positions"),
        ("llama.rope.dimension_count", 8, "turns 8 of 16 features"),
    ],
)
def test_other_rotary_positions_are_refused(tmp_path, field, value, message):
    """More refusals are in test_hostile_gguf.py."""
    path = write(tmp_path / "m.gguf", fields=FIELDS | {field: value})
    with pytest.raises(NotImplementedError, match=message):
        load_pretrained(path)
