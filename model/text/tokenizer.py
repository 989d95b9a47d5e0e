"""A pretrained model's tokenizer: text to tokens and back, conversations in the form that the model was trained on."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from xsake._ground.fields import check
from xsake._ground.kinds import TEXT
from xsake._ground.read import read_json, read_text
from xsake.model.text.chat_template import render
from xsake.model.text.tokenizer_file import plain_tokenizer_errors, read_tokenizer

# How text is cut before merging, by llama.cpp's names for it.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {
    "gpt-2": (pre_tokenizers.ByteLevel(add_prefix_space=False),),
    "smollm": (pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": (
        pre_tokenizers.Split(tokenizers.Regex(_LLAMA3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
    "qwen2": (
        pre_tokenizers.Split(tokenizers.Regex(_QWEN2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ),
}
_NORMALIZERS = {"qwen2": normalizers.NFC}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A model's tokenizer, as `load_tokenizer` returns it.

    core: the tokenizer of the `tokenizers` library.
    eos: the token that ends an answer; bos: the token that begins a text, if any.
    template: the model's chat template (Jinja), if it has one.
    """

    core: tokenizers.Tokenizer
    eos: str | None
    bos: str | None = None
    template: str | None = None

    @classmethod
    def of(
        cls,
        core: tokenizers.Tokenizer,
        *,
        special: list[str],
        whole: list[str] | None = None,
        add_bos: bool = False,
        **named: Any,
    ) -> Tokenizer:
        """The tokenizer of a new `core`, which is told its special tokens and, with `add_bos`, to begin with `bos`.

        Tokens of `whole` are taken before any other, as special ones are, but they are text.
        """
        made = cls(core=core, **named)
        with plain_tokenizer_errors("no tokenizer can be made of its special tokens"):
            core.add_special_tokens([token for token in special if token])
            core.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in whole or () if token])
            if add_bos and made.bos is not None:
                core.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
                    single=[made.bos, "$A"], special_tokens=[(made.bos, core.token_to_id(made.bos))]
                )
        return made

    @property
    def vocab_size(self) -> int:
        return self.core.get_vocab_size()

    @property
    def stop(self) -> frozenset[int]:
        """Tokens after which generation ends."""
        number = None if self.eos is None else self.core.token_to_id(self.eos)
        return frozenset() if number is None else frozenset({number})

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text, with `bos` before them if the model is used to it."""
        return self._encode(text, add_special_tokens=True)

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens; tokens that are not text, such as the end of an answer, are left out."""
        with plain_tokenizer_errors("the model's tokenizer cannot decode these tokens"):
            return self.core.decode(list(tokens))

    def decode_stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """`decode`, piece by piece as tokens arrive; never half a character."""
        stream = decoders.DecodeStream(skip_special_tokens=True)
        for token in tokens:
            with plain_tokenizer_errors("the model's tokenizer cannot decode these tokens"):
                piece = stream.step(self.core, token)
            if piece:
                yield piece

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Tokens of a conversation, up to where the model answers.

        A message is {"role": "system" | "user" | "assistant", "content": text}.
        """
        return self.encode_chat_text(self.chat_text(messages))

    def chat_text(self, messages: Sequence[dict[str, str]]) -> str:
        """The text of which `chat` gives the tokens."""
        if self.template is None:
            raise ValueError("this model has no chat template: it continues text, with `encode`")
        return render(
            self.template,
            messages=list(messages),
            add_generation_prompt=True,
            bos_token=self.bos or "",
            eos_token=self.eos or "",
        )

    def encode_chat_text(self, text: str) -> list[int]:
        """Tokens of what a chat template wrote, which has its special tokens already."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with plain_tokenizer_errors("the model's tokenizer cannot encode this text"):
            return self.core.encode(text, add_special_tokens=add_special_tokens).ids


def byte_level_bpe(tokens: list[str], merges: list[str], split: str) -> tokenizers.Tokenizer:
    """Byte-level BPE by its merges; `split` is llama.cpp's name of how text is cut into words."""
    if split not in _SPLITS:
        raise NotImplementedError(f"text split {split!r} is not supported; these are: {', '.join(_SPLITS)}")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [_pair(merge) for merge in merges]
    with plain_tokenizer_errors("no tokenizer can be made of its tokens and merges"):
        core = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
        core.pre_tokenizer = pre_tokenizers.Sequence(list(_SPLITS[split]))  # type: ignore[assignment]
        core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        if split in _NORMALIZERS:
            core.normalizer = _NORMALIZERS[split]()  # type: ignore[assignment]
    return core


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer in tokenizer.json and, if there is one, tokenizer_config.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: the tokenizer must be beside the model's weights")
    core = read_tokenizer(path)
    beside = folder / "tokenizer_config.json"
    config = read_json(beside) if beside.is_file() else {}
    found = {
        "eos_token": _content(config.get("eos_token")),
        "bos_token": _content(config.get("bos_token")),
        "chat_template": _default(config.get("chat_template")),
    }
    if found["chat_template"] is None and (beside_it := folder / "chat_template.jinja").is_file():
        found["chat_template"] = read_text(beside_it)
    for name, value in found.items():
        if value is not None:
            check(name, value, TEXT, beside)
    return Tokenizer(core=core, eos=found["eos_token"], bos=found["bos_token"], template=found["chat_template"])


def _content(token: Any) -> Any:
    """A token in tokenizer_config.json is text, or a table that holds the text."""
    return token.get("content", token) if isinstance(token, dict) else token


def _default(template: Any) -> Any:
    """A template is text, or one of a list of tables: {"name": "default", "template": text}."""
    tables = [t for t in template if isinstance(t, dict)] if isinstance(template, list) else []
    return next((t.get("template") for t in tables if t.get("name") == "default"), template)


def _pair(merge: str) -> tuple[str, str]:
    parts = merge.split(" ")
    if len(parts) != 2 or not all(parts):
        raise ValueError(f"the merge {reprlib.repr(merge)} must be two tokens with a space between them")
    return parts[0], parts[1]
