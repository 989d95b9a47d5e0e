"""`xsake plan`: its arithmetic against cases computed by hand, its data against the records, its command."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from benchmarks import plan_rates, record
from benchmarks.report import plan as plan_report
from xsake._cli import app
from xsake._plan.attention import TILE, attention_time, blocks_per_row, forward_flops
from xsake._plan.devices import DEVICES, Links, override_links
from xsake._plan.exchanges import backward_bytes, exchange_traffic, forward_bytes, heads_per_piece, kv_bytes, pieces
from xsake._plan.groups import Group, all_reduce_seconds, collective_seconds, exchange_seconds, hop_seconds
from xsake._plan.memory import block_bytes_per_token, exchange_bytes, training_memory
from xsake._plan.meshes import Mesh, every_mesh
from xsake._plan.models import MODELS, block_weights, matmul_weights
from xsake._plan.plan import make_plan
from xsake._plan.question import Question
from xsake._plan.rates import (
    BOTH,
    FILE,
    FORWARD,
    Point,
    attention_rate,
    choice_seconds,
    shipped_points,
    shipped_prompts,
)
from xsake.autotune.workloads import WORKLOADS
from xsake.model.network.config import PRESETS, ModelConfig
from xsake.model.network.transformer import Transformer

GB = 1e9
PLAIN = Links(domain=4, inside=100.0, hop=50.0, outside=10.0, reach=1.0, latency=0.0)
NODE = Group(size=4, per_domain=4, crosses=False)
TWO_NODES = Group(size=8, per_domain=4, crosses=True)
CASE = Question(config=MODELS["llama-8b"], device=DEVICES["h200"], devices=16, tokens=131072, density=0.1)


# The data.


def test_rates_are_what_the_records_say():
    assert FILE.read_text() == plan_rates.made(), "run: python -m benchmarks.plan_rates"


def test_recorded_runs_come_out_near():
    for run, predicted in [*plan_report.checks(), *plan_report.prompt_checks()]:
        assert 0.9 < predicted / run.seconds < 1.1, run


def test_choosing_blocks_takes_a_share_of_the_heads_and_rows():
    asked = dataclasses.replace(CASE, prefill=True, batch=1, devices=8)
    mesh = Mesh(1, 2, 4)
    (without,), (chosen,) = (
        make_plan(dataclasses.replace(asked, hads=hads), mesh).predictions[:1] for hads in (False, True)
    )
    whole = choice_seconds(shipped_prompts(), device="NVIDIA H200", tokens=asked.tokens, q_heads=32)
    assert math.isclose(chosen.choice, 32 * whole / 8) and without.choice == 0
    assert math.isclose(chosen.seconds, without.seconds + chosen.choice)
    assert math.isclose(sum(chosen.shares.values()), 1)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-1b", 1.236), ("llama-8b", 8.030), ("llama-70b", 70.554), ("qwen2.5-1.5b", 1.544), ("qwen2.5-7b", 7.615)],
)
def test_published_sizes(name, billions):
    assert MODELS[name].param_count() / GB == pytest.approx(billions, abs=5e-4)


# Throughputs.


AT = dict(device="d", direction=FORWARD, head_dim=64, block=128)


def points(*pairs):
    call = dict(record="r", call="c", keys=4096, **AT)
    return [Point(blocks_per_row=blocks, tflops=rate, **call) for blocks, rate in pairs]


@pytest.mark.parametrize(
    ("blocks", "tflops", "said"),
    [
        (4.0, 200.0, "between"),
        (8.0, 250.0, "between"),  # half way between 4 and 16 in logarithm
        (16.0, 300.0, "beyond"),
        (500.0, 500 / (16 / 300 + 484 * (16 / 300 - 4 / 200) / 12), "the record's 16.0 or beyond"),
        (1.0, 50.0, "below the record's 2.0"),
    ],
)
def test_interpolation(blocks, tflops, said):
    curve = points((4.0, 200.0), (16.0, 300.0), (2.0, 100.0))
    found = attention_rate(curve, keys=10, blocks_per_row=blocks, **AT)
    assert found.tflops == pytest.approx(tflops) and said in found.source


@pytest.mark.parametrize("pairs", [[(4.0, 200.0)], [(4.0, 200.0), (4.1, 300.0)]])
def test_longer_rows_than_are_recorded_without_a_time_per_block(pairs):
    assert attention_rate(points(*pairs), keys=10, blocks_per_row=500.0, **AT).tflops == pairs[-1][1]


def test_the_nearest_call_is_taken():
    at = dict(device="NVIDIA H200", direction=BOTH, block=128)
    for keys, head_dim, blocks, call in (
        (1 << 20, 128, 400.0, "gpu_peers_llama32k.json, llama32k"),
        (16384, 128, 20.0, "gpu_peers_full16k.json, full16k"),
        (16384, 128, 10.0, "gpu_attention.json and gpu_peers_full16k.json, full16k"),
        (16384, 128, 3.0, "gpu_peers_gpt4k.json, gpt4k"),  # the others have no such short rows
        (2048, 128, 10.0, "gpu_peers_gpt4k.json, gpt4k"),
        (1 << 20, 64, 400.0, "gpu_peers_gpt4k_d64.json, gpt4k_d64"),
        (4096, 32, 1.0, "gpu_peers_gpt4k_d64.json, gpt4k_d64"),
    ):
        found = attention_rate(shipped_points(), keys=keys, head_dim=head_dim, blocks_per_row=blocks, **at)
        assert found.source.startswith(f"{call}, ")


def test_operations_as_the_benchmarks_count_them():
    w = WORKLOADS["llama32k"]
    ours = forward_flops(tokens=w.length, block=w.block, density=1.0, q_heads=w.q_heads, head_dim=w.head_dim)
    assert ours * w.batch == w.flops()


@pytest.mark.parametrize("blocks", [(128, 128), (128, 16), (16, 64)])
def test_operations_of_causal_blocks_of_any_shape(blocks):
    """Those of the elements below the diagonal, and half of those on it."""
    w = dataclasses.replace(WORKLOADS["cpu4k"], length=512, block=blocks[0], block_kv=blocks[1])
    mask = w.mask(0.5)
    seen = np.tril(np.ones((512, 512)), -1) + np.eye(512) / 2
    listed = np.asarray(mask.to_blocks())[0].repeat(blocks[0], 1).repeat(blocks[1], 2)
    assert w.flops(mask) == pytest.approx(4 * w.head_dim * w.batch * (listed * seen).sum())


def test_the_hops_of_a_ring_are_predicted_as_they_were_recorded():
    """All shards and hops on one device, one after another: to a fifth. The sums are fused there, and counted here."""
    w, device = WORKLOADS["llama32k"], DEVICES["h200"]
    size = dict(q_heads=w.q_heads, kv_heads=w.kv_heads, head_dim=w.head_dim, block=w.block, q_heads_per_call=w.q_heads)
    for recorded in record.load("gpu_hops")["results"]:
        n, density = recorded["shards"], float(w.mask(recorded["density"]).density())
        active = blocks_per_row(w.length, w.block, density)
        flops = forward_flops(tokens=w.length, block=w.block, density=density, q_heads=w.q_heads, head_dim=w.head_dim)
        at = dict(flops=flops / n, rows=w.length // n, keys=w.length // n, blocks_per_row=active / n, hops=n)
        shard = attention_time(shipped_points(), device, **size, **at)
        seconds = n * (shard.forward + shard.forward_sums)
        if recorded["direction"] == BOTH:
            seconds += n * (shard.backward + shard.backward_sums)
        assert recorded["seconds"]["hops"]["median"] == pytest.approx(seconds, rel=0.2)


def test_few_tiles_leave_cores_idle():
    device = DEVICES["h200"]
    at = dict(flops=1e12, q_heads=1, kv_heads=1, head_dim=128, block=128, keys=16384, blocks_per_row=10.0)
    tiles = 2 * device.cores
    full = attention_time(shipped_points(), device, rows=TILE * tiles, q_heads_per_call=1, **at)
    quarter = attention_time(shipped_points(), device, rows=TILE * device.cores // 4, q_heads_per_call=1, **at)
    assert quarter.forward == pytest.approx(4 * full.forward)
    ring = attention_time(shipped_points(), device, rows=TILE * tiles, q_heads_per_call=1, hops=3, **at)
    assert ring.forward_sums == pytest.approx(2 * 10 * TILE * tiles * 128 / 4.8e12)
    assert ring.backward_sums == pytest.approx(3 * ring.forward_sums)


# Links.


def test_groups_of_a_mesh():
    mesh = Mesh(data=2, model=2, sequence=4)
    assert mesh.model_group(8) == Group(size=2, per_domain=2, crosses=False)
    assert mesh.sequence_group(8) == Group(size=4, per_domain=4, crosses=False)
    assert mesh.data_group(8) == Group(size=2, per_domain=1, crosses=True)
    assert mesh.weights_group(8) == Group(size=8, per_domain=4, crosses=True)
    assert mesh.sequence_group(4) == Group(size=4, per_domain=2, crosses=True)
    assert not Mesh(1, 1, 6).sequence_group(8).crosses and Mesh(2, 1, 6).sequence_group(8).crosses


def test_seconds_of_transfers():
    assert collective_seconds(100 * GB, NODE, PLAIN) == 1
    assert collective_seconds(40 * GB, TWO_NODES, PLAIN) == 1  # four adapters of 10
    assert all_reduce_seconds(100 * GB, NODE, PLAIN) == pytest.approx(1.5)
    assert hop_seconds(50 * GB, NODE, PLAIN) == 1 and hop_seconds(10 * GB, TWO_NODES, PLAIN) == 1
    assert exchange_seconds(100 * GB, NODE, PLAIN) == 1
    assert exchange_seconds(70 * GB, TWO_NODES, PLAIN) == pytest.approx(4)  # four sevenths through one adapter
    slow = dataclasses.replace(PLAIN, reach=0.5, latency=1e6)
    assert collective_seconds(100 * GB, NODE, slow) == 3
    assert collective_seconds(100 * GB, Group(size=1, per_domain=1, crosses=False), slow) == 0


# Exchanges.


def test_bytes_of_exchanges():
    kv = kv_bytes(tokens=1024, kv_heads=2, head_dim=64)
    assert kv == 2 * 1024 * 2 * 64 * 2 == 524288
    assert forward_bytes("gather", kv, 4) == forward_bytes("ring", kv, 4) == 3 * 131072
    assert backward_bytes("gather", kv, 4) == 2 * 3 * 131072  # K and V, dK and dV
    assert backward_bytes("ring", kv, 4) == 3 * 131072 + 4 * 2 * 131072  # dK and dV: four hops of float32
    assert forward_bytes("sparse", kv, 4, union=0.5) == 1.5 * 131072
    assert backward_bytes("sparse", kv, 4, union=0.5) == 2 * 1.5 * 131072
    assert forward_bytes("none", kv, 1) == backward_bytes("none", kv, 1) == 0


def test_a_gathered_piece_is_about_as_large_as_the_local_shard():
    assert (heads_per_piece(8, 2), pieces(8, 2)) == (4, 2)
    assert (heads_per_piece(8, 3), pieces(8, 3)) == (2, 4)
    assert (heads_per_piece(2, 8), pieces(2, 8)) == (1, 2)
    for kv_heads, n in ((8, 2), (8, 4), (8, 8)):
        assert kv_bytes(4096, heads_per_piece(kv_heads, n), 64) == kv_bytes(4096 // n, kv_heads, 64)


def traffic(exchange, *, overlap=1.0, **options):
    options |= dict(kv=400 * GB, kv_heads=8, group=NODE, links=PLAIN, union=0.5)
    return exchange_traffic(exchange, overlap=overlap, **options)


def test_hidden_and_exposed_by_hand():
    # ring forward: three hops of 100 GB at 50 GB/s, each beside a quarter of the attention.
    assert traffic("ring", backward=False, attention=100.0).exposed == 0
    ring = traffic("ring", backward=False, attention=4.0)
    assert (ring.bytes, ring.seconds, ring.hidden) == (300 * GB, 6, 3)
    # ring backward: three hops of 2 + 4 seconds, and a last one of 4 that nothing hides.
    ring = traffic("ring", backward=True, attention=1000.0)
    assert (ring.bytes, ring.seconds, ring.exposed) == (1100 * GB, 22, 4)
    # gather forward: four pieces of 75 GB at 100 GB/s, all but the first beside a quarter of the attention.
    gather = traffic("gather", backward=False, attention=1000.0)
    assert (gather.seconds, gather.exposed) == (3, 0.75)
    assert traffic("gather", backward=False, attention=1000.0, overlap=0.5).exposed == 0.75 + 2.25 / 2
    assert traffic("gather", backward=True, attention=1000.0).exposed == 1.5
    assert traffic("sparse", backward=False, attention=1000.0).seconds == 1.5
    assert traffic("none", backward=True, attention=1.0).seconds == 0


# Memory.


def test_memory_by_hand():
    config, mesh = PRESETS["tiny"], Mesh(data=2, model=2, sequence=2)
    parameters = config.param_count()
    question = dataclasses.replace(CASE, config=config, tokens=1024, density=1.0, batch=2, union=1.0)
    memory = training_memory(question, mesh, "gather", remat=False)
    assert (memory["weights"], memory["optimiser"]) == (4 * parameters / 8, 8 * parameters / 8)
    assert memory["gradients"] == 4 * parameters / 8
    assert memory["logits"] == 8 * 512 * config.vocab_size / 2
    assert memory["activations"] == 2 * 512 * block_bytes_per_token(config, 2)
    more = training_memory(dataclasses.replace(question, batch=4, fsdp="data"), mesh, "gather", remat=True)
    assert (more["weights"], more["gradients"]) == (4 * parameters / 4, 2 * 4 * parameters / 4)
    assert more["activations"] == 512 * (2 * 2 * config.width + block_bytes_per_token(config, 2))
    piece, local = 2 * 1024 * 1 * 16 * 2, 2 * 512 * 1 * 16 * 2  # one KV head per device
    assert exchange_bytes(question, mesh, "gather", backward=False) == 2 * piece
    assert exchange_bytes(question, mesh, "gather", backward=True) == 4 * piece
    assert exchange_bytes(question, mesh, "ring", backward=True) == 5 * local + 4 * 512 * 2 * 16


def test_kept_activations_are_what_jax_keeps():
    length = 384
    config = ModelConfig(
        vocab_size=64, layers=1, width=48, q_heads=4, kv_heads=2, head_dim=16, mlp_width=80, context=length
    )

    def kept(layers, remat):
        made = dataclasses.replace(config, layers=layers)
        graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(made, rngs=nnx.Rngs(0))))

        def backward(state, tokens):
            return jax.vjp(lambda s: nnx.merge(graph, s).hidden(tokens, remat=remat), state)[1]

        saved = jax.tree.leaves(jax.eval_shape(backward, state, jax.ShapeDtypeStruct((1, length), jnp.int32)))
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in saved if length in x.shape)

    assert kept(2, False) - kept(1, False) == length * block_bytes_per_token(config)
    assert kept(2, True) - kept(1, True) == length * 2 * config.width


def test_weights_of_a_model():
    config = MODELS["llama-8b"]
    assert block_weights(config) == 2 * 4096 * 128 * 40 + 3 * 4096 * 14336
    assert matmul_weights(config) == 32 * block_weights(config) + 128256 * 4096


# Plans.


def test_meshes():
    found = list(every_mesh(64))
    assert len(found) == len(set(found)) == 28 and all(mesh.devices == 64 for mesh in found)


def seconds(question, mesh=None):
    return {(p.exchange, p.mesh): p.seconds for p in make_plan(question, mesh).predictions}


@pytest.mark.parametrize("prefill", [False, True])
def test_more_work_takes_longer_and_better_links_do_not(prefill):
    question = dataclasses.replace(CASE, prefill=prefill, remat=False)
    plain = seconds(question)
    links = override_links(question.device.links, ["inside=100", "outside=10"])
    worse = dict(density=0.2, tokens=2 * question.tokens, batch=16, overlap=0.5, imbalance=1.5, mfu=0.2)
    worse["device"] = dataclasses.replace(question.device, links=links)
    for name, value in worse.items():
        changed = seconds(dataclasses.replace(question, **{name: value}))
        assert all(changed[key] >= plain[key] for key in plain), name
        assert sum(changed[key] for key in plain) > sum(plain.values())


def test_a_plan_has_every_exchange_and_names_the_fastest_that_fits():
    plan = make_plan(CASE)
    assert {p.exchange for p in plan.predictions} == {"none", "gather", "ring", "sparse"}
    assert all((p.exchange == "none") == (p.mesh.sequence == 1) for p in plan.predictions)
    fitting = [p.seconds for p in plan.predictions if p.fits and p.exchange != "sparse"]
    assert plan.best.seconds == min(fitting) and plan.best.fits
    for p in plan.predictions:
        assert p.seconds == pytest.approx(p.attention + p.matmuls + p.exposed) and p.hidden >= 0
    assert all("does not divide" in reason or "zigzag" in reason for reason in plan.refused.values())


def test_more_devices_need_less_memory():
    few, many = (make_plan(dataclasses.replace(CASE, devices=n), Mesh(1, 1, n)) for n in (16, 32))
    assert many.best_of("ring").total_memory < few.best_of("ring").total_memory


def test_remat_is_chosen_where_activations_do_not_fit():
    small = dataclasses.replace(CASE, config=MODELS["smollm2-135m"], tokens=4096, density=1.0, devices=1)
    assert not make_plan(small).best.remat
    assert make_plan(dataclasses.replace(CASE, devices=8)).best.remat
    assert make_plan(dataclasses.replace(small, remat=True)).best.remat


@pytest.mark.parametrize("device", list(DEVICES))
def test_every_device_can_be_planned(device):
    plan = make_plan(dataclasses.replace(CASE, device=DEVICES[device], devices=64))
    assert plan.best is not None and plan.rest.tflops < DEVICES[device].peak / 1e12


# The command.


ASKED = ("--tokens", "131072", "--devices", "8", "--model", "smollm2-135m", "--density", "0.1")


def run(*options, asked=ASKED, columns=220):
    return CliRunner().invoke(app, ["plan", *asked, *options], env={"COLUMNS": str(columns), "NO_COLOR": "1"})


def test_command(tmp_path):
    result = run("--json", str(tmp_path / "plan.json"), "--link", "outside=25")
    assert result.exit_code == 0, result.output
    for said in (
        "Predicted, not measured",
        "sparse is a what-if: 60%",
        "Best: ",
        "InfiniBand 25 beyond",
        "time goes to",
    ):
        assert said in result.output
    assert "gather" in result.output and "ring" in result.output
    values = json.loads((tmp_path / "plan.json").read_text())
    assert values["question"]["device"]["links"]["outside"] == 25
    assert values["best"]["mesh"] in result.output and len(values["predictions"]) > 4
    assert "gpu_peers_gpt4k_d64.json" in " ".join(values["assumptions"])


@pytest.mark.parametrize("asked", [ASKED, ("--tokens", "1048576", "--devices", "1024", "--model", "llama-8b")])
def test_the_tables_are_whole_in_80_columns(asked):
    said = run(asked=asked, columns=80).output
    assert "…" not in said and max(map(len, said.splitlines())) <= 80
    rows = [line.split() for line in said.splitlines() if line.endswith((" yes ", " no "))]
    best = said.split("Best: ")[1].split(",")[0].split(" on ")  # exchange and mesh
    assert len(rows) > 8 and best in [row[:2] for row in rows] and all(len(row) == 11 for row in rows)


def test_command_with_a_file_and_one_mesh(tmp_path):
    file = tmp_path / "model.json"
    file.write_text(json.dumps(dataclasses.asdict(MODELS["qwen2.5-1.5b"])))
    asked = ("--tokens", "131072", "--devices", "8", "--model", str(file))
    result = run("--mesh", "2x1x4", "--prefill", asked=asked)
    assert result.exit_code == 0 and "1.54B" in result.output and "2x1x4" in result.output
    file.write_text('{"layers": 2}')
    result = run(asked=asked)
    assert result.exit_code == 1 and "missing=['vocab_size'" in result.output


def test_help_lists_what_there_is():
    said = "".join(run("--help").output.replace("│", " ").split())
    assert all(name in said for name in (*DEVICES, *MODELS, *(f.name for f in dataclasses.fields(Links))))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hads"], "for a prefill (--prefill)"),
        (["--hads", "--prefill", "--device", "tpu-v5e"], "recorded is NVIDIA H200"),
        (["--model", "llama"], "known are tiny"),
        (["--device", "b200"], "known are h200"),
        (["--tokens", "1000"], "multiple of block=128"),
        (["--density", "0.0001"], "the diagonal alone"),
        (["--density", "2"], "density=2.0 must be"),
        (["--block", "32"], "blocks of 64 and 128"),
        (["--devices", "7"], "no mesh of 7 devices"),
        (["--mesh", "2x2"], "three numbers"),
        (["--mesh", "2x2x1"], "has 4 devices"),
        (["--link", "fast=1"], "NAME is one of domain"),
        (["--link", "reach=2"], "at most 1"),
        (["--link", "domain=1.5"], "positive whole number"),
        (["--fsdp", "some"], "one of all, data, none"),
        (["--remat", "maybe"], "auto, yes or no"),
        (["--overlap", "1.5"], "at least 0 and at most 1"),
        (["--json", "nowhere/plan.json"], "no folder 'nowhere'"),
    ],
)
def test_wrong_options(options, said):
    result = run(*options)
    assert result.exit_code == 1 and said in result.output, result.output
