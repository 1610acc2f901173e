"""Celery's task options that bulltask does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from bulltask.errors import did_you_mean

__all__ = ["CELERY_ONLY_OPTIONS", "hint_for_unknown_option"]

CELERY_ONLY_OPTIONS: Final[Mapping[str, str]] = {
    "acks_late": "jobs are always acknowledged late, when their outcome is stored",
    "reject_on_worker_lost": "a job whose child died runs again; max_crashes limits this",
    "task_reject_on_worker_lost": "a job whose child died runs again; max_crashes limits this",
    "ignore_result": "results are kept for result_expires; result_expires=0 keeps none",
    "serializer": "calls are plain JSON",
    "track_started": "a running job is always 'active'",
    "rate_limit": "use a separate queue for the task, and start its worker with --limiter 100/m",
    "base": "tasks are functions",
    "throws": "raise PermanentError for expected failures",
    "pydantic_strict": "set strict=True in the model's model_config",
    "pydantic_context": "use a model validator that needs no context",
    "pydantic_dump_kwargs": "models are dumped as they are validated, by their aliases",
}
"""Celery options that do not exist in bulltask, with the reason or an alternative."""


def hint_for_unknown_option(name: str, known: Iterable[str]) -> str:
    """Return a suffix for the message about an unknown task option: the reason, or a similar name."""
    if name in CELERY_ONLY_OPTIONS:
        return f" (Celery's): {CELERY_ONLY_OPTIONS[name]}"
    return did_you_mean(name, known) or f": use {', '.join(sorted(known))}"
