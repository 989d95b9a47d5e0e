"""`xsake model` and `xsake generate`, as a person sees them."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys

import hads_case
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tiny_model import TINY, build
from typer.testing import CliRunner

from xsake._cli import app
from xsake._cli.generate import _Clock
from xsake._ground.cache import keep_compiled
from xsake.hads import HadsProfile
from xsake.model import HadsBudget, Sampler, generate, load_tokenizer, save_pretrained
from xsake.model.data.tokenizer import train_tokenizer


def xsake(*words: object, code: int = 0, **options):
    result = CliRunner().invoke(app, [str(word) for word in words], **options)
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


@pytest.mark.parametrize("named", [None, "mine"])
def test_compiled_programs_are_kept_where_the_user_says(named, tmp_path):
    jax.config.update("jax_compilation_cache_dir", named)
    keep_compiled()
    assert jax.config.jax_compilation_cache_dir == (named or str(tmp_path / "compiled"))


def test_info_of_a_preset():
    output = xsake("model", "info", "gpt2-124m").stdout
    assert "123,587,328" in output and re.search(r"q_heads +12\n", output)


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


@pytest.fixture(scope="module")
def profile(folder):
    """A profile of the model in the folder, random as the model is."""
    shape = dict(layers=1, q_heads=TINY.q_heads, kv_heads=TINY.kv_heads, head_dim=TINY.head_dim)
    path = folder / "profile.json"
    dataclasses.replace(hads_case.random_profile(**shape), model=folder.stem).save(path)
    return path


LONG = "hello world " * 25


def test_generate_reads_a_long_prompt_with_hads(model, folder, profile):
    tokenizer = load_tokenizer(folder)
    budget = HadsBudget(HadsProfile.load(profile), 0.6, policy="always")
    new = generate(model, [tokenizer.encode(LONG)], max_new_tokens=4, hads=budget, chunk=128)[0]
    options = ["--hads", 0.6, "--chunk", 128, "--profile", profile, "--max-new-tokens", 4]
    result = xsake("generate", LONG, "--model", folder, *options, "--hads-policy", "always")
    assert result.stdout == "".join(tokenizer.decode_stream(new)) + "\n"
    assert re.search(r"time to first token \d+\.\d\d s \(\d+ tokens read\), then \d+\.\d tokens/s", result.stderr)


def test_a_prompt_comes_from_a_file_or_the_standard_input(folder, tmp_path):
    """As long as it may be: a command line ends at 128 KiB."""
    (tmp_path / "prompt.txt").write_text("hello hello\n")
    options = ["--model", folder, "--max-new-tokens", 2]
    expected = xsake("generate", "hello hello", *options).stdout
    assert xsake("generate", "--file", tmp_path / "prompt.txt", *options).stdout == expected
    assert xsake("generate", "-", *options, input="hello hello\n").stdout == expected
    long = xsake("generate", "-", *options, input="hello " * 100_000, code=1)
    assert "exceed the model's context of 512" in long.stderr
    latin = xsake("generate", "-", *options, input=b"caf\xe9", code=1)
    assert latin.stderr == "the standard input is not UTF-8 text: see its byte 3\n"


def test_the_speed_of_writing_leaves_compiling_out(monkeypatch):
    at = iter([0.0, 50.0, 90.0, 91.0, 92.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(at))
    clock = _Clock(100)
    assert list(clock.watch([[7]] * 4)) == [7] * 4
    assert str(clock) == "time to first token 50.00 s (100 tokens read), then 1.0 tokens/s"


def test_a_model_of_nan_writes_nothing(model, folder, tmp_path):
    broken = nnx.clone(model)
    broken.norm.scale[...] = jnp.full_like(broken.norm.scale[...], jnp.nan)
    save_pretrained(broken, tmp_path / "nan")
    shutil.copy(folder / "tokenizer.json", tmp_path / "nan")
    result = xsake("generate", "hello", "--model", tmp_path / "nan", code=1)
    assert result.stderr.startswith("the model's logits are not finite at new token 1:")
    logits = jnp.array([[1, 2, jnp.nan], [1, jnp.inf, 2], [1, -jnp.inf, 2]])
    for sampler in (Sampler(), Sampler(temperature=1.0, top_k=1), Sampler(temperature=1.0, top_p=0.1)):
        assert sampler(logits, jax.random.key(0)).tolist() == [-1, -1, 2]


def test_a_model_without_a_profile_is_calibrated_once(folder, monkeypatch, tmp_path):
    asked = []

    def calibrate(model, tokens, *, name, block, **options):
        asked.append((tokens.shape, name, block))
        return dataclasses.replace(hads_case.ONE_LAYER, block=block, block_q=block, digests=("0" * 16,) * len(tokens))

    monkeypatch.setattr("xsake.hads.calibration.own_profile.calibrate", calibrate)
    words = ["generate", "-", "--model", folder, "--max-new-tokens", 2, "--hads", 0.9]
    first = xsake(*words, input="hello " * 150)
    assert "has no HADS profile yet: calibrating on 4 texts of 512 tokens, once" in first.stderr
    (kept,) = (tmp_path / "profiles").glob("*-32x32-256.json")
    assert f"s; kept in {kept}" in first.stderr
    again = xsake(*words, input="hello " * 150)
    assert again.stdout == first.stdout and "calibrat" not in again.stderr and len(asked) == 1
    assert "HADS chooses blocks of 32 by a profile from 4 texts of 256 tokens; what is farther" in again.stderr
    assert "in the prompt's 450 tokens" in again.stderr
    kept.write_text("{")
    with pytest.warns(RuntimeWarning, match="is not a HADS profile, or is damaged.*left out"):
        xsake(*words, input="hello " * 150)
    assert len(asked) == 2
    shutil.rmtree(tmp_path / "profiles")
    short = xsake("generate", "hello", "--model", folder, "--hads", 0.6, code=1)
    assert "budget=0.6 is below 1.0000, the share of the blocks that are always on at 2 tokens" in short.stderr
    assert len(asked) == 2


AT_LONG = ["generate", LONG, "--model", "FOLDER", "--max-new-tokens", 4]
HELLO = ["generate", "hello", "--model", "FOLDER"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model", "info", "nowhere"],
            "nowhere is no file, and no published model (smollm2, qwen2.5-coder-1.5b, gemma3-270m)",
        ),
        (["model", "fetch", "gpt-9"], "no published model is called 'gpt-9'"),
        (["generate", "hello"], "run `xsake model fetch smollm2`"),
        (
            [*HELLO, "--seed", 10**23],
            "seed=100000000000000000000000 must be an int of at least 0 and at most 4294967295",
        ),
        ([*HELLO, "--seed", -1], "seed=-1 must be an int of at least 0"),
        ([*HELLO, "--top-p", "2"], "top_p=2.0 must be None, or a finite number, above 0"),
        ([*HELLO, "--temperature", "inf"], "temperature=inf must be a finite number, at least 0"),
        ([*HELLO, "--max-new-tokens", 10**20], "exceed the model's context of 512"),
        ([*HELLO, "--window", 8, "--block", 10**20], "Invalid value for '--block'"),
        ([*HELLO, "--system", "Be kind."], "--system needs a model with a chat template"),
        ([*AT_LONG, "--profile", "PROFILE"], "--profile and --decode-budget are for --hads: give a budget"),
        (
            [*AT_LONG, "--hads", 0.6, "--profile", "OTHER"],
            "is the profile of 'random', not of 'model0': calibrate this model",
        ),
        ([*AT_LONG, "--hads", 0.01, "--hads-policy", "always", "--profile", "PROFILE"], "budget=0.01 is below"),
        ([*AT_LONG, "--hads", 0.6, "--hads-policy", "no", "--profile", "PROFILE"], "policy='no' must be"),
        ([*AT_LONG, "--hads", 2, "--profile", "PROFILE"], "Invalid value for '--hads'"),
        ([*AT_LONG, "--hads", 0, "--profile", "PROFILE"], "prompt=0.0 must be a finite number, above 0 and at most 1"),
        (
            [*AT_LONG, "--hads", 0.6, "--chunk", 40, "--profile", "PROFILE"],
            "chunk=40 must be a multiple of the profile's rows of 16 tokens",
        ),
        (
            [*AT_LONG, "--hads", 0.6, "--hads-policy", "always", "--decode-budget", 0.1, "--profile", "PROFILE"],
            "a budget of 0.1 for new tokens is below 0.",
        ),
        (
            [*AT_LONG, "--hads", 0.6, "--window", 64, "--profile", "PROFILE"],
            "--window reads the prompt by a fixed pattern",
        ),
        (["generate", "--model", "FOLDER"], "give one prompt: as an argument, in a file (--file PATH)"),
        ([*HELLO, "--file", "PROFILE"], "give one prompt: as an argument, in a file (--file PATH)"),
        (["generate", "--model", "FOLDER", "--file", "nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["generate", "--model", "FOLDER", "--file", "LATIN"], "latin.txt is not UTF-8 text: see its byte 3"),
    ],
)
def test_mistakes_are_told_in_a_sentence(folder, profile, tmp_path, monkeypatch, words, message):
    """All of them before the model's weights are read."""
    monkeypatch.setattr("xsake.model.load_pretrained", None)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    hads_case.random_profile(layers=1, q_heads=4, kv_heads=2, head_dim=16).save(tmp_path / "other.json")
    paths = {"LATIN": tmp_path / "latin.txt", "PROFILE": profile, "OTHER": tmp_path / "other.json", "FOLDER": folder}
    result = xsake(*(paths.get(word, word) for word in words), code=2 if message.startswith("Invalid value") else 1)
    assert message.replace("model0", folder.stem) in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_info_of_a_file_with_a_presets_name(folder, tmp_path, monkeypatch):
    """`generate --model small` opens ./small, and so does `info`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "small")
    assert "82,112" in xsake("model", "info", "small").stdout


def test_a_missing_extra_is_named(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, "xsake.model.weights.pretrained")
    said = "flax is not installed; models need it: pip install 'xsake[model]' (in a checkout: pip install '.[model]')\n"
    assert xsake("model", "info", folder, code=1).stderr == said
