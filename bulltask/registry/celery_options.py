"""Celery's options for tasks and calls: those that bulltask ignores, and those that it does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from bulltask.errors import ConfigError, did_you_mean
from bulltask.user_warnings import warn_user

__all__ = [
    "IGNORED_TASK_OPTIONS",
    "TASK_OPTIONS",
    "hint_for_unknown_call_option",
    "hint_for_unknown_option",
    "translate_call_options",
    "translate_task_options",
]

_UNAVAILABLE: Final[Mapping[str, str]] = {
    "backend": "a job stores its own result",
    "exchange": "use queue=",
    "exchange_type": "use queue=",
    "routing_key": "use queue=",
    "delivery_mode": "the Redis server's configuration decides whether jobs are written to disk",
    "filter": "use a decorator around the function",
    "shared": "tasks of shared_task are in every app; any other task belongs to one app",
    "Strategy": "use middleware",
    "Request": "use middleware",
    "pydantic_strict": "set strict=True in the model's model_config",
    "pydantic_context": "use a model validator that needs no context",
    "pydantic_dump_kwargs": "models are dumped as they are validated, by their aliases",
}
"""Task options that do not exist in bulltask, with the reason or an alternative."""

IGNORED_TASK_OPTIONS: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "acks_late": ((True,), "jobs are always acknowledged late, when their outcome is stored"),
    "acks_on_failure": ((True,), "a failed job is always stored as failed, or retried"),
    "acks_on_timeout": ((True,), "a job that exceeds its time limit is always stored as failed, or retried"),
    "acks_on_failure_or_timeout": ((True,), "a failed job is always stored as failed, or retried"),
    "reject_on_worker_lost": ((True,), "a job whose child died always runs again; max_crashes limits this"),
    "retry_on_worker_lost": ((True,), "a job whose child died always runs again; max_crashes limits this"),
    "track_started": ((True, False), ""),
    "send_events": ((True,), "BullMQ's scripts always emit their events"),
    "store_errors_even_if_ignored": ((True,), "the error of a failed job is always stored"),
    "trail": ((True, False), ""),
    "typing": ((True,), "arguments are always checked when a call is sent"),
    "resultrepr_maxsize": ((), "results are always shortened in log lines"),
    "store_eager_result": ((False,), "the result of a job in eager mode is kept in its process"),
    "lazy": ((True, False), ""),
    "abstract": ((True, False), ""),
}
"""Task options that are ignored: the values that match what bulltask does anyway, and why others have no effect."""

TASK_OPTIONS: Final = frozenset({*_UNAVAILABLE, *IGNORED_TASK_OPTIONS, "retry_kwargs"})
"""Celery's task options that bulltask does not have itself."""

_CALL: Final[Mapping[str, str]] = {
    "exchange": "use queue=",
    "routing_key": "use queue=",
    "exchange_type": "use queue=",
    "delivery_mode": "the Redis server's configuration decides whether jobs are written to disk",
    "immediate": "a job waits in its queue until a worker acquires it",
    "retry": "a send is retried up to broker_publish_retries times within broker_publish_timeout, with the same job id",
    "retry_policy": "set broker_publish_retries and broker_publish_timeout",
    "connection": "a call uses the connections of its app",
    "producer": "a call uses the connections of its app",
    "publisher": "a call uses the connections of its app",
    "shadow": "a job has the name of its task; use headers= for another name",
    "add_to_parent": "the jobs that a task sends are not recorded as its children",
    "chord": "use chord() or group() | callback",
    "chain": "use chain()",
    "group_id": "use group()",
    "group_index": "use group()",
    "result_cls": "use app.result(id, queue)",
    "retries": "a worker counts them",
    "router": "set task_routes",
    "route_name": "set task_routes",
    "root_id": "bulltask sets it",
    "parent_id": "bulltask sets it; parent= makes the call a child job of a flow",
    "mandatory": "a job waits in its queue until a worker acquires it",
    "reply_to": "a job stores its own result",
}
"""Call options that do not exist in bulltask, with an alternative."""

_RETRY_KWARGS: Final[Mapping[str, str]] = {"max_retries": "max_retries", "countdown": "default_retry_delay"}


def translate_task_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in bulltask's form: without those that have no effect, ``retry_kwargs`` resolved.

    An ignored option causes a warning, unless its value matches what bulltask does anyway.

    Raises:
        ConfigError: ``retry_kwargs`` is invalid.
    """
    options = {}
    for name, value in given.items():
        if name not in IGNORED_TASK_OPTIONS:
            options[name] = value
        elif value is not None and value not in IGNORED_TASK_OPTIONS[name][0]:
            warn_user(f"the task option {name}={value!r} has no effect: {IGNORED_TASK_OPTIONS[name][1]}")
    for name in ("autoretry_for", "dont_autoretry_for", "throws"):
        if isinstance(options.get(name), list):
            options[name] = tuple(options[name])
    if (retry_kwargs := options.pop("retry_kwargs", None)) is not None:
        options.update(_resolved(retry_kwargs, options))
    if options.get("max_retries", 0) is None:
        options["unlimited_retries"] = True
    return options


def translate_call_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return call options in bulltask's form: ``task_id`` is ``job_id``, and ``retry=True`` has no effect."""
    options = dict(given)
    if "task_id" in options and "job_id" not in options:
        options["job_id"] = options.pop("task_id")
    if options.get("retry") is True:
        options.pop("retry")
    return options


def _resolved(retry_kwargs: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that Celery's ``retry_kwargs`` stand for; ``retry_backoff`` overrides their countdown."""
    if not isinstance(retry_kwargs, Mapping) or not retry_kwargs.keys() <= _RETRY_KWARGS.keys():
        raise ConfigError(
            f"retry_kwargs can contain max_retries and countdown, not {retry_kwargs!r}; use the task's other options"
        )
    resolved = {_RETRY_KWARGS[name]: value for name, value in retry_kwargs.items()}
    if options.get("retry_backoff"):
        resolved.pop("default_retry_delay", None)
    return resolved


def hint_for_unknown_option(name: str, known: Iterable[str]) -> str:
    """Return a suffix for the message about an unknown task option: the reason, or a similar name."""
    if name in _UNAVAILABLE:
        return f" (Celery's): {_UNAVAILABLE[name]}"
    return did_you_mean(name, known) or f": use {', '.join(sorted(known))}"


def hint_for_unknown_call_option(name: str, known: Iterable[str]) -> str:
    """Return a suffix for the message about an unknown call option: the alternative, or all names."""
    if name in _CALL:
        return f" (Celery's): {_CALL[name]}"
    return f": use {', '.join(sorted(known))}"
