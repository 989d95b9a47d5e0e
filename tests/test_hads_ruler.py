"""RULER's tasks are what their definitions say, and the runner reads them as it says."""

from __future__ import annotations

import dataclasses
import itertools
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
import tokenizers
from tokenizers import models, pre_tokenizers

from benchmarks.ruler import niah, picture, prompt, run, way
from benchmarks.ruler.counting import zeta_counts
from benchmarks.ruler.essay import Essay
from benchmarks.ruler.fit import largest
from benchmarks.ruler.masked_prefill import read_masked
from benchmarks.ruler.noise import NOISE
from benchmarks.ruler.prepared import Prepared, prepare
from benchmarks.ruler.prompt_layer import METHODS_HERE, choose_blocks, forces, program_of
from benchmarks.ruler.qa import topics
from benchmarks.ruler.score import match_all, match_part
from benchmarks.ruler.summary import as_json, beyond, summarise, tables
from benchmarks.ruler.tasks import BEYOND, TASKS
from benchmarks.ruler.warm_up import warm_up
from benchmarks.ruler.way import Way, answer, ways_of
from xsake.hads.profile.budgets import layer_counts
from xsake.hads.study.methods.mask import MethodMask
from xsake.hads.study.records import Records, read
from xsake.model import HadsBudget, generate
from xsake.model.text.tokenizer import Tokenizer, byte_level_bpe

ESSAY = Essay.python_reference()
PROFILE = case.random_profile(head_dim=16)
BLOCK = PROFILE.block


class Words:
    """A tokenizer of words and marks: what it encodes it can say again."""

    template, stop = None, frozenset(range(0, 512, 2))  # answers are short

    def __init__(self) -> None:
        self.seen: dict[int, str] = {}

    def encode(self, text: str) -> list[int]:
        parts = re.findall(r"[\w-]+|[^\w\s]", text)
        numbers = [zlib.crc32(part.encode()) % 511 for part in parts]
        self.seen |= dict(zip(numbers, parts, strict=True))
        return numbers

    def decode(self, tokens: list[int]) -> str:
        return " ".join(self.seen.get(token, "?") for token in tokens)


def made(name: str, sample: int = 0, length: int = 4096, task: Any = None) -> tuple[prompt.Sample, str]:
    """A sample, and the text that its tokens are of."""
    texts: dict[tuple[int, ...], str] = {}

    def encode(text: str) -> list[int]:
        tokens = Words().encode(text)
        texts[tuple(tokens)] = text
        return tokens

    frame = prompt.Frame("", " ", encode)
    options = dict(length=length, sample=sample, seed=0, frame=frame, essay=ESSAY)
    found = prompt.make(name, task or (TASKS | BEYOND)[name], **options)
    return found, texts[tuple(found.tokens)]


# -- tasks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_a_task_fills_the_length_with_its_answers_inside(name):
    sample, text = made(name)
    room = 4096 - TASKS[name].answer_tokens
    assert room - 120 < len(sample.tokens) <= room
    body = text[: text.rindex("Question:")] if "Question:" in text else text[: text.rindex("What ")]
    found = [reference for reference in sample.answers if reference.lower() in body.lower()]
    assert found if name.startswith("qa") else found == sample.answers
    again, other = made(name)[0], made(name, sample=1)[0]
    assert again == sample and other.tokens != sample.tokens and other.answers != sample.answers


def test_needles():
    def needles(name: str) -> tuple[prompt.Sample, str, list[tuple[str, str]]]:
        sample, text = made(name)
        return sample, text, re.findall(r"One of the secret (?:numbers|uuids) of ([\w-]+) is: ([\w-]+)\.", text)

    sample, text, found = needles("niah_single_1")
    assert [value for _, value in found] == sample.answers and re.fullmatch(r"\d{7}", sample.answers[0])
    assert text.count(NOISE) > 100 and f"secret number of {found[0][0]} in" in text
    sample, text, found = needles("niah_single_3")
    assert len(found) == 1 and re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", sample.answers[0])
    sample, text, found = needles("niah_multikey_1")
    assert len({key for key, _ in found}) == 4 and dict(found)[_asked(text)] == sample.answers[0]
    for name in ("niah_multikey_2", "niah_multikey_3"):
        sample, text, found = needles(name)
        assert len(found) > 100 and [value for key, value in found if key == _asked(text)] == sample.answers
    sample, text, found = needles("niah_multivalue")
    assert {key for key, _ in found} == {_asked(text)} and sorted(v for _, v in found) == sorted(sample.answers)
    sample, text, found = needles("niah_multiquery")
    assert len(found) == 4 and sorted(value for _, value in found) == sorted(sample.answers)


def _asked(text: str) -> str:
    return re.findall(r"What (?:is|are) the secret \w+ of ([\w-]+) in", text)[-1]


def test_needles_stand_at_their_depth():
    for depth in (0, 50, 100):
        name, task = f"needle@{depth}", prompt.tasks_named(["needle"])[f"needle@{depth}"]
        sample, text = made(name, task=task)
        assert sample.task == "needle" and sample.depth == pytest.approx(depth / 100, abs=0.02)
        assert text.index(sample.answers[0]) / len(text) == pytest.approx(depth / 100, abs=0.1)
    assert len(niah.DEPTHS) == len(set(niah.DEPTHS)) == 40 and {0, 100} <= set(niah.DEPTHS)


def test_near_copies_share_their_words_with_others():
    sample, text = made("alike")
    keys = re.findall(r"One of the secret numbers of (\w+) (\w+) is: (\d{7})\.", text)
    assert len(keys) == 24 and len({(one, other) for one, other, _ in keys}) == 24
    for part in (0, 1):
        assert min(Counter(key[part] for key in keys).values()) > 1
    (asked,) = re.findall(r"What is the secret number of (\w+) (\w+) in the text above", text)
    assert [value for one, other, value in keys if (one, other) == asked] == list(sample.answers)


def test_a_copy_is_asked_for_by_its_mark_and_begun():
    sample, text = made("copy")
    passages = dict(re.findall(r'The (\w+ \w+) passage: "([^"]+)"\n', text))
    (asked,) = re.findall(r"Repeat the (\w+ \w+) passage, word for word", text)
    lead = text.rsplit(f'The {asked} passage: "', 1)[1]
    assert len(passages) == 8 and len(lead.split()) == 8 and len(sample.answers[0].split()) == 40
    assert f"{lead} {sample.answers[0]}" == passages[asked]
    assert sample.score(" ".join(sample.answers[0].split()[:10]) + " and so on", sample.answers) == 0.25


def test_whole_and_begun_answers_are_counted_apart():
    line = {"length": 4096, "method": "dense", "budget": 1.0, "seconds": 1.0, "score": 0.5, "begins": True}
    lines = [line | {"task": "copy", "sequence": f"copy/4096/{n}"} for n in range(2)]
    lines[1] |= {"score": 1.0}
    (row,) = beyond(lines)
    assert row.tasks == {"copy whole": 50.0, "copy begun": 100.0} and not summarise(lines)
    assert "copy begun" in [column.header for column in tables([row])[0].columns]


def test_variables_form_a_chain_after_a_solved_example():
    sample, text = made("vt")
    example, asked = text.split("\n\nThe text below", 1)
    for part, letters in ((example, 3), (asked, 5)):
        lines = re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", part, re.M)
        assert len(lines) == 5 and all(before == after[1] for (before, _), after in itertools.pairwise(lines))
        assert {len(name) for name, _ in lines} == {letters}
        assert f"have the value {lines[0][1]}" in part
    assert [name for name, _ in lines] == sample.answers
    assert example.endswith(" ".join(re.findall(r"^VAR (\w+) =", example, re.M)))


@pytest.mark.parametrize(("length", "often", "seldom"), [(4096, 30, 3), (2048, 6, 1)])
def test_common_words_are_as_common_as_defined(length, often, seldom):
    sample, text = made("cwe", length=length)
    listed = re.findall(r"(\d+)\. (\w+)", text.rsplit("most often.\n", 1)[1])
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {counts.pop(word) for word in sample.answers} == {often} and set(counts.values()) == {seldom}
    assert len(sample.answers) == 10


def test_frequent_words_fall_with_the_square_of_their_rank():
    sample, text = made("fwe")
    body = text.split("most often. ", 1)[1].split("\nQuestion", 1)[0]
    ranked = Counter(body.split()).most_common()
    assert [word for word, _ in ranked[:4]] == ["...", *sample.answers]
    assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in ranked[1:])
    first = ranked[0][1]
    assert [count for _, count in ranked[1:4]] == [pytest.approx(first / rank**2, abs=1) for rank in (2, 3, 4)]
    assert zeta_counts(3, 1000) == [607, 151, 67]


def test_documents_hold_the_answer_and_distractors():
    for sample_number in range(44):
        for name, needed in (("qa_1", 1), ("qa_2", 2)):
            sample, text = made(name, sample_number, length=1024)
            documents = re.findall(r"Document (\d+):\n", text)
            assert [int(number) for number in documents] == list(range(1, len(documents) + 1)) and len(
                documents
            ) > needed
            assert any(answer.lower() in text.lower() for answer in sample.answers)
    assert len(re.findall(r"Document \d+:", made("qa_1", length=8192)[1])) > 44  # beyond our own, of the essay


def test_questions_are_answered_by_their_passages_alone():
    """RULER looks for substrings: an answer that stands in the question, or is very short, would be found by chance."""

    def said(text: str, asked: dict[str, Any]) -> bool:
        return bool(match_part(text, asked["answers"]))

    for topic in topics():
        first, second = topic["passages"]
        assert not said(first["text"], topic) and said(second["text"], topic)  # both are needed
        for asked in (first, second, topic):
            assert not said(asked["ask"], asked) and min(map(len, asked["answers"])) >= 3
        assert said(first["text"], first) and said(second["text"], second)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="cwe does not fit 256 tokens with 120 for its answer: the smallest"):
        made("cwe", length=256)
    with pytest.raises(ValueError, match=r"cwe has haystack for .* tokens only, not for 65536"):
        made("cwe", length=65536)
    with pytest.raises(ValueError, match="unknown task 'needles'"):
        prompt.tasks_named(["all", "needles"])


def test_the_largest_size_takes_few_questions():
    asked = []

    def cost(size: int) -> int:
        asked.append(size)
        return 200 + 7 * size + size % 3

    size = largest(cost, 30_000, least=5, most=10**7)
    assert cost(size) <= 30_000 < cost(size + 1) and len(asked) < 12
    assert largest(lambda size: size, 10**6, least=1, most=40) == 40


def test_a_chat_template_is_run_once_and_tokens_are_those_of_the_chat():
    core = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(("?", "<", ">", "a", "b"))}, "?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    template = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}a"
    tokenizer = Tokenizer(core=core, eos=None, template=template)
    frame = prompt.Frame.of(tokenizer)
    assert (frame.before, frame.after) == ("<", ">a")
    question = prompt.Question("abba", "", ["a"])
    assert frame.tokens(question) == tokenizer.chat([{"role": "user", "content": "abba"}])


def test_scores_are_rulers():
    assert match_all(" 1234567, and\x007654321.", ["1234567", "7654321", "1111111", "2222222"]) == 0.5
    assert match_all("The Apple.", ["apple"]) == 1 and match_all("", ["apple"]) == 0
    assert match_part("in eight storeys", ["8", "Eight"]) == 1 and match_part("nine", ["8", "eight"]) == 0


# -- reading -----------------------------------------------------------------------------------------------------------


MODEL_PROFILE = case.random_profile(layers=1, head_dim=16)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model.build(config=dataclasses.replace(tiny_model.TINY, layers=1, context=1024))


def blocks_of(name: str, query: Any, key: Any, lengths: list[int], budget: float = 0.6) -> np.ndarray:
    profile = PROFILE.on_device()
    counts = np.stack([layer_counts(PROFILE, budget, length) for length in lengths], 1).astype(np.int32)
    blocks, kept = choose_blocks(
        program_of(name), profile, jnp.asarray(forces(name)), jnp.int32(1), query, key, counts, np.int32(lengths)
    )
    assert kept.tolist() == counts[1].tolist()
    return np.asarray(blocks)


QUICK = ("mean_top_k+forced", "oracle_gain")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in METHODS_HERE])
def test_padding_changes_no_choice(name):
    query, key = map(jnp.asarray, case.random_inputs(0, 12 * BLOCK, PROFILE, batch=2))
    found = blocks_of(name, query, key, [9 * BLOCK, 12 * BLOCK])
    wanted = jax.jit(mask_of(name, PROFILE, 9 * BLOCK).blocks)(1, query[:1, : 9 * BLOCK], key[:1, : 9 * BLOCK])
    np.testing.assert_array_equal(found[:1, :, :9, :9], wanted)
    assert not found[0, :, 9:].any()


@pytest.mark.slow  # traces every method
@pytest.mark.parametrize("name", [name for name in METHODS_HERE if not name.endswith("+forced")])
def test_no_choice_holds_an_array_of_all_tokens_squared(name):
    """A model of 12 heads at 32768 tokens: 4096 x 4096 per head, XAttention's, is the most; nothing is computed."""
    length, block = 32768, 64
    profile = case.random_profile(q_heads=12, kv_heads=2, head_dim=128, block=block).on_device()
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16) for heads in (12, 2))
    counts, lengths = jax.ShapeDtypeStruct((2, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    traced = jax.make_jaxpr(choose_blocks, static_argnums=0)(
        program_of(name), profile, True, jnp.int32(0), query, key, counts, lengths
    )
    assert length * 128 <= _largest_array(traced.jaxpr) <= 12 * 4096**2


def _largest_array(jaxpr: Any) -> int:
    """Elements of the largest array that a traced program makes."""
    most = 0
    for equation in jaxpr.eqns:
        most = max([most, *(variable.aval.size for variable in equation.outvars)])
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            most = max(most, _largest_array(inner)) if hasattr(inner, "eqns") else most
    return most


def test_a_block_that_a_prompt_ends_in_counts_its_own_tokens_alone():
    query, key = map(jnp.asarray, case.random_inputs(1, 12 * BLOCK, PROFILE, batch=2))
    length = 8 * BLOCK + BLOCK // 2
    found = blocks_of("mean_top_k+forced", query, key, [length, length])
    wanted = jax.jit(mask_of("mean_top_k+forced", PROFILE, length).blocks)(1, query[:, :length], key[:, :length])
    np.testing.assert_array_equal(found[:, :, :9, :9], wanted)


def mask_of(method: str, profile: Any, length: int) -> MethodMask:
    return MethodMask.of(method, jax.tree.map(jnp.asarray, profile), layer_counts(profile, 0.6, length))


PROMPTS = [np.random.default_rng(n).integers(0, 511, blocks * BLOCK).tolist() for n, blocks in enumerate((9, 11))]


@pytest.mark.slow  # the run that goes on reads prompts under masks, too
def test_masked_prompts_are_read_as_in_one_forward(model):
    read = read_masked(model, PROMPTS, capacity=512, method="mean_top_k", budget=0.6, profile=MODEL_PROFILE)
    found = model.logits(model.norm(read.last))[0, 0]
    masks = mask_of("mean_top_k", MODEL_PROFILE, len(PROMPTS[0]))
    expected = tiny_model.run(model, np.asarray(PROMPTS[:1]), mask_fn=masks)[0, -1]
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
    assert read.cache.length.tolist() == [9 * BLOCK, 11 * BLOCK] and read.cache.capacity == 512


@pytest.mark.slow  # compiles for each prompt and way
@pytest.mark.parametrize("chunk", [None, 64])
def test_answers_are_those_of_generate(chunk):
    """Prompts of different lengths, padded, against each prompt generated alone."""
    model = tiny_model.build()
    options = dict(capacity=24 * BLOCK, profile=PROFILE, answer_tokens=3, stop=frozenset(), chunk=chunk)
    for which in (Way("dense", 1.0), Way("hads", 0.6), *[Way("mean_top_k", 0.6)] * (chunk is None)):
        found = answer(model, PROMPTS, which, **options)
        for tokens, one in zip(found, PROMPTS, strict=True):
            how: dict[str, Any] = {"chunk": chunk}
            if which.method == "hads":
                how |= {"hads": HadsBudget(PROFILE, 0.6, policy="always")}
            elif which.method != "dense":
                how |= {"mask_fn": mask_of("mean_top_k", PROFILE, len(one))}
            assert tokens == generate(model, [one], max_new_tokens=3, **how)[0], which


def test_methods_that_cannot_read_padded_prompts_are_refused():
    assert ways_of("dense, hads,oracle_gain", "0.2,0.1") == [
        *(Way("dense", 1.0), Way("hads", 0.2), Way("oracle_gain", 0.2), Way("hads", 0.1), Way("oracle_gain", 0.1))
    ]
    strongest = ("flash_prefill", "flash_prefill+forced", "x_attention_8", "x_attention_8+forced", "oracle_top_k")
    assert ways_of(",".join(strongest), "0.2") == [Way(name, 0.2) for name in strongest]
    for name in ("vertical_slash", "minference", "kascade", "hads_group", "hads_v1"):
        with pytest.raises(ValueError, match=f"{name}.* cannot read padded prompts.*These can: dense, hads"):
            ways_of(f"dense,{name}", "0.2")
    with pytest.raises(ValueError, match=r"budgets \[2.0\] must be shares"):
        ways_of("hads", "2")


@pytest.mark.slow  # records of the study go on by the same code
def test_a_run_that_was_cut_off_goes_on(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, calls = tmp_path / "records.jsonl", []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[2])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return way.answer(*args, **options)

    def go(**more: Any) -> tuple[bool, Records]:
        records = Records(path, {"model": "tiny"})
        options: dict[str, Any] = dict(tasks=prompt.tasks_named(["niah_single_2", "qa_1"]), lengths=[512], samples=4)
        options |= dict(ways=ways_of("dense,mean_top_k", "0.6"), profile_for=lambda length: MODEL_PROFILE)
        options |= dict(batch=2) | more
        return run.run(model, prompt.Made(Words(), ESSAY), records, **options), records

    monkeypatch.setattr(run, "answer", counted)
    with pytest.raises(KeyboardInterrupt):
        go()
    whole = path.read_text()
    path.write_text(whole[:-30])  # killed while the sixth answer was written
    ended, records = go(stop=lambda: len(calls) >= 6)
    assert not ended and len(records) == 8
    ended, records = go()
    assert ended and len(records) == 16 and len(calls) == 10  # eight batches, one cut off and one interrupted
    lines = read(path)[1]
    assert {line["sequence"] for line in lines} == {f"{t}/512/{n}" for t in ("niah_single_2", "qa_1") for n in range(4)}
    assert all(line["score"] == TASKS[line["task"]].score(line["said"], line["answers"]) for line in lines)
    assert whole.splitlines()[:6] == path.read_text().splitlines()[:6]
    with pytest.raises(ValueError, match="mean_top_k 60% need a profile of the model at 512 tokens"):
        go(profile_for=lambda length: None)
    with pytest.raises(ValueError, match="500 tokens must be a multiple of the profile's rows of 16"):
        go(lengths=[500])
    with pytest.raises(ValueError, match="2048 tokens are beyond the model's context of 1024"):
        go(lengths=[512, 2048])
    with pytest.raises(ValueError, match=r"budget=0.01 is below 0\.\d+, the share of the blocks that are always on"):
        go(ways=[Way("hads", 0.01)])
    with pytest.raises(ValueError, match="niah_single_2 does not fit 128 tokens with 128 for its answer"):
        go(lengths=[128], ways=[Way("dense", 1.0)])


@pytest.fixture(scope="module")
def bytes_alone() -> Tokenizer:
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    return Tokenizer.of(byte_level_bpe(tokens, [], "gpt-2"), special=["<end>"], bos=None, eos="<end>")


def test_prepared_prompts_need_no_tokenizer(model, bytes_alone, tmp_path: Path):
    fresh, options = prompt.Made(bytes_alone, ESSAY), dict(lengths=[512], samples=2)
    tasks = prompt.tasks_named(["niah_single_2"])
    prepare(fresh, "tiny", tasks, **options).save(tmp_path / "prompts.npz")
    stored = Prepared.load(tmp_path / "prompts.npz")
    assert (stored.model, stored.digest, stored.stop) == ("tiny", ESSAY.digest, frozenset({256}))
    assert stored.decode([*bytes_alone.encode("na\u00efve \u2713\n"), 256]) == "na\u00efve \u2713\n"
    assert all(fresh.sample(n, t, 512, i) == stored.sample(n, t, 512, i) for n, t in tasks.items() for i in (0, 1))
    more: dict[str, Any] = dict(tasks=tasks, ways=[Way("dense", 1.0)], profile_for=lambda length: None)
    lines = []
    for number, source in enumerate((fresh, stored)):
        records = Records(tmp_path / f"{number}.jsonl", {})
        assert run.run(model, source, records, batch=2, **options, **more)
        lines.append([line | {"seconds": 0} for line in records])
    assert lines[0] == lines[1] and len(lines[0]) == 2
    with pytest.raises(ValueError, match=r"lack 1 of 3, such as niah_single_2/512/2 \(TASK/LENGTH/SAMPLE\)"):
        stored.check(tasks, [512], 3)


def test_what_cannot_be_prepared_is_refused(tmp_path: Path):
    core = tokenizers.Tokenizer(models.WordLevel({"\u2581a": 0, "?": 1}, "?"))
    with pytest.raises(ValueError, match="not byte-level: its token '\u2581a' holds '\u2581'"):
        prepare(prompt.Made(Tokenizer(core=core, eos=None), ESSAY), "tiny", {}, [], 0)
    (tmp_path / "prompts.npz").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="holds no prepared prompts, or is damaged"):
        Prepared.load(tmp_path / "prompts.npz")


@pytest.mark.slow  # compiles each way
def test_a_warm_run_compiles_nothing_large(model, caplog: pytest.LogCaptureFixture):
    ways = [Way("dense", 1.0), Way("hads", 0.6)]
    warm_up(model, ways=ways, lengths=[256], profile_for=lambda length: MODEL_PROFILE, batch=2, chunk=None)
    options: dict[str, Any] = dict(capacity=256, profile=MODEL_PROFILE, answer_tokens=2, stop=frozenset())
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        for which in ways:
            answer(model, [one[:200] for one in PROMPTS], which, **options)
    assert not re.findall(r"Compiling (?:jit\()?(_read_block|_decode|_first|_start)", caplog.text)


# -- what is made of the records ---------------------------------------------------------------------------------------


def line(task: str, sample: int, which: Way, score: float, length: int = 4096) -> dict[str, Any]:
    return {"sequence": f"{task}/{length}/{sample}", "method": which.method, "budget": which.budget} | {
        "task": task.split("@")[0],
        "length": length,
        "score": score,
        "seconds": 1.0,
    }


def test_the_average_is_over_tasks():
    dense, hads = Way("dense", 1.0), Way("hads", 0.2)
    lines = [line("vt", n, which, score) for n in range(3) for which, score in ((dense, 1.0), (hads, 0.8))]
    lines += [line("cwe", 0, dense, 0.5), line("cwe", 0, hads, 0.5), line("needle@0", 0, dense, 0.0)]
    first, second = summarise(lines)
    assert (first.way, first.tasks, first.average, first.samples) == (dense, {"vt": 100, "cwe": 50}, 75, 1)
    assert first.against is None and second.average == pytest.approx(65)
    assert second.against is not None and second.against.mean == pytest.approx(-10)
    assert as_json([second])[0]["against_dense"]["mean"] == pytest.approx(-10)
    assert tables([first, second])[0].row_count == 2


def test_needles_by_depth_and_length(tmp_path: Path):
    hads = Way("hads", 0.2)
    lines = [line(f"needle@{depth}", n, hads, float(depth > 40), 4096) for depth in (0, 50, 100) for n in (0, 1)]
    lines += [line("needle@50", 0, hads, 0.0, 8192), line("vt", 0, hads, 1.0)]
    lengths, scores = picture.needle_scores(lines)
    assert lengths == [4096, 8192] and scores[hads][[0, 5, 10], 0].tolist() == [0, 100, 100]
    assert scores[hads][5, 1] == 0 and np.isnan(scores[hads][1]).all()
    picture.draw(lines, tmp_path / "needles.png", "tiny")
    assert (tmp_path / "needles.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="hold no needles by depth"):
        picture.draw(lines[-1:], tmp_path / "none.png", "tiny")
