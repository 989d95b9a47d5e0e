"""Safetensors in Hugging Face's layout: what is saved is loaded, and anything else is refused."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_model import TINY, assert_same_weights, build

from xsake.model import load_pretrained, load_tokenizer, open_model, save_pretrained
from xsake.model.data.tokenizer import END_OF_TEXT, train_tokenizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save_pretrained(build(), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def configure(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path, tied):
    model = build(config=dataclasses.replace(TINY, tied=tied, rope_base=3e4))
    save_pretrained(model, tmp_path / "new")
    assert_same_weights(load_pretrained(tmp_path / "new"), model)


def test_names_and_shapes_are_hugging_faces(saved):
    tensors = load_file(saved / "model.safetensors")
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (TINY.kv_heads * TINY.head_dim, TINY.width)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (TINY.width, TINY.mlp_width)
    assert tensors["model.embed_tokens.weight"].shape == (TINY.vocab_size, TINY.width)
    assert "lm_head.weight" not in tensors


def test_several_files_make_one_model(folder):
    tensors = load_file(folder / "model.safetensors")
    half = len(tensors) // 2
    for number, part in enumerate((list(tensors)[:half], list(tensors)[half:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    (folder / "model.safetensors").unlink()
    np.testing.assert_array_equal(load_pretrained(folder).norm.scale[...], build().norm.scale[...])


def test_bfloat16_and_what_follows_from_the_rest(folder):
    """A copy of the tied embedding, and the rotary frequencies that old files hold, are no weights of their own."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: x.astype(jnp.bfloat16) for name, x in tensors.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert open_model(folder).formats == {"BF16": 21, "F32": 1}
    up = load_pretrained(folder).blocks[0].mlp.up.kernel
    assert up.dtype == jnp.float32
    original = build().blocks[0].mlp.up.kernel[...]
    np.testing.assert_array_equal(up[...], original.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}, "rope_theta": ...},
        {"rope_scaling": None, "rope_theta": 3e4},
    ],
)
def test_rotary_bases_old_and_new(folder, change):
    configure(folder, **change)
    assert open_model(folder).config.rope_base == 3e4


def test_defaults_of_old_configurations(folder):
    """No head_dim: width over heads. No KV heads: as many as query heads. No tie_word_embeddings: not tied."""
    configure(folder, head_dim=..., num_key_value_heads=..., tie_word_embeddings=...)
    config = open_model(folder).config
    assert (config.head_dim, config.kv_heads, config.tied) == (16, 4, False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(rope_scaling={"type": "dynamic", "factor": 2}),
            NotImplementedError,
            "not supported: rope scaling 'dynamic'",
        ),
        (
            dict(rope_scaling={"type": "yarn", "factor": 2, "truncate": False}),
            NotImplementedError,
            "not supported: truncate=False of rope scaling 'yarn'",
        ),
        (
            dict(rope_scaling={"type": "yarn", "factor": 2, "mscale": 1}),
            NotImplementedError,
            "not supported: mscale of rope scaling 'yarn'",
        ),
        (dict(rope_scaling={"type": "linear"}), ValueError, "rope scaling 'linear' lacks factor"),
        (dict(model_type="phi3", rope_scaling={"type": "yarn"}), NotImplementedError, "rope scaling 'yarn'"),
        (dict(partial_rotary_factor=0.5), NotImplementedError, "not supported: partial_rotary_factor"),
        (
            dict(model_type="smollm3", no_rope_layers=[0, 1]),
            NotImplementedError,
            "not supported: no_rope_layers other than every n-th layer",
        ),
        (dict(model_type="smollm3", no_rope_layers=[1]), ValueError, "no_rope_layers has 1 numbers, fewer than layers"),
        (
            dict(model_type="smollm3", use_sliding_window=True),
            NotImplementedError,
            "not supported: use_sliding_window",
        ),
        (
            dict(model_type="gemma3_text", hidden_activation="relu", final_logit_softcapping=30.0),
            NotImplementedError,
            "not supported: final_logit_softcapping, hidden_activation",
        ),
        (
            dict(rope_parameters={"rope_type": "llama3"}),
            ValueError,
            "rope scaling 'llama3' lacks factor, low_freq_factor",
        ),
        (
            dict(attention_bias=True, mlp_bias=True),
            NotImplementedError,
            "not supported: attention_bias, mlp_bias",
        ),
        (dict(num_hidden_layers=3), ValueError, r"lacks 9 tensors: model.layers.2.input_layernorm.weight, .*, \.\.\."),
        (dict(num_hidden_layers=1), ValueError, "no use for 9 of its tensors: model.layers.1"),
    ],
)
def test_other_models_are_refused(folder, change, error, message):
    """More refusals are in test_hostile_safetensors.py."""
    configure(folder, **change)
    with pytest.raises(error, match=message):
        load_pretrained(folder)


def test_paths_that_hold_no_model_or_already_one(folder):
    known = r"smollm2, qwen2.5-coder-1.5b, gemma3-270m"
    with pytest.raises(FileNotFoundError, match=rf"nowhere is no file, and no published model \({known}\)"):
        load_pretrained(folder / "nowhere")
    with pytest.raises(FileExistsError, match="already holds a model"):
        save_pretrained(build(), folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config.json must be beside the .safetensors file"):
        load_pretrained(folder / "model.safetensors")


def test_the_tokenizer_beside(folder):
    core = train_tokenizer(["hello hello world"], 280)
    core.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"
    assert tokenizer.stop == set()
    named = {"eos_token": {"content": END_OF_TEXT}, "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.stop == {core.token_to_id(END_OF_TEXT)}
    assert tokenizer.chat([{"role": "user", "content": "hello"}]) == core.encode("hello").ids
