"""A byte-level BPE tokenizer, trained on your own text: any text round-trips, and there is no unknown token."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from xsake._ground.kinds import LARGEST_INT
from xsake.model.text.tokenizer_file import read_tokenizer

END_OF_TEXT = "<|endoftext|>"
LEAST_VOCAB = 257  # every byte, and the end of a text


def check_vocab_size(vocab_size: int) -> None:
    if not LEAST_VOCAB <= vocab_size <= LARGEST_INT:
        raise ValueError(
            f"{vocab_size=} must be at least {LEAST_VOCAB} (every byte, and {END_OF_TEXT}) and at most {LARGEST_INT}"
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE as in GPT-2. The vocabulary may come out smaller than asked for, if the text is small."""
    check_vocab_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a file of the `tokenizers` library; its vocabulary must hold END_OF_TEXT."""
    tokenizer = read_tokenizer(path)
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ValueError(f"the tokenizer {path} has no token {END_OF_TEXT}, which ends a text in the token files")
    return tokenizer


def fingerprint(tokenizer: Tokenizer) -> str:
    """The hash that token files carry, so that files of different tokenizers are never mixed."""
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]
