"""The places in the engine that xsake takes."""

from __future__ import annotations

from functools import partial
from typing import Any

from sgl_jax.srt.entrypoints import engine
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.managers.tokenizer_manager import TokenizerManager
from sgl_jax.srt.model_executor.model_runner import ModelRunner

from xsake.compat.sglang_jax import forms
from xsake.compat.sglang_jax.backend import XsakeAttention
from xsake.compat.sglang_jax.requests import Request
from xsake.compat.sglang_jax.settings import Settings

_initialize, _run_scheduler = ModelRunner.initialize, engine.run_scheduler_process
_worker_batch, _validate = ScheduleBatch.get_model_worker_batch, TokenizerManager._validate_one_request


def take(settings: Settings) -> None:
    """Take them in this process, and in the scheduler's process that the engine starts from it."""

    def backend(runner: Any) -> XsakeAttention:
        forms.check_arguments(runner, settings)
        return XsakeAttention.of(runner, settings)

    def initialize(runner: Any) -> None:
        _initialize(runner)
        forms.check_model(runner, settings)

    def validate(manager: Any, request: Any, input_ids: list[int]) -> None:
        _validate(manager, request, input_ids)
        settings.budget(getattr(request, "extra_key", None))  # the engine answers a ValueError with its own 400

    ModelRunner._get_attention_backend = backend
    ModelRunner.initialize = initialize
    TokenizerManager._validate_one_request = validate
    ScheduleBatch.get_model_worker_batch = _with_requests
    engine.run_scheduler_process = partial(_scheduler, settings)


def _with_requests(batch: Any, *arguments: Any, **named: Any) -> Any:
    """The engine's batch for its workers, with a note of each request, in the order of the batch."""
    found = _worker_batch(batch, *arguments, **named)
    requests = [request for info in batch.reqs_info for request in info.reqs or ()]
    found.xsake_requests = [
        Request(request.extra_key, len(request.origin_input_ids) + len(request.output_ids)) for request in requests
    ]
    return found


def _scheduler(settings: Settings, *arguments: Any, **named: Any) -> Any:
    take(settings)
    return _run_scheduler(*arguments, **named)
