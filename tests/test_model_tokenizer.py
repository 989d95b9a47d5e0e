"""Tokenizers of pretrained models: how text is cut, conversations, text as it arrives."""

from __future__ import annotations

import pytest
from tokenizers import pre_tokenizers

from xsake.model.text.tokenizer import Tokenizer, byte_level_bpe

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(split="gpt-2", template=CHATML, **options) -> Tokenizer:
    special = ["<|im_start|>", "<|im_end|>"]
    core = byte_level_bpe([*special, *BYTES, "12", "123", "Ġ1"], ["Ġ 1", "1 2", "12 3"], split)
    return Tokenizer.of(core, special=special, bos="<|im_start|>", eos="<|im_end|>", template=template, **options)


@pytest.mark.parametrize(
    ("split", "pieces"),
    [
        ("gpt-2", ["a", "Ġ1", "2", "3", "4"]),
        ("smollm", ["a", "Ġ", "1", "2", "3", "4"]),  # every digit by itself
        ("llama-bpe", ["a", "Ġ", "123", "4"]),  # digits by threes, without the space
    ],
)
def test_text_is_cut_as_the_model_was_taught(split, pieces):
    tokenizer = build(split=split)
    numbers = tokenizer.encode("a 1234")
    assert [tokenizer.core.id_to_token(n) for n in numbers] == pieces
    assert tokenizer.decode(numbers) == "a 1234"


def test_unknown_cuts_are_refused():
    with pytest.raises(NotImplementedError, match="text split 'tekken' is not supported; these are: gpt-2, smollm"):
        build(split="tekken")


def test_a_conversation_is_rendered_by_the_template():
    tokenizer = build()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.core.decode(tokenizer.chat(messages), skip_special_tokens=False)
    assert text == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_needs_a_template():
    with pytest.raises(ValueError, match="no chat template"):
        build(template=None).chat([])


def test_the_beginning_token_is_added_to_text_but_not_to_conversations():
    tokenizer = build(add_bos=True)
    assert tokenizer.encode("a")[0] == tokenizer.core.token_to_id("<|im_start|>")
    assert tokenizer.chat([]).count(0) == 1


def test_text_arrives_in_whole_characters():
    tokenizer = build()
    text = "né 你好 🙂!"
    numbers = tokenizer.encode(text)
    assert len(numbers) > len(text)
    pieces = list(tokenizer.decode_stream(numbers))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
