"""sglang-jax serves on xsake, asked by the client of openai: the tokens of `xsake.model.generate`, dense and with HADS.

The engine pins a JAX and is 1 GB: `make serve-test` runs these in an environment of its own, in under three minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import hads_case as case
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from xsake.model import HadsBudget, ModelConfig, Transformer, generate

pytest.importorskip("sgl_jax", reason="sglang-jax has an environment of its own: make serve-test")
openai = pytest.importorskip("openai", reason="make serve-test")
tokenizers = pytest.importorskip("tokenizers", reason="make serve-test")

from xsake.model.weights.safetensors_file import save_pretrained  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]
CONFIG = ModelConfig(
    vocab_size=512, layers=2, width=128, q_heads=4, kv_heads=2, head_dim=64, mlp_width=256, context=1024, tied=False
)
NEW, BUDGET = 8, 0.6
PROFILE = case.random_profile(head_dim=64)
PROMPTS = [np.random.default_rng(n).integers(1, 511, size=size).tolist() for n, size in enumerate((150, 5, 190, 63))]
LONG = (0, 2)  # prompts with blocks to leave out


@pytest.fixture(scope="module")
def model():
    return Transformer(CONFIG, rngs=nnx.Rngs(7), dtype=jnp.float32)


@pytest.fixture(scope="module")
def dense(model):
    return [generate(model, [prompt], max_new_tokens=NEW)[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def sparse(model, dense):
    """At the budget; prompts too short to leave out a block are dense."""
    budget = HadsBudget(PROFILE, BUDGET, policy="always")
    found = list(dense)
    for n in LONG:
        found[n] = generate(model, [PROMPTS[n]], max_new_tokens=NEW, hads=budget)[0]
        assert found[n] != dense[n]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """The model as files that the engine reads."""
    path = tmp_path_factory.mktemp("model")
    save_pretrained(model, path)
    PROFILE.save(path / "profile.json")
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: n for n, letter in enumerate(sorted(letters))} | {f"<{n}>": n for n in range(256, 512)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1024, "eos_token": "<511>"}
    (path / "tokenizer_config.json").write_text(json.dumps(about))
    return path


class Server:
    def __init__(self, folder, *options):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        # Pages for a third of what its requests may ask for at once. One bucket of tokens, and one of requests: each is
        # a program. With its overlap schedule the engine may change a batch's numbers while a CPU reads them.
        command = f"""
            {sys.executable} -m xsake.compat.sglang_jax --model-path {folder} --port {self.port} --device cpu
            --dtype float32 --context-length 1024 --max-total-tokens 1024 --max-running-requests 4 --page-size 16
            --chunked-prefill-size 512 --precompile-token-paddings 512 --precompile-bs-paddings 4 --disable-precompile
            --skip-server-warmup --disable-overlap-schedule --log-level error --hads-profile {folder}/profile.json
            --hads-policy always"""
        self.log = folder / f"log-{self.port}.txt"
        flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command.split(), *options],
                env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def wait(self):
        end = time.monotonic() + 240
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
                    return self
            except OSError:
                assert self.process.poll() is None and time.monotonic() < end, self.said()
                time.sleep(0.5)

    def said(self):
        return self.log.read_text()[-4000:]

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: the server and what it started
        self.process.wait()

    def ask(self, prompt, hads=None, **options):
        given = dict(max_tokens=NEW, temperature=0, logprobs=1, extra_body={"ignore_eos": True}) | options
        if hads is not None:
            given["extra_body"] = given["extra_body"] | {"extra_key": f"hads={hads}"}
        return self.client.completions.create(model="default", prompt=prompt, **given)

    def tokens(self, prompt, hads=None):
        """The new tokens, and how many of the prompt were in the cache; by the engine's own route, which tells both."""
        asked = {"input_ids": prompt, "sampling_params": dict(max_new_tokens=NEW, temperature=0, ignore_eos=True)}
        if hads is not None:
            asked["extra_key"] = f"hads={hads}"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            found = json.load(answer)
        return found["output_ids"], found["meta_info"]["cached_tokens"]


@pytest.fixture(scope="module")
def started(folder):
    """A server that may not be up yet, and one that shall not come up: both start while tokens are computed here."""
    servers = Server(folder), Server(folder, "--kv-cache-dtype", "bf16")
    yield servers
    for server in servers:
        server.end()


@pytest.fixture(scope="module")
def server(started, dense, sparse):
    return started[0].wait()


def text_of(folder, tokens):
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens)


def test_each_request_alone_and_all_together(server, folder, dense):
    assert [server.tokens(prompt)[0] for prompt in PROMPTS] == dense
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(server.ask, PROMPTS))
    assert [x.choices[0].text for x in found] == [text_of(folder, tokens) for tokens in dense]
    assert [x.usage.prompt_tokens for x in found] == [len(prompt) for prompt in PROMPTS]


def test_a_prefix_is_reused(server, model, dense):
    found, cached = server.tokens(PROMPTS[0])
    assert found == dense[0] and cached == 144
    longer = PROMPTS[0] + PROMPTS[1]
    found, cached = server.tokens(longer)
    assert found == generate(model, [longer], max_new_tokens=NEW)[0] and cached >= 144


def test_hads_by_each_request(server, dense, sparse):
    """At 100% the tokens of dense attention; at a budget those of `generate`, among requests of other budgets."""
    assert [server.tokens(PROMPTS[n], 1)[0] for n in LONG] == [dense[n] for n in LONG]
    assert [server.tokens(PROMPTS[n], BUDGET)[0] for n in LONG] == [sparse[n] for n in LONG]
    asked = [(0, f"{BUDGET};again"), (2, "off"), (2, f"{BUDGET};again"), (1, "off;again")]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda one: server.tokens(PROMPTS[one[0]], one[1])[0], asked))
    assert found == [sparse[0], dense[2], sparse[2], dense[1]]


def test_prefixes_of_another_budget_are_not_reused(server):
    assert server.tokens(PROMPTS[0], 0.9)[1] == 0
    assert server.tokens(PROMPTS[0], 0.9)[1] == 144


@pytest.mark.parametrize("budget", ["0", "1.5", "much", "nan", "0.2;hads=0.3"])
def test_a_wrong_budget_is_a_bad_request(server, budget):
    with pytest.raises(openai.BadRequestError, match=r"hads|budgets"):
        server.ask(PROMPTS[1], budget)


def test_a_prompt_that_is_too_long_is_a_bad_request(server):
    with pytest.raises(openai.BadRequestError, match="longer than the model's context length"):
        server.ask([3] * 1030)


def test_clients_that_leave_and_clients_that_wait(server, folder, dense):
    stream = server.ask(PROMPTS[2], stream=True, max_tokens=500)
    next(iter(stream))
    stream.close()

    def hang_up():
        with pytest.raises(openai.APITimeoutError):
            server.ask(PROMPTS[0], max_tokens=500, timeout=0.3)

    hung_up = threading.Thread(target=hang_up)
    hung_up.start()
    slow = ""
    for part in server.ask(PROMPTS[0], stream=True):
        slow += part.choices[0].text
        time.sleep(0.1)
    hung_up.join()
    assert slow == text_of(folder, dense[0])
    assert [server.tokens(prompt)[0] for prompt in PROMPTS] == dense


def test_more_requests_than_pages(server, model):
    """24 at once, some as long as a third of the pool: all are answered, each with its own tokens."""
    rng = np.random.default_rng(9)
    prompts = [rng.integers(1, 511, size=size).tolist() for size in rng.integers(1, 350, size=24)]
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda prompt: server.tokens(prompt)[0], prompts))
    for n in range(0, 24, 6):
        assert found[n] == generate(model, [prompts[n]], max_new_tokens=NEW)[0]
    assert all(len(tokens) == NEW for tokens in found)


def test_a_server_starts_again(server, folder, dense):
    server.end()
    other = Server(folder, "--hads", str(BUDGET))
    try:
        assert other.wait().tokens(PROMPTS[1], "off")[0] == dense[1]
    finally:
        other.end()


def test_what_xsake_cannot_serve_ends_the_start(started):
    assert started[1].process.wait(240) != 0
    assert "xsake cannot serve this model so: keys and values in bfloat16 (--kv-cache-dtype)" in started[1].said()


@pytest.mark.parametrize("decoding", [False, True])
def test_windows_sinks_soft_caps_and_scales_of_a_layer(decoding):
    """One layer as the engine calls it, on an explicit mesh: tokens of two requests, one of them with a prefix."""
    import ragged_case
    from sgl_jax.srt.layers.radix_attention import RadixAttention
    from sgl_jax.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sgl_jax.srt.model_executor.forward_batch_info import ForwardMode

    from xsake.compat.sglang_jax.backend import XsakeAttention
    from xsake.compat.sglang_jax.settings import Settings

    page, kv_heads, heads, dim = 16, 2, 4, 64
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    rng, sinks = np.random.default_rng(0), np.array([0.5, -1.0, 0.0, 2.0], np.float32)
    lengths = np.array([40, 70, 0, 0], np.int32)
    new = np.array([1, 1, 0, 0] if decoding else [40, 30, 0, 0], np.int32)
    slots = [np.arange(64, 104), np.concatenate([np.arange(256, 320), np.arange(128, 134)])]  # pages 4-6, and 16-19, 8
    keys, values = ([rng.standard_normal((n, kv_heads, dim)).astype(np.float32) for n in lengths[:2]] for _ in "kv")
    asked = sum(new)
    tokens = 4 if decoding else 80
    query = rng.standard_normal((tokens, heads, dim)).astype(np.float32)
    layer = RadixAttention(heads, dim, 0.2, kv_heads, 0, sliding_window_size=20, logit_cap=3.0)

    def padded(parts, fill, size):
        x = np.concatenate(parts)
        return np.concatenate([x, np.full((size - len(x), *x.shape[1:]), fill, x.dtype)])

    def of_pages(own):
        return np.concatenate([np.arange(n // page * page, n // page * page + page) for n in own[::page]])

    runner = types.SimpleNamespace(
        num_attn_heads=heads,
        num_kv_heads=kv_heads,
        mesh=mesh,
        page_size=page,
        model_config=types.SimpleNamespace(context_len=256),
    )
    backend = XsakeAttention.of(runner, Settings())
    with jax.set_mesh(mesh):
        pool = MHATokenToKVPool(512, page, jnp.float32, kv_heads, 128, 1, mesh)  # the engine pads heads
        pool.kv_buffer[0] = pool.set_kv_buffer_legacy(
            0, *(jnp.asarray(np.concatenate(x)) for x in (slots, keys, values))
        )

        def on(x, *spec):
            return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

        ends = [slice(n - asks, n) for n, asks in zip(lengths[:2], new[:2], strict=True)]
        written = [
            on(padded([x[b][ends[b]] for b in (0, 1)], fill, tokens), *spec)
            for x, fill, spec in ((slots, -1, ("data",)), (keys, 0, (None, "tensor")), (values, 0, (None, "tensor")))
        ]
        numbers = {
            "seq_lens": lengths,
            "extend_seq_lens": new,
            "cache_loc": padded([of_pages(x) for x in slots], 0, 512),
        }
        batch = types.SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decoding else ForwardMode.EXTEND,
            out_cache_loc=written[0].astype(jnp.int32),
            **{name: on(x.astype(np.int32), "data") for name, x in numbers.items()},
        )
        out, _ = backend(
            on(query, "data", "tensor"), *written[1:], layer, batch, pool, attention_sink=on(sinks, "tensor")
        )
    given = ragged_case.Batch(
        query=query,
        pages=None,
        cu_seqlens=np.concatenate([[0], np.cumsum(new)]),
        kv_lengths=lengths,
        page_table=None,
        keys=keys,
        values=values,
    )
    wanted = ragged_case.expected(given, scale=0.2, window=(19, 0), sinks=sinks, cap=3.0)[0]
    np.testing.assert_allclose(np.asarray(out).reshape(query.shape)[:asked], wanted[:asked], rtol=2e-5, atol=2e-5)
    assert not np.asarray(out)[asked:].any()
