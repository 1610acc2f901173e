"""Celery's options for tasks and calls: those that bulltask ignores, and those that it does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from bulltask.errors import ConfigError, did_you_mean
from bulltask.registry.stamping import with_stamps
from bulltask.user_warnings import warn_user

__all__ = [
    "IGNORED_CALL_OPTIONS",
    "IGNORED_TASK_OPTIONS",
    "TASK_OPTIONS",
    "hint_for_unknown_call_option",
    "hint_for_unknown_option",
    "translate_call_options",
    "translate_task_options",
]

_Options = Mapping[str, tuple[tuple[object, ...], str]]
"""Options by name: the values that match bulltask's behavior, and why others have no effect, or what to use instead."""

_ROUTING: Final[_Options] = {
    "exchange": (("",), "use queue="),
    "exchange_type": (("direct",), "use queue="),
    "routing_key": (("",), "use queue="),
}
"""Also accepted if they name the queue, as they do by default in Celery."""

_REFUSED_TASK_OPTIONS: Final[_Options] = {
    **_ROUTING,
    "filter": ((), "use a decorator around the function"),
    "pydantic_strict": ((False,), "set strict=True in the model's model_config"),
    "pydantic_context": (({},), "use a model validator that needs no context"),
    "pydantic_dump_kwargs": (({},), "models are always dumped by alias, so the JSON is valid input for the same model"),
}
"""Task options that would change where a job goes, or what it does: other values are errors."""

_MESSAGES: Final[_Options] = {
    "delivery_mode": ((2, "persistent"), "the Redis server's configuration decides whether jobs are written to disk"),
    "immediate": ((False,), "a job waits in its queue until a worker acquires it"),
    "mandatory": ((False,), "a job waits in its queue until a worker acquires it"),
}

IGNORED_TASK_OPTIONS: Final[_Options] = {
    **_MESSAGES,
    "backend": ((), "a job stores its own result; to store none, use ignore_result=True"),
    "shared": ((True, False), ""),
    "autoregister": ((True,), "each task is registered in its app"),
    "Strategy": (("celery.worker.strategy:default",), "use middleware"),
    "Request": (("celery.worker.request:Request",), "use middleware"),
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
    "resultrepr_maxsize": ((1024,), "results are always shortened in log lines"),
    "store_eager_result": ((False,), "the result of a job in eager mode is kept in its process"),
    "lazy": ((True, False), ""),
    "abstract": ((True, False), ""),
}
"""Task options that are ignored: other values cause a warning."""

TASK_OPTIONS: Final = frozenset({*_REFUSED_TASK_OPTIONS, *IGNORED_TASK_OPTIONS, "retry_kwargs"})
"""Celery's task options that bulltask does not have."""

_REFUSED_CALL_OPTIONS: Final[_Options] = {
    **_ROUTING,
    "chord": ((), "use chord() or group() | callback"),
    "chain": ((), "use chain()"),
    "group_id": ((), "use group()"),
    "group_index": ((), "use group()"),
    "retries": ((0,), "a worker counts them"),
    "router": ((), "set task_routes"),
    "route_name": ((), "set task_routes"),
    "root_id": ((), "bulltask sets it"),
    "parent_id": ((), "bulltask sets it; parent= makes the call a child job of a flow"),
}
"""Call options that would change where a job goes, or what it contains: other values are errors."""

_SEND_RETRIES: Final = (
    "a send is retried up to broker_publish_retries times within broker_publish_timeout, with the same job id; "
    "these settings apply to all calls"
)

IGNORED_CALL_OPTIONS: Final[_Options] = {
    **_MESSAGES,
    "retry": ((True,), _SEND_RETRIES),
    "retry_policy": ((), _SEND_RETRIES),
    "connection": ((), "a call uses the connections of its app"),
    "producer": ((), "a call uses the connections of its app"),
    "publisher": ((), "a call uses the connections of its app"),
    "shadow": ((), "a job has the name of its task; use headers= for another name"),
    "add_to_parent": ((True, False), ""),
    "argsrepr": ((), "log lines do not contain the arguments"),
    "kwargsrepr": ((), "log lines do not contain the arguments"),
    "correlation_id": ((), "it is the job's id, which job_id= sets"),
    "reply_to": ((), "a job stores its own result"),
    "result_cls": ((), "use app.result(id, queue)"),
    "throw": ((False,), "in eager mode, task_eager_propagates raises the errors of tasks"),
}
"""Call options that are ignored: other values cause a warning."""

_RETRY_KWARGS: Final[Mapping[str, str]] = {"max_retries": "max_retries", "countdown": "default_retry_delay"}


def translate_task_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return task options in bulltask's form: without options that have no effect, and with ``retry_kwargs`` expanded.

    An ignored option causes a warning, unless its value matches bulltask's behavior.

    Raises:
        ConfigError: ``retry_kwargs`` is invalid.
    """
    options = _without_ignored("task", given, _REFUSED_TASK_OPTIONS, IGNORED_TASK_OPTIONS)
    for name in ("autoretry_for", "dont_autoretry_for", "throws"):
        if isinstance(options.get(name), list):
            options[name] = tuple(options[name])
    if (retry_kwargs := options.pop("retry_kwargs", None)) is not None:
        options.update(_resolved(retry_kwargs, options))
    if options.get("max_retries", 0) is None:
        options["unlimited_retries"] = True
    return options


def translate_call_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return call options in bulltask's form: without options that have no effect; ``task_id`` becomes ``job_id``.

    The stamps that ``stamped_headers`` names become one option, ``stamps``.

    An ignored option causes a warning, unless its value matches bulltask's behavior.
    """
    options = with_stamps(_without_ignored("call", given, _REFUSED_CALL_OPTIONS, IGNORED_CALL_OPTIONS))
    if "task_id" in options and "job_id" not in options:
        options["job_id"] = options.pop("task_id")
    return options


def _without_ignored(kind: str, given: Mapping[str, Any], refused: _Options, ignored: _Options) -> dict[str, Any]:
    options = {}
    for name, value in given.items():
        if name not in refused and name not in ignored:
            options[name] = value
            continue
        silent, reason = refused.get(name) or ignored[name]
        if value is None or value in silent or (name in _ROUTING and value == given.get("queue")):
            continue
        if name in refused:
            options[name] = value  # an unknown option, with a hint
        else:
            # Without the value, which may differ in each call: Python shows each text once per line.
            warn_user(f"Celery's {kind} option {name} has no effect: {reason}")
    return options


def _resolved(retry_kwargs: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that Celery's ``retry_kwargs`` stand for; ``retry_backoff`` overrides their countdown."""
    if not isinstance(retry_kwargs, Mapping) or not retry_kwargs.keys() <= _RETRY_KWARGS.keys():
        raise ConfigError(
            f"retry_kwargs can contain max_retries and countdown, not {retry_kwargs!r:.200}; use the task's "
            "other options"
        )
    resolved = {_RETRY_KWARGS[name]: value for name, value in retry_kwargs.items()}
    if options.get("retry_backoff"):
        resolved.pop("default_retry_delay", None)
    return resolved


def hint_for_unknown_option(name: str, known: Iterable[str]) -> str:
    """Return a suffix for the message about an unknown task option: what to use, or a similar name."""
    return _hint(name, known, _REFUSED_TASK_OPTIONS)


def hint_for_unknown_call_option(name: str, known: Iterable[str]) -> str:
    """Return a suffix for the message about an unknown call option: what to use, or a similar name."""
    return _hint(name, known, _REFUSED_CALL_OPTIONS)


def _hint(name: str, known: Iterable[str], refused: _Options) -> str:
    if name in refused:
        return f" (a Celery option): {refused[name][1]}"
    return did_you_mean(name, known) or f": use {', '.join(sorted(known))}"
