"""The dashboard's documents: benchmarks, studies, databases, metrics and pages; and what they are made from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dashboard_server import append, documents, serving, write_run
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from xsake import tuning_db
from xsake._cli import app
from xsake.dashboard.read import coding, stored
from xsake.dashboard.read.benchmark_catalogue import catalogue
from xsake.dashboard.serve import command
from xsake.dashboard.serve.command import default_records, gather
from xsake.dashboard.show import benchmark_documents
from xsake.dashboard.show.tuning_documents import Tuning

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PROMETHEUS = ROOT / "dashboard" / "prometheus"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    file = write_run(folder / "a", 5)
    append(file, json.dumps({"event": "density", "step": 5, "layers": [[0.2, 0.4], [0.5, 0.5]]}) + "\n")
    with serving(documents(folder, RESULTS)) as client:
        client.get("/api/runs")
        yield client


def test_every_record_is_shown(client):
    listed = client.get("/api/benchmarks").json()["benchmarks"]
    shown = {one["id"] for one in listed if one["state"] == "recorded"}
    files = {path.stem for path in RESULTS.glob("*.json")}
    files |= {f"hads-{path.stem.removeprefix('summary-')}" for path in RESULTS.glob("hads/*.json")}
    assert all(name.startswith("hads-profile-") for name in files - shown)  # profiles, not measurements
    for one in listed:
        found = client.get(f"/api/benchmarks/{one['id']}").json()
        assert found["state"] == "recorded" and found["environment"]["commit"] == one["commit"]
        plotted = not one["id"].startswith(
            ("hads-union", "hads-shards", "hads-chunks", "hads-last-rows", "hads-probes")  # tables
        )
        assert found["tables"] and not (plotted and any("cannot be plotted" in note for note in found["notes"]))
        for table in found["tables"]:
            assert all(len(row) == len(table["columns"]) for row in table["rows"]) and not table["left_out"]
        for plot in found["plots"]:
            assert plot["series"] and len({one["name"] for one in plot["series"]}) == len(plot["series"]) <= 6


def test_numbers_are_those_of_the_record(client):
    record = json.loads((RESULTS / "gpu_attention.json").read_text())
    found = client.get("/api/benchmarks/gpu_attention").json()
    (plot,) = [plot for plot in found["plots"] if plot["title"] == "16384 tokens, 16 heads of 128, not causal, forward"]
    (ours,) = [one for one in plot["series"] if one["name"] == "XSAKE"]
    rows = [
        row
        for row in record["results"]
        if (row["workload"], row["direction"], row["implementation"]) == ("full16k", "forward", "xsake")
    ]
    assert ours["role"] == "ours" and len(ours["points"]) == len(rows) > 3
    for row in rows:
        (point,) = [point for point in ours["points"] if point["x"] == row["density"]]
        assert [point[k] for k in ("y", "low", "high")] == [row["seconds"][k] for k in ("median", "low", "high")]
    (table,) = found["tables"]
    assert len(table["rows"]) == len(record["results"]) and found["device"] == "NVIDIA H200"


def test_what_was_not_recorded_is_not_run(tmp_path):
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "benchmarks" / "README.md", tmp_path)
    listed = benchmark_documents.overview(tmp_path / "results")["benchmarks"]
    assert {one["state"] for one in listed} == {"not_run"}
    names = {re.sub(r"(?<=peers|ruler|locks)_.*|-.*", "", one.id) for one in catalogue(RESULTS)}
    assert names <= {one["id"] for one in listed}
    one = benchmark_documents.benchmark(tmp_path / "results", "gpu_attention")
    assert one["tables"] == [] and one["command"] == "python -m benchmarks.gpu.attention --record"
    assert benchmark_documents.overview(None) == {"benchmarks": []}


def test_studies_are_read_and_not_written(tmp_path):
    optuna = pytest.importorskip("optuna")
    from xsake.autotune.search.storage import open_storage

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = tmp_path / "studies.journal"
    name = "cpu | attention forward on xla: float32, 4096 tokens | kernel 12 | space 34"
    study = optuna.create_study(storage=open_storage(path), study_name=name)
    for value, end, reason in (
        (1.0, "complete", None),
        (0.8, "complete", None),
        (None, "failed", "out of <b>memory</b>"),
    ):
        trial = study.ask()
        trial.set_user_attr("part", {"chunk": trial.number + 1})
        trial.set_user_attr("end", end)
        if reason:
            trial.set_user_attr("reason", reason)
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            trial.report(value, 0)
            study.tell(trial, value)
    study.ask()
    append(path, '{"op_code": 5, "worker_id"')  # somebody is writing
    before = sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir())
    tuning = Tuning([path, tmp_path / "none.journal"], {"shipped": tuning_db.SHIPPED})
    overview = tuning.overview()
    (one,) = overview["studies"]
    assert (one["trials"], one["complete"], one["failed"], one["running"]) == (4, 2, 1, 1)
    assert one["best"] == 0.8 and one["best_config"] == {"chunk": 2} and one["direction"] == "forward"
    whole = tuning.study(one["id"])
    assert whole["best_so_far"] == [[0, 1.0], [1, 0.8]]
    assert whole["trials_list"][2]["reason"] == "out of <b>memory</b>" and whole["trials_list"][0]["is_default"]
    assert sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir()) == before
    found = Tuning([], {}, search=[tmp_path])
    assert [study["id"] for study in found.overview()["studies"]] == [one["id"]]
    shutil.copy(path, tmp_path / "later.journal")  # it appeared meanwhile
    assert len(found.overview()["studies"]) == 2
    path.write_text("no journal\n")
    assert "line 1 is no record" in tuning.overview()["skipped"][0]["reason"]

    two = optuna.create_study(storage=open_storage(path.with_name("two.journal")), directions=["minimize", "minimize"])
    two.tell(two.ask(), [1.0, 2.0])
    overview = found.overview()  # one study that cannot be shown, and another
    assert [one["storage"] for one in overview["studies"]] == ["later.journal"]
    assert "two.journal: no-name" in overview["skipped"][1]["path"]

    database = tuning.database("shipped-cpu")
    stored_entries = tuning_db.Database.read(tuning_db.SHIPPED / "cpu.json").entries
    assert len(database["rows"]) == len(stored_entries) == database["entries"]
    row, entry = database["rows"][0], stored_entries[0]
    assert row["speedup"] == entry.about["speedup"]
    assert row["measured"][0]["tuned"]["median"] == pytest.approx(entry.about["measured"][0]["tuned"]["median"] / 1e6)


def test_metrics_are_prometheus_text(client):
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    (loss,) = families["xsake_run_loss_nats"].samples
    assert loss.labels == {"run": "a"} and loss.value == pytest.approx(4.95)
    assert families["xsake_run_steps"].type == "counter" and families["xsake_run_steps"].samples[0].value == 5
    assert families["xsake_run_tokens"].samples[0].name == "xsake_run_tokens_total"
    density = {sample.labels["layer"]: sample.value for sample in families["xsake_run_layer_density_ratio"].samples}
    assert density == {"0": pytest.approx(0.3), "1": pytest.approx(0.5)}
    assert sum(sample.value for sample in families["xsake_run_status"].samples) == 1
    for name, family in families.items():
        if name.startswith("xsake_"):
            assert family.documentation and not name.endswith("_total")


def test_prometheus_examples_name_metrics_that_exist(client):
    there = {
        sample.name
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }
    there |= {"xsake_run_held_out_loss_nats", "xsake_run_mfu_ratio"}  # of runs that have them
    text = re.sub(r"#.*", "", (PROMETHEUS / "alerts.yml").read_text())
    named = set(re.findall(r"\bxsake_run_\w+", text))
    assert named and named <= there, named - there


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_accepts_the_examples(client):
    def promtool(*words, **options):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, cwd=PROMETHEUS, **options)
        assert done.returncode == 0, done.stdout + done.stderr

    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")
    promtool("test", "rules", "alerts_test.yml")
    own = [line for line in client.get("/metrics").text.splitlines() if "xsake_" in line]
    promtool("check", "metrics", input="\n".join(own) + "\n")


def test_the_api_documents_itself(client):
    described = client.get("/openapi.json").json()
    assert {"/api/runs", "/api/runs/{run_id}/series", "/api/texts", "/metrics"} <= set(described["paths"])
    for path, operations in described["paths"].items():
        if path.startswith("/api/"):
            assert len(operations["get" if "get" in operations else "post"]["description"]) > 40, path
    page = client.get("/docs")
    assert "http" not in page.text.replace("<!doctype html>", "") and page.status_code == 200
    assert client.get("/docs/swagger-ui-bundle.js").status_code == 200
    assert "SwaggerUIBundle" in client.get("/docs/start.js").text
    health = client.get("/health").json()
    assert health["status"] == "ok" and health["runs"] >= 1


def test_what_is_not_there_is_said(tmp_path):
    with serving(documents(tmp_path), pages=tmp_path / "none") as client:
        site = client.get("/api/site").json()
        assert not any(site["pages"].values()) and site["features"]["live"]
        assert client.get("/").status_code == 503 and "make web" in client.get("/").text
        assert client.get("/api/replays").json() == {"replays": []}
        assert client.get("/api/replays/none").status_code == 404


def test_recordings_and_replays_are_served(tmp_path):
    about = {"id": "x", "title": "t", "environment": {}, "length": 128, "extra": 1}
    (tmp_path / "runs").mkdir()
    (tmp_path / "results").mkdir()
    with serving(documents(tmp_path / "runs", tmp_path / "results")) as client:
        assert client.get("/api/recordings").json() == {"recordings": []}
        stored.write(tmp_path / "results" / "explorer" / "x.json.xz", {"about": about, "layers": [{"layer": 0}]})
        frames = {"dense.0": {"step": 0}}
        stored.write(tmp_path / "results" / "replays" / "y.json.xz", {"about": {"id": "y"}, "frames": frames})
        assert client.get("/api/recordings").json()["recordings"][0]["title"] == "t"
        assert client.get("/api/recordings/x").json() == about
        assert client.get("/api/recordings/x/layers/0").json() == {"layer": 0}
        assert client.get("/api/recordings/x/layers/1").status_code == 404
        assert client.get("/api/replays/y/frames/dense.0").json() == {"step": 0}
        assert client.get("/api/site").json()["pages"]["replay"]


def test_codes():
    rng = np.random.default_rng(0)
    square = np.tril(rng.random((7, 7)) ** 8)
    flat = coding.lower_triangle(square)
    np.testing.assert_array_equal(coding.full_square(flat), square)
    decoded = coding.decode_levels(coding.encode_levels(flat))
    np.testing.assert_allclose(decoded[decoded > 0], flat[decoded > 0], rtol=0.022)
    assert flat[decoded == 0].max(initial=0) < 2**-15.9
    kept = flat > 0.1
    np.testing.assert_array_equal(coding.decode_mask(coding.encode_mask(kept), len(kept)), kept)


def test_the_command_refuses_what_it_cannot_show(tmp_path):
    def xsake(*words):
        result = CliRunner().invoke(app, ["dashboard", *map(str, words)])
        return result.exit_code, " ".join(result.output.split())

    assert xsake(tmp_path / "none") == (
        1,
        f"{tmp_path / 'none'} is neither a folder nor a run file (.jsonl): give folders of runs, or of run folders",
    )
    code, said = xsake(tmp_path, "--records", tmp_path / "none")
    assert code == 1 and "is no folder of records" in said
    code, said = xsake(tmp_path, "--host", "256.1.1.1")
    assert code == 1 and "cannot serve on 256.1.1.1:8321" in said
    (tmp_path / "model.gguf").touch()
    (tmp_path / "damaged.journal").write_text("{\n")
    for words, message in (
        (["--host", ""], "the host is empty: give 127.0.0.1"),
        (["--allow-host", "http://proxy"], "'http://proxy' must be the name of a host alone"),
        (["--allow-host", "proxy:80"], "'proxy:80' must be the name of a host alone"),
        (["--model", "/nope"], "/nope is no file, and no published model"),
        (["--model", tmp_path / "model.gguf"], "has no shipped profile"),
        (["--profile", "/nope"], "/nope is no file: --profile takes"),
        (["--storage", "/nope.journal"], "/nope.journal is no file: --storage takes"),
        (["--storage", "sqlite:////nope.db"], "/nope.db is not there"),
        (["--storage", "nosuch://me:secret@x"], "nosuch://me:***@x: the studies cannot be read"),
        (["--storage", tmp_path / "damaged.journal"], "damaged.journal: line 1 is no record of a journal"),
    ):
        code, said = xsake(tmp_path, *words)
        assert code == 1 and message in said, said
    result = CliRunner().invoke(app, ["showcase", "--storage", "nosuch://x", "--out", str(tmp_path / "site")])
    assert result.exit_code == 1 and not (tmp_path / "site").exists()


def test_the_server_imports_no_jax():
    """It must stay small beside a training run."""
    code = "import sys; from xsake.dashboard.serve import app, command; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_installed_package_finds_the_records_of_the_checkout_that_it_runs_in(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_PACKAGE", tmp_path / "site-packages")
    for folder in (RESULTS.parents[1], RESULTS.parents[1] / "docs"):
        monkeypatch.chdir(folder)
        assert default_records() == RESULTS and command.checkout() == RESULTS.parents[1]
    monkeypatch.chdir(tmp_path)
    assert default_records() is None
    result = CliRunner().invoke(app, ["showcase", "--out", str(tmp_path / "site")])
    assert result.exit_code == 1 and not (tmp_path / "site").exists()
    assert "run this in a checkout of xsake, or give --records FOLDER" in result.output


def test_a_checkout_brings_its_records(tmp_path):
    assert default_records() == RESULTS
    shown = gather([tmp_path], records=RESULTS)
    shown.library.search()
    assert {run.shown_path for run in shown.library.runs} >= {"train_gpu/small-dense-4096.jsonl"}
