"""`xsake model` and `xsake generate`, as a person sees them."""

from __future__ import annotations

import dataclasses
import sys

import jax
import pytest
from tiny_model import TINY, build
from typer.testing import CliRunner

from xsake._cli import app
from xsake.model import generate, load_tokenizer, save_pretrained
from xsake.model.data_tokenizer import train_tokenizer


def xsake(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def model():
    return build(config=dataclasses.replace(TINY, layers=1))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_pretrained(model, folder)
    train_tokenizer(["hello hello world"], 260).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    """The user's cache is not read; compiled functions are shared with the other tests."""
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_info_of_a_preset():
    output = xsake("model", "info", "gpt2-124m").stdout
    assert "123,587,328" in output and "q_heads      12" in output


def test_info_of_a_file(folder):
    output = xsake("model", "info", folder).stdout
    assert "82,112" in output and "11 F32" in output and "no chat template" in output


def test_generate_writes_what_the_model_says(model, folder):
    """Greedily, and with a prompt that is prefilled sparsely."""
    tokenizer = load_tokenizer(folder)
    new = generate(model, [tokenizer.encode("hello hello")], max_new_tokens=8)[0]
    for options in ([], ["--window", 64, "--block", 16]):
        output = xsake("generate", "hello hello", "--model", folder, "--max-new-tokens", 8, *options).stdout
        assert output == "".join(tokenizer.decode_stream(new)) + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model", "info", "nowhere"], "nowhere is no file, and no published model (smollm2, qwen2.5-coder-1.5b)"),
        (["model", "fetch", "gpt-9"], "no published model is called 'gpt-9'"),
        (["generate", "hello"], "run `xsake model fetch smollm2`"),
    ],
)
def test_mistakes_are_told_in_a_sentence(words, message):
    result = xsake(*words, code=1)
    assert message in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--seed", 10**23], 1, "seed=100000000000000000000000 must be an int of at least 0 and at most 4294967295"),
        (["--seed", -1], 1, "seed=-1 must be an int of at least 0"),
        (["--top-p", "2"], 1, "top_p=2.0 must be above 0"),
        (["--temperature", "inf"], 1, "temperature=inf must be finite"),
        (["--max-new-tokens", 10**20], 1, "exceed the model's context of 512"),
        (["--window", 8, "--block", 10**20], 2, "Invalid value for '--block'"),
    ],
)
def test_numbers_out_of_range_are_told_in_a_sentence(folder, options, code, message):
    result = xsake("generate", "hello", "--model", folder, *options, code=code)
    assert message in " ".join(result.stderr.split()) and "Traceback" not in result.output


def test_a_missing_extra_is_named(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, "xsake.model.pretrained")
    assert "flax is not installed" in xsake("model", "info", folder, code=1).stderr


def test_a_role_needs_a_chat_template(folder):
    result = xsake("generate", "hello", "--model", folder, "--system", "Be kind.", code=1)
    assert "--system needs a model with a chat template" in result.stderr
