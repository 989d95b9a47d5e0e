"""Text to token files and back."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from xsake.model.data import build as data_build
from xsake.model.data.build import TOKENIZER_FILE, build, find_texts
from xsake.model.data.progress import Progress
from xsake.model.data.shards import open_shards, write_shard
from xsake.model.data.tokenizer import END_OF_TEXT, fingerprint, load_tokenizer, train_tokenizer

WORDS = ["attention", "blocks", "query", "keys", "sparse", "window", "sink", "mask", "layer", "head", "token", "value"]


def text(seed: int, words: int = 200) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words)) + f"\n# {seed} é → 漢字\n"


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "texts" / "deep"
    folder.mkdir(parents=True)
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(text(number))
    return tmp_path / "texts"


def decoded(folder, split: str) -> list[str]:
    """The texts of a split, from its token files alone."""
    tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    ids = np.concatenate([shard.tokens for shard in open_shards(folder, split)])
    ends = np.flatnonzero(ids == tokenizer.token_to_id(END_OF_TEXT))
    assert ends[-1] == len(ids) - 1
    return [tokenizer.decode(part[part != ids[-1]].tolist()) for part in np.split(ids, ends[:-1] + 1)]


def test_every_text_is_in_one_split_once_and_reads_as_before(sources, tmp_path):
    built = build([sources], tmp_path / "out", vocab_size=320, holdout=0.2, shard_tokens=1000)
    train, held = (decoded(tmp_path / "out", split) for split in ("train", "held"))
    assert sorted(train + held) == sorted(text(number) for number in range(40))
    assert built.texts == {"train": len(train), "held": len(held)} and 1 <= len(held) <= 16
    shards = open_shards(tmp_path / "out", "train")
    assert built.vocab_size == 320 == shards[0].vocab_size
    assert [len(shard.tokens) for shard in shards[:-1]] == [1000] * (len(shards) - 1) and len(shards) > 2
    assert built.tokens["train"] == sum(len(shard.tokens) for shard in shards)
    assert shards[0].tokenizer == fingerprint(load_tokenizer(tmp_path / "out" / TOKENIZER_FILE))
    assert built.bytes_read == sum(path.stat().st_size for path in find_texts([sources])) and built.not_utf8 == 0


def test_two_builds_are_the_same(sources, tmp_path):
    for name in ("one", "two"):
        build([sources], tmp_path / name, vocab_size=320, holdout=0.1)
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert [p.name for p in one] == [p.name for p in two]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, two, strict=True))


def test_with_a_tokenizer_of_ones_own(sources, tmp_path):
    train_tokenizer([text(1)], 300).save(str(tmp_path / "mine.json"))
    built = build([sources / "deep" / "03.txt"], tmp_path / "out", tokenizer=tmp_path / "mine.json", holdout=0.0)
    assert built.vocab_size == 300 and decoded(tmp_path / "out", "train") == [text(3)]
    assert not list((tmp_path / "out").glob("held-*"))


def test_long_texts_and_odd_bytes(tmp_path, monkeypatch):
    """A text is encoded in pieces; <|endoftext|> inside a text does not end it; other bytes than UTF-8 are replaced."""
    monkeypatch.setattr("xsake.model.data.build._PIECE_CHARACTERS", 100)
    long = "".join(text(number, 20) for number in range(30)) + f"not the end: {END_OF_TEXT} {'x' * 300}"
    (tmp_path / "long.txt").write_text(long)
    (tmp_path / "odd.txt").write_bytes(b"caf\xe9")
    built = build([tmp_path / "long.txt", tmp_path / "odd.txt"], tmp_path / "out", vocab_size=300, holdout=0.0)
    assert decoded(tmp_path / "out", "train") == [long, "caf\ufffd"]
    assert built.not_utf8 == 1


@pytest.fixture
def stop_at(monkeypatch):
    """Ctrl-C while token file number `count` is written, before or after the file exists."""

    def set_up(count: int, *, after: bool = False) -> None:
        written = []

        def write(path, *arguments, **options):
            written.append(path)
            if len(written) == count and not after:
                raise KeyboardInterrupt
            write_shard(path, *arguments, **options)
            if len(written) == count:
                raise KeyboardInterrupt

        monkeypatch.setattr(data_build, "write_shard", write)

    return set_up


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_build_that_was_stopped_goes_on_with_what_is_finished(sources, tmp_path, stop_at, monkeypatch):
    """Stopped three times, at different places; the result equals that of a build that was not stopped."""
    options = dict(vocab_size=320, holdout=0.3, shard_tokens=700)
    whole, out = tmp_path / "whole", tmp_path / "out"
    expected = build([sources], whole, **options)
    monkeypatch.setattr(data_build, "_TEXTS_AT_A_TIME", 3)
    encoded = []
    original = data_build._encode
    monkeypatch.setattr(data_build, "_encode", lambda t, texts: original(t, encoded.append(texts) or texts))
    for count, after in ((1, False), (4, True), (3, False)):
        stop_at(count, after=after)
        with pytest.raises(KeyboardInterrupt):
            build([sources], out, **options)
        assert not out.exists()
        monkeypatch.setattr(data_build, "train_tokenizer", None)  # it is not trained again
    stop_at(10**6)
    encoded.clear()
    assert build([sources], out, **options) == expected
    assert contents(out) == contents(whole) and not out.with_name("out.part").exists()
    assert sum(map(len, encoded)) < 35, "texts whose tokens are in finished files are not encoded again"


def test_what_is_left_of_another_build_is_not_used(sources, tmp_path, stop_at):
    stop_at(3)
    with pytest.raises(KeyboardInterrupt):
        build([sources], tmp_path / "out", vocab_size=320, shard_tokens=500)
    stop_at(10**6)
    for name in ("out", "whole"):
        build([sources], tmp_path / name, vocab_size=300, shard_tokens=1000)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("text", ["", "[", "5", "{}", '{"places": {}}'])
def test_a_damaged_note_of_progress_starts_anew(sources, tmp_path, text):
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "progress.json").write_text(text)
    (tmp_path / "out.part" / "train-00000.tokens").write_text("old")
    build([sources], tmp_path / "out", vocab_size=300)
    assert len(decoded(tmp_path / "out", "train")) > 30


def test_two_builds_of_one_folder_do_not_mix(sources, tmp_path):
    with Progress(tmp_path / "out", [], {}), pytest.raises(FileExistsError, match="another process builds"):
        build([sources], tmp_path / "out", vocab_size=300)
    build([sources], tmp_path / "out", vocab_size=300)


@pytest.fixture
def ctrl_c():
    """SIGINT interrupts this process and its children, also if the tests run in the background: a shell makes
    background jobs ignore SIGINT, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_is_noticed_whichever_thread_is_given_it():
    ended = threading.Event()

    def work():
        time.sleep(0.3)  # until the caller waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        ended.wait(60)

    with pytest.raises(KeyboardInterrupt):
        data_build._interruptible(work)
    assert not ended.is_set()
    ended.set()


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_at_once_in_one_line(tmp_path):
    """Ctrl-C while a tokenizer is trained, which takes a minute and notices no signal."""
    before = cpu_seconds_of_children()
    letters = np.random.default_rng(0).integers(97, 123, (400_000, 10), np.uint8)
    letters[:, 0] = ord(" ")
    (tmp_path / "text.txt").write_bytes(letters.tobytes())
    command = [sys.executable, "-m", "xsake", "data", "build", "text.txt", "--out", "out", "--vocab", "60000"]
    source = str(Path(__file__).resolve().parents[1] / "src")
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": source}, **pipes)
    while not (tmp_path / "out.part" / "progress.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "stopped; the same command goes on with what is finished, in out.part\n"
    assert json.loads((tmp_path / "out.part" / "progress.json").read_text())["settings"]["vocab_size"] == 60000
    # Not in seconds of a clock, which runs on while a busy machine does something else.
    assert cpu_seconds_of_children() - before < 12, "it went on with the training, which takes over 20"


def test_wrong_calls(sources, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    for error, message, given, out, options in (
        (FileNotFoundError, "nothing is neither a file nor a folder", "nothing", "out", {}),
        (ValueError, "no file", "empty", "out", {}),
        (FileExistsError, "nothing was overwritten", "texts", "empty", {}),
        (ValueError, "vocab_size=100 must be at least 257", "texts", "out", dict(vocab_size=100)),
        (ValueError, r"vocab_size=10+ must be .* at most 2147483647", "texts", "out", dict(vocab_size=10**20)),
        (ValueError, r"holdout=1.0 must be", "texts", "out", dict(holdout=1.0)),
        (ValueError, "shard_tokens=0", "texts", "out", dict(shard_tokens=0)),
        (ValueError, r"bad.json is no tokenizer file", "texts", "out", dict(tokenizer=tmp_path / "bad.json")),
        (FileNotFoundError, r"none.json does not exist", "texts", "out", dict(tokenizer=tmp_path / "none.json")),
    ):
        with pytest.raises(error, match=message):
            build([tmp_path / given], tmp_path / out, **options)
    assert not (tmp_path / "out").exists()
