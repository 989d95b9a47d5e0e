"""Families of models: the same configuration and weights come out of files, whole and in parts."""

from __future__ import annotations

import dataclasses
import json
import time

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file
from tiny_model import LENGTH, TINY, TOKENS, assert_same_weights, build, run

from tests.test_model_gguf import FIELDS, write
from xsake.model import KVCache, load_pretrained, load_tokenizer, open_model, save_pretrained
from xsake.model.network import families
from xsake.model.network.rope import divisors, frequencies
from xsake.model.weights.gguf_header import GGUFTensor

CONFIGS = {
    "llama": dict(rope_factor=8.0, rope_low=1.0, rope_high=4.0, rope_context=32),
    "mistral": dict(window=9),
    "qwen2": dict(qkv_bias=True, tied=False),
    "qwen3": dict(qk_norm=True, head_dim=24, window=9, window_from=1),
    "smollm3": dict(unturned_every=2),
    "gemma3_text": dict(
        families.FAMILIES["gemma3_text"].fixed,
        window=9,
        full_every=2,
        window_rope_base=1e4,
        rope_base=1e6,
        rope_scaling="linear",
        rope_factor=8.0,
        scale_dim=24,
    ),
}


def config_of(family):
    return dataclasses.replace(TINY, **CONFIGS[family])


@pytest.mark.parametrize("family", CONFIGS)
def test_hugging_face_round_trip(tmp_path, family):
    model = build(config=config_of(family))
    save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family
    assert_same_weights(load_pretrained(tmp_path), model)


def test_names_of_biases_and_norms(tmp_path):
    save_pretrained(build(config=config_of("qwen2")), tmp_path / "2")
    save_pretrained(build(config=config_of("qwen3")), tmp_path / "3")
    assert load_file(tmp_path / "2" / "model.safetensors")["model.layers.0.self_attn.k_proj.bias"].shape == (32,)
    assert load_file(tmp_path / "3" / "model.safetensors")["model.layers.1.self_attn.q_norm.weight"].shape == (24,)


def test_a_model_of_no_family_is_not_saved(tmp_path):
    model = build(config=dataclasses.replace(TINY, qkv_bias=True, qk_norm=True))
    with pytest.raises(
        NotImplementedError, match="no family has qkv_bias=True, qk_norm=True; there are llama, mistral"
    ):
        save_pretrained(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def of_architecture(name, **more):
    return {key.replace("llama.", f"{name}."): value for key, value in (FIELDS | more).items()}


IN_GGUF = {
    "qwen2": CONFIGS["qwen2"],
    "qwen3": dict(qk_norm=True, head_dim=24),
    "smollm3": dict(unturned_every=4),
    "phi3": dict(window=9, tied=False),
    "gemma3": CONFIGS["gemma3_text"] | dict(full_every=6, scale_dim=None),
}


@pytest.mark.parametrize("family", IN_GGUF)
def test_gguf(tmp_path, family):
    """Features are not stored in rotary pairs, unlike Llama's and SmolLM3's, and Phi-3 joins tensors."""
    config = dataclasses.replace(TINY, **IN_GGUF[family])
    model = build(config=config)
    fields = of_architecture(family) | {
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.rope.dimension_count": config.head_dim,
    }
    if config.window is not None:
        fields[f"{family}.attention.sliding_window"] = config.window
    if config.rope_factor != 1:
        fields |= {f"{family}.rope.scaling.type": config.rope_scaling, f"{family}.rope.scaling.factor": 8}
    path = write(tmp_path / "m.gguf", model, architecture=family, fields=fields)
    assert_same_weights(load_pretrained(path), model)


def test_gguf_says_yarn(tmp_path):
    """A file may keep the length that the model had before YaRN; what changes YaRN otherwise is refused by name."""
    scaling = {"type": "yarn", "factor": 4, "original_context_length": 256}
    fields = of_architecture("qwen2", **{f"qwen2.rope.scaling.{name}": value for name, value in scaling.items()})
    config = dataclasses.replace(TINY, **CONFIGS["qwen2"])
    path = write(tmp_path / "m.gguf", build(config=config), architecture="qwen2", fields=fields)
    expected = dict(rope_scaling="yarn", rope_factor=4, rope_context=256, rope_high=32, context=1024)
    found = open_model(path).config
    assert {name: getattr(found, name) for name in expected} == expected
    np.testing.assert_allclose(found.rope_gain, 1 + 0.1 * np.log(4))
    fields["qwen2.rope.scaling.yarn_log_multiplier"] = 1
    path = write(tmp_path / "n.gguf", build(config=config), architecture="qwen2", fields=fields)
    with pytest.raises(NotImplementedError, match=r"scales its rotary positions \('yarn', yarn_log_multiplier\)"):
        open_model(path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("attention.sliding_window_pattern", 3, "not supported: attention.sliding_window_pattern other than 6"),
        ("final_logit_softcapping", 30, "not supported: final_logit_softcapping"),
    ],
)
def test_another_gemma_is_refused(tmp_path, name, value, message):
    fields = of_architecture("gemma3", **{f"gemma3.{name}": value, "gemma3.attention.sliding_window": 9})
    model = build(config=dataclasses.replace(TINY, **IN_GGUF["gemma3"]))
    with pytest.raises(NotImplementedError, match=message):
        open_model(write(tmp_path / "m.gguf", model, architecture="gemma3", fields=fields))


def llama3_tensor(config, change=1.0):
    plain = frequencies(dataclasses.replace(config, rope_factor=1.0))
    return {"rope_freqs.weight": np.asarray(divisors(config, plain), np.float32) * np.float32(change)}


def test_gguf_scaled_positions(tmp_path):
    """llama.cpp stores what Llama 3's frequencies are divided by; the numbers behind it are found again."""
    config = dataclasses.replace(TINY, rope_base=5e5, rope_factor=8.0)
    model = build(config=config)
    path = write(tmp_path / "m.gguf", model, edit=lambda tensors: tensors | llama3_tensor(config))
    assert_same_weights(load_pretrained(path), model)
    path = write(tmp_path / "n.gguf", model, edit=lambda tensors: tensors | llama3_tensor(config, 1.5))
    with pytest.raises(NotImplementedError, match=r"rope_freqs\.weight\) by another rule than Llama 3's"):
        load_pretrained(path)


def test_a_split_gguf(tmp_path):
    """Written as llama.cpp's gguf-split does: the first file has the fields, each has some tensors."""
    model, halves = build(), []

    def half(number):
        def edit(tensors):
            halves.append(list(tensors)[number::2])
            return {name: tensors[name] for name in halves[-1]}

        return edit

    fields = FIELDS | {"split.count": 2}
    for number in (0, 1):
        write(tmp_path / f"m-0000{number + 1}-of-00002.gguf", model, fields=fields, edit=half(number))
    assert_same_weights(load_pretrained(tmp_path / "m-00001-of-00002.gguf"), model)
    (tmp_path / "m-00002-of-00002.gguf").rename(tmp_path / "other.gguf")
    with pytest.raises(FileNotFoundError, match=r"is one of 00002 files, and m-00002-of-00002\.gguf is not beside it"):
        open_model(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(ValueError, match="is one of 2 files that make one model, and 1 was found"):
        open_model(tmp_path / "other.gguf")


def test_every_quantisation_that_the_package_reads(tmp_path):
    """One tensor of each kind: what is read is what the package dequantises."""
    from gguf.quants import _type_traits

    kinds = [kind for kind in _type_traits if kind not in (Q.F32, Q.F16)]
    assert {Q.Q4_K, Q.Q6_K, Q.Q8_0, Q.IQ4_XS, Q.BF16} <= set(kinds)
    rng, file = np.random.default_rng(0), open_model(write(tmp_path / "m.gguf"))
    for kind in kinds:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = rng.integers(0, 60, (2, 256 // block * size), np.uint8)
        tensor = GGUFTensor(shape=(2, 256), kind=kind, start=0, size=stored.size)
        file._tensors["x"] = (stored.reshape(-1), tensor)
        np.testing.assert_array_equal(file.read("x"), gguf.dequantize(stored, kind))


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        ("gguf", "llama, qwen2, qwen3, smollm3, phi3, gemma3"),
        ("safetensors", "llama, mistral, qwen2, qwen3, smollm3, phi3, gemma3_text"),
    ],
)
def test_an_unknown_architecture_is_refused_by_name_at_once(tmp_path, kind, known):
    """Of safetensors, before the weights are looked at."""
    if kind == "gguf":
        path = write(tmp_path / "m.gguf", architecture="mamba", fields=of_architecture("mamba"))
    else:
        path = tmp_path
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
        (tmp_path / "model.safetensors").write_bytes(b"no weights")
    start = time.process_time()
    with pytest.raises(ValueError, match=f"'mamba', which is not known; these can be loaded: {known}$"):
        open_model(path)
    assert time.process_time() - start < 1


@pytest.mark.slow  # the transformer's own tests have windows too
def test_a_window_holds_with_a_cache():
    """A prompt in one piece, and its last tokens one at a time."""
    model = build(config=config_of("qwen3"))
    expected = run(model, TOKENS)
    cache = KVCache.empty(model.config, batch=2, capacity=LENGTH, dtype=np.float32)
    start, cache = run(model, TOKENS[:, :-1], cache=cache)
    last, _ = run(model, TOKENS[:, -1:], cache=cache)
    np.testing.assert_allclose(np.concatenate([start, last], 1), expected, rtol=1e-4, atol=1e-4)


def test_scores_make_a_tokenizer(tmp_path):
    """SentencePiece's: the pair whose joint token scores highest is merged first; what has no token becomes bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = {
        "▁": -9.0,
        "h": -9.1,
        "e": -9.2,
        "l": -9.3,
        "o": -9.4,
        "he": -2.0,
        "ll": -1.0,
        "hell": -3.0,
        "▁hell": -4.0,
        "\n\n": 0.0,
    }
    scores = {token: 0.0 for token in tokens} | pieces

    def fields(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(list(scores))
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 1), 4])
        writer.add_token_scores(list(scores.values()))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    model = build(config=dataclasses.replace(TINY, vocab_size=len(scores)))
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", model, tokens=0, more=fields))
    numbers = tokenizer.encode("hello é")
    words = [tokenizer.core.id_to_token(number) for number in numbers]
    assert words == ["<s>", "▁hell", "o", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(numbers) == "hello é"
    # A token of the user-defined kind is taken whole, and is text.
    assert tokenizer.decode(tokenizer.encode("o\n\no")) == "o\n\n o"
    assert tokenizer.core.token_to_id("\n\n") in tokenizer.encode("o\n\no")
    assert tokenizer.stop == {2}


@pytest.mark.parametrize("family", CONFIGS)
def test_families_are_known_by_both_names(family):
    assert families.of_config(config_of(family)) == family
