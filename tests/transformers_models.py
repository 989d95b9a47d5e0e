"""Small models of every family, as transformers configures them; and records of what transformers makes of them and of
Gemma 3 270M.

`python tests/transformers_models.py GGUF_FILE` writes the records, with torch and transformers and without JAX; the
file is what `xsake model fetch gemma3-270m` fetches. A test then needs neither: the small models' weights follow from
their names.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

RECORD = Path(__file__).with_name("transformers_logits.json")
GEMMA_RECORD = Path(__file__).with_name("transformers_gemma3.json")
SHAPE: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
    attn_implementation="eager",
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
GEMMA3: dict[str, Any] = dict(
    head_dim=32,
    sliding_window=24,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    query_pre_attn_scalar=24,
)
GEMMA3_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# A name: the family, what it sets besides SHAPE.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", dict(tie_word_embeddings=True)),
    "Llama 3, scaled positions": ("Llama", dict(rope_parameters=LLAMA3)),
    "Mistral, window of 24": ("Mistral", dict(sliding_window=24)),
    "Mistral, no window, own head size": ("Mistral", dict(sliding_window=None, head_dim=24)),
    "Qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "Qwen2, windows from layer 1 on": ("Qwen2", dict(use_sliding_window=True, sliding_window=24, max_window_layers=1)),
    "Qwen2, YaRN": ("Qwen2", dict(rope_parameters=YARN, max_position_embeddings=64)),
    "Qwen3, own head size": ("Qwen3", dict(head_dim=32)),
    "SmolLM3": ("SmolLM3", dict(no_rope_layer_interval=2, pad_token_id=0)),
    "Phi-3, window of 24": ("Phi3", dict(sliding_window=24, pad_token_id=0)),
    "Gemma 3": ("Gemma3Text", GEMMA3),
    "Gemma 3, linear scaling": ("Gemma3Text", GEMMA3 | dict(rope_parameters=GEMMA3_LINEAR)),
}
RECORDED = ("Qwen2, YaRN", "SmolLM3", "Phi-3, window of 24", "Gemma 3", "Gemma 3, linear scaling")
LENGTH, NEW, PLACES = 100, 6, (10, 50, 99)
TOKENS = np.random.default_rng(0).integers(SHAPE["vocab_size"], size=(2, LENGTH))


def weight(name: str, shape: tuple[int, ...], scales_begin_at: float) -> np.ndarray:
    """A weight that follows from its name; scales of norms are about the number at which they begin."""
    drawn = 0.2 * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    return drawn + np.float32(scales_begin_at) if name.endswith("norm.weight") else drawn


def make(family: str, options: dict[str, Any]) -> Any:
    """The model of transformers."""
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(**SHAPE | options)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            begin = scales_begin_at(config.model_type)
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape), begin)))
    return model


def scales_begin_at(model_type: str) -> float:
    return 0.0 if model_type == "gemma3_text" else 1.0


def record() -> None:
    """Write what transformers says of the recorded models."""
    import torch
    import transformers

    cases = {}
    for name in RECORDED:
        model = make(*MODELS[name])
        tokens = torch.tensor(TOKENS)
        with torch.no_grad():
            logits = model(tokens).logits[:, PLACES].numpy()
            options = dict(attention_mask=torch.ones_like(tokens), do_sample=False, eos_token_id=None, pad_token_id=0)
            continued = model.generate(tokens, max_new_tokens=NEW, **options)[:, LENGTH:]
        cases[name] = {
            "config": json.loads(model.config.to_json_string()),
            "tensors": {name: list(x.shape) for name, x in model.named_parameters()},
            "logits": [[[round(float(x), 5) for x in place[::8]] for place in row] for row in logits],
            "largest": round(float(np.abs(logits).max()), 5),
            "continued": continued.tolist(),
        }
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    RECORD.write_text(json.dumps({"versions": versions, "cases": cases}) + "\n")


TEXTS = (
    "The capital of France is",
    "  two spaces, a tab\tand a\nnew line \n\n",
    "Zwölf Boxkämpfer jagen Viktor; 東京 🙂 x²",
    "def f(x):\n    return x ** 2  # 12345\n",
    "<table><tr>don't I'LL we've</tr>\n\n\n   three",
    "",
)


def gemma_tokens(numbers: int) -> np.ndarray:
    """More tokens than a window has, with repeats that distant attention finds."""
    return np.tile(np.random.default_rng(0).integers(1000, numbers, size=250), 3)[None]


def record_gemma(path: Path) -> None:
    """Write what transformers says of Gemma 3 270M."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = dict(gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(path.parent, **where, dtype=torch.float32, attn_implementation="eager")
    first = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    with torch.no_grad():
        logits = model.eval()(torch.tensor(gemma_tokens(model.config.vocab_size))).logits[0].numpy()
        written = model.generate(first, max_new_tokens=NEW, do_sample=False)[0, first.shape[1] :]
    found = {
        "texts": {text: tokenizer(text)["input_ids"] for text in TEXTS},
        "continued": written.tolist(),
        "likeliest": logits.argmax(-1)[::50].tolist(),
        "logits": [[round(float(x), 4) for x in row[::8192]] for row in logits[::50]],
    }
    GEMMA_RECORD.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    record()
    record_gemma(Path(sys.argv[1]))
