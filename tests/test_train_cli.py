"""`xsake data build`, then `xsake train --preset tiny`: a small text is learnt by heart, and failures are reported."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training import MODEL, events, losses, make_config
from typer.testing import CliRunner

from xsake._cli import app
from xsake.model import load_pretrained, load_tokenizer, load_trained, open_model
from xsake.model.data.shards import open_shards
from xsake.model.data.tokenizer import train_tokenizer
from xsake.model.training.checkpoints import Checkpoints
from xsake.model.training.trainer import Trainer

CONFIG = make_config(steps=1, warmup=0, attention="dense", density=1.0, batch=2)
TEXT = """One contract says which blocks attend to which. Kernels execute it, a tuner finds their best configuration on
the hardware at hand, and a model uses all of it as any user would. Lists are flat per head, because padded rows do not
scale: one sink column makes a padded transpose as wide as the sequence. An empty row is legal: its output is zero, and
so are its gradients. Tuning never changes what a mask means. """


def xsake(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text(TEXT * 8)
    code, said = xsake("data", "build", folder / "text.txt", "--out", folder / "data", "--vocab", 400, "--holdout", 0)
    assert code == 0 and "vocabulary of 400" in said and "tokens from 1 texts" in said
    return folder / "data"


@pytest.mark.slow
def test_tiny_overfits_a_small_text(data, tmp_path, monkeypatch):
    """bfloat16, rematerialised, half of the blocks: from the loss of guessing to almost none."""
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    words = ["train", "--preset", "tiny", "--data", data, "--run", run, "--steps", 50, "--length", 64, "--batch", 8]
    words += ["--learning-rate", 0.01, "--warmup", 5, "--remat"]
    words += ["--attention", "sink_window", "--density", 0.6, "--block", 16]
    code, said = xsake(*words)
    assert code == 0 and "step 50/50 loss" in said and "trained: " in said
    curve = losses(run / "metrics.jsonl")
    assert abs(curve[0] - np.log(512)) < 0.5 and curve[-1] < 0.5
    (start,) = events(run / "metrics.jsonl", "start")
    assert start["config"]["attention"] == "sink_window" and start["config"]["remat"]
    last = events(run / "metrics.jsonl")[-1]
    assert last["tokens_per_second"] > 0 and last["mfu"] is None and last["learning_rate"] < 2e-3

    tokens = np.asarray(open_shards(data, "train")[0].tokens[:65], np.int32)[None]
    predicted = nnx.jit(lambda model, tokens: model(tokens).argmax(-1))(
        load_trained(run, dtype=jnp.float32), tokens[:, :-1]
    )
    assert (np.asarray(predicted) == tokens[:, 1:]).mean() > 0.8
    with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 7; it has \[50\]"):
        load_trained(run, step=7)
    with pytest.raises(FileNotFoundError, match="holds no training run"):
        load_trained(tmp_path)

    assert xsake(*words, "--seed", 1)[0] == 1  # another configuration: refused
    code, said = xsake("generate", "One contract says which", "--model", run, "--max-new-tokens", 8)
    assert code == 0 and said.startswith(" blocks attend to which")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--preset", "huge"], "preset='huge' must be one of tiny, small"),
        (["--length", "513"], "length=513 is beyond the model's context of 512"),
        (["--mesh", "4"], "mesh='4' must be two or three numbers of devices"),
        (["--mesh", "64x64"], "needs 4096 devices, and there are"),
        (["--mesh", "2x2x"], "mesh='2x2x' must be two or three numbers of devices"),
        (["--mesh", "2x2x3"], "data=2 x model=2 x sequence=3 needs 12 devices, and there are"),
        (["--mesh", "1x1x2", "--length", "63"], "the mesh's sequence=2: use a multiple of 2 tokens"),
        (["--mesh", "1x1x2", "--length", "48", "--order", "zigzag"], "use a multiple of 64 tokens"),
        (["--order", "spiral"], "order='spiral' must be one of 'contiguous', 'zigzag'"),
        (["--exchange", "post"], "exchange='post' must be one of 'auto', 'gather', 'ring', 'sparse'"),
        (["--attention", "all"], "attention='all' must be one of"),
        (
            ["--attention", "hads", "--block", "128"],
            "sequences of 512 tokens have 4 blocks of 128, most of them always on",
        ),
        (["--attention", "hads", "--block", "16", "--density", "0.1"], "budget=0.1 is below 0.1"),
        (
            ["--attention", "sink_window", "--density", "0.1", "--block", "128"],
            "keeps 70% of the blocks of 512 tokens where density=0.1 comes nearest: use block=16",
        ),
        (
            ["--attention", "sink_window", "--density", "0.1", "--length", "64"],
            "use block=16 and density=0.70, or longer sequences",
        ),
        (["--processes", "2"], "missing: coordinator, process"),
        (["--eval-every", "1", "--length", "64"], "from two texts or more and with a --holdout above 0"),
        (["--data", "nowhere"], "nowhere has no train-*.tokens file"),
        (["--attention", "cudnn"], 'attention="cudnn" needs an NVIDIA GPU, and JAX runs on cpu here: use "dense"'),
        (["--seed", str(10**23)], "seed=100000000000000000000000 must be an int"),
        (["--batch", str(10**30)], "must be an int"),
        (["--steps", str(10**30)], "must be an int"),
        (["--attention", "random", "--density", "0.5", "--block", str(10**20)], "must be an int"),
        (["--mesh", "0x1"], "each must be at least 1"),
        (["--keep", "0"], "keep=0 must be at least 1"),
        (["--length", "64", "--batch", "999"], "fewer than one batch of 999. Build more text, or take"),
    ],
)
def test_what_goes_wrong_is_said(data, tmp_path, monkeypatch, words, message):
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path / "cache"))
    code, said = xsake("train", "--data", data, "--run", tmp_path / "run", *words)
    assert code == 1 and message in " ".join(said.split())
    assert not (tmp_path / "run").exists()


def test_seven_small_files_are_built_and_trained_on_by_default(tmp_path, monkeypatch):
    """One of them is held out, the model's vocabulary is theirs, and the blocks are those of the density."""
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    words = "".join(f"word{number * 7919 % 1000} " for number in range(3000))
    for number in range(7):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"The {number}th: " + words[number * 700 :][:9000])
    code, said = xsake("data", "build", tmp_path / "texts", "--out", tmp_path / "corpus")
    assert code == 0 and "tokens from 1 texts" in said and "tokens from 6 texts" in said
    vocabulary = open_shards(tmp_path / "corpus", "held")[0].vocab_size
    assert vocabulary > 512

    seen = {}

    def report(config, *, eval_every, **_):
        seen["config"] = config
        seen["held"] = Trainer(config, data=tmp_path / "corpus").held_out()
        return tmp_path

    monkeypatch.setattr("xsake.model.training.loop.train", report)
    options = ["--eval-every", 1, "--attention", "sink_window", "--density", 0.1]
    code, said = xsake("train", "--data", tmp_path / "corpus", "--run", tmp_path / "run", *options)
    assert code == 0, said
    config = seen["config"]
    assert vocabulary <= config.model.vocab_size < vocabulary + 64 and config.block == 16 and config.length == 512
    assert 1 <= seen["held"].batch < config.batch == 16


def test_ctrl_c_says_where_the_same_command_goes_on(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path / "cache"))
    words = ["train", "--data", data, "--run", tmp_path / "run", "--length", 64, "--batch", 2, "--steps", 4]
    words += ["--checkpoint-every", 2]
    step, stop_before = Trainer.step, 2

    def interrupted(trainer):
        if trainer.taken + 1 == stop_before:
            raise KeyboardInterrupt
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", interrupted)
    code, said = xsake(*words)
    assert code == 130 and "stopped; the same command begins anew: there is no checkpoint yet" in said
    stop_before = 4
    code, said = xsake(*words)
    assert code == 130 and "stopped; the same command goes on from step 2\n" in said and "step 1/4 loss" in said
    stop_before = None
    code, said = xsake(*words)
    assert code == 0 and said.startswith("goes on from step 2\nstep 3/4 loss") and " 0:00:00 left\ntrained: " in said
    assert len(losses(tmp_path / "run" / "metrics.jsonl")) == 4


def test_token_files_are_not_taken_for_text(data, tmp_path):
    code, said = xsake("data", "build", data, "--out", tmp_path / "out")
    assert code == 1 and "train-00000.tokens is a file of tokens, not of text" in said


def test_a_run_is_a_model_with_the_tokenizer_of_its_data(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path / "cache"))
    run, kept = tmp_path / "run", tmp_path / "run" / "tokenizer.json"
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, vocab_size=400))
    trainer = Trainer(config, data=data)
    trainer.begin()
    with Checkpoints(run / "checkpoints") as checkpoints:
        trainer.save(checkpoints)
    shutil.copy(data / "tokenizer.json", run)
    file = open_model(run)
    assert file.config == config.model and file.path == run / "checkpoints" / "0"
    tokenizer = load_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT and tokenizer.eos == "<|endoftext|>"
    model = load_pretrained(file, param_dtype=jnp.bfloat16)
    saved = nnx.state(load_trained(run))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype(x.dtype)), nnx.state(model), saved)

    train_tokenizer([TEXT], 300).save(str(kept))
    code, said = xsake("generate", "hello", "--model", run)
    assert code == 1 and "tokenizer.json is not the tokenizer of the data of this run" in said
    kept.unlink()
    code, said = xsake("generate", "hello", "--model", run)
    assert code == 1 and "tokenizer.json does not exist: copy it from the folder of the data" in said
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    code, said = xsake("generate", "hello", "--model", tmp_path / "empty")
    assert code == 1 and "has no checkpoint yet: go on with the run" in said


def test_a_run_folder_that_cannot_be_used(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    for run, message in (("file", "Not a directory"), ("file/run", "Not a directory"), ("run", "File exists")):
        code, said = xsake("train", "--data", data, "--run", tmp_path / run, "--length", 64, "--steps", 1)
        assert code == 1 and "Traceback" not in said
        assert " ".join(said.split()) == f"checkpoints cannot be written to {tmp_path / run / 'checkpoints'}: {message}"


def test_what_jax_lacks_is_told_in_a_line(tmp_path, monkeypatch):
    """Too little memory or a missing device is told in a line; any other error keeps its traceback."""

    def fail(error):
        def build(*_, **__):
            raise error

        monkeypatch.setattr("xsake.model.data.build.build", build)
        return xsake("data", "build", tmp_path, "--out", tmp_path / "out")

    assert fail(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.\nmore")) == (
        1,
        "RESOURCE_EXHAUSTED: Out of memory allocating 5 bytes.\n",
    )
    assert fail(PermissionError(13, "Permission denied", "/there")) == (1, "/there: Permission denied\n")
    assert fail(BrokenPipeError(32, "Broken pipe")) == (1, "")  # as in `xsake data build ... | head -1`
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        fail(RuntimeError("a mistake of ours"))


def test_data_that_cannot_be_built(data, tmp_path):
    code, said = xsake("data", "build", tmp_path / "nothing", "--out", tmp_path / "out")
    assert code == 1 and "is neither a file nor a folder" in said
    code, said = xsake("data", "build", data / "tokenizer.json", "--out", data)
    assert code == 1 and "nothing was overwritten" in said
