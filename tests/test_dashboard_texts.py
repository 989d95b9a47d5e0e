"""Texts that users paste: the queue, its limits, progress, failures and cancelling, with a worker that only counts;
and SmolLM2 for real with `make pretrained`.
"""

from __future__ import annotations

import asyncio
import sys
import textwrap
import time

import pytest
from dashboard_server import documents, following, serving

from xsake.dashboard.serve import own_text
from xsake.dashboard.serve.own_text import Texts

COUNTING = textwrap.dedent(
    """
    import json, sys, time
    for line in sys.stdin:
        job = json.loads(line)
        def tell(**answer): print(json.dumps(answer), flush=True)
        if job["text"] == "crash": sys.exit(3)
        if job["text"] == "short": tell(error="use at least 576 tokens")
        else:
            for n in range(3): tell(stage="counting", done=n, of=3)
            while job["text"] == "for ever": time.sleep(0.1)
            tell(recording={"about": {"id": job["id"], "title": job["text"]}, "layers": [{"layer": 0}]})
    """
)


@pytest.fixture
def client(tmp_path, monkeypatch):
    async def start(self):
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(sys.executable, "-c", COUNTING, stdin=pipe, stdout=pipe)
        return self._process

    monkeypatch.setattr(Texts, "_start", start)
    monkeypatch.setattr(Texts, "unavailable", lambda self: None)
    with serving(documents(tmp_path)) as client:
        yield client


def submit(client, text):
    answer = client.post("/api/texts", json={"text": text})
    assert answer.status_code == 202, answer.text
    return answer.json()["id"]


def last_of(client, identity):
    with following(client, f"/api/texts/{identity}/events") as stream:
        while (now := stream.next()["data"])["state"] in ("queued", "running"):
            pass
        return now


def test_a_text_becomes_a_recording(client):
    one, other = submit(client, "first"), submit(client, "second")
    done = last_of(client, other)
    assert done["state"] == "done" and (done["done"], done["of"]) == (3, 3) and done["recording"] == other
    assert client.get(f"/api/texts/{one}").json()["state"] == "done"  # in their order
    assert client.get(f"/api/recordings/{one}").json()["title"] == "first"
    assert client.get(f"/api/recordings/{one}/layers/0").json() == {"layer": 0}
    assert {item["id"] for item in client.get("/api/recordings").json()["recordings"]} == {one, other}


def test_failures_are_told_and_the_next_text_runs(client):
    assert last_of(client, submit(client, "short"))["error"] == "use at least 576 tokens"
    assert "ended with code 3" in last_of(client, submit(client, "crash"))["error"]
    assert last_of(client, submit(client, "after"))["state"] == "done"


def test_the_queue_is_bounded_and_a_text_can_be_cancelled(client):
    running = submit(client, "for ever")
    while client.get(f"/api/texts/{running}").json()["state"] != "running":
        time.sleep(0.02)
    waiting = [submit(client, "waits") for _ in range(own_text.MOST_WAITING)]
    answer = client.post("/api/texts", json={"text": "too many"})
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "busy"
    assert client.get(f"/api/texts/{waiting[-1]}").json()["position"] == own_text.MOST_WAITING
    assert client.delete(f"/api/texts/{waiting[0]}").json()["error"] == "cancelled"
    assert client.delete(f"/api/texts/{running}").json()["state"] == "failed"
    assert last_of(client, waiting[-1])["state"] == "done"
    for _ in range(own_text.MOST_KEPT):
        last_of(client, submit(client, "more"))
    assert client.get(f"/api/texts/{running}").status_code == 404  # only the last ones are kept
    assert len(client.get("/api/recordings").json()["recordings"]) == own_text.MOST_KEPT


def test_without_the_model_the_reason_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XSAKE_CACHE", str(tmp_path / "cache"))
    with serving(documents(tmp_path)) as client:
        features = client.get("/api/site").json()["features"]
        assert not features["own_text"] and "xsake model fetch smollm2" in features["own_text_reason"]
        answer = client.post("/api/texts", json={"text": "x"})
        assert answer.status_code == 503 and answer.json()["error"]["message"] == features["own_text_reason"]
    shown = documents(tmp_path)
    assert "is no file" in Texts(shown, model="none").unavailable()
    (tmp_path / "model.gguf").touch()
    assert "--profile" in Texts(shown, model=str(tmp_path / "model.gguf")).unavailable()


@pytest.mark.pretrained
@pytest.mark.timeout(1800)
def test_smollm2_reads_a_text_that_was_pasted(tmp_path, monkeypatch):
    from pydoc_data.topics import topics

    monkeypatch.delenv("XLA_FLAGS", raising=False)  # the worker compiles as users do, not as the tests do
    with serving(documents(tmp_path)) as client:
        body = {"text": topics["assignment"] * 3, "length": 1024, "budgets": [0.43], "methods": ["hads", "sink_window"]}
        identity = client.post("/api/texts", json=body).json()["id"]
        began = time.monotonic()
        while (now := client.get(f"/api/texts/{identity}").json())["state"] in ("queued", "running"):
            assert time.monotonic() - began < 1500
            time.sleep(1)
        assert now["state"] == "done", now
        about = client.get(f"/api/recordings/{identity}").json()
        kl = {row["method"]: row["kl"] for row in about["results"]}
        assert 0 < kl["hads"] < kl["sink_window"] and about["side"] == 16
        assert len(client.get(f"/api/recordings/{identity}/layers/29").json()["heads"]) == 9
