"""Each of Celery's task options is supported, or leads to a warning or an error with the reason."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from bulltask import App
from bulltask.errors import ConfigError
from bulltask.registry.call_options import CallOptions
from bulltask.registry.task_options import TaskOptions

SAME = {
    "acks_late": True,
    "acks_on_failure_or_timeout": True,
    "reject_on_worker_lost": True,
    "retry_on_worker_lost": True,
    "track_started": False,
    "send_events": True,
    "typing": True,
    "acks_on_timeout": True,
    "store_eager_result": None,
}


def test_options_that_describe_what_bulltask_does_anyway_are_accepted_silently() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TaskOptions.of(SAME) == TaskOptions()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"acks_late": False}, "jobs are always acknowledged late"),
        ({"reject_on_worker_lost": False}, "runs again; max_crashes limits this"),
        ({"retry_on_worker_lost": False}, "runs again; max_crashes limits this"),
        ({"acks_on_failure_or_timeout": False}, "always stored as failed"),
        ({"typing": False}, "always checked"),
    ],
)
def test_options_without_effect_warn_at_the_decorator_and_say_why(options: dict[str, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=reason) as warned:
        App("warned", "redis://h").task(**options)
    assert [warning.filename for warning in warned] == [__file__]


def test_retry_kwargs_are_the_retries_and_the_fixed_delay_of_autoretry_for() -> None:
    options = TaskOptions.of({"autoretry_for": [OSError], "retry_kwargs": {"max_retries": 5, "countdown": 3}})
    assert (options.max_retries, options.default_retry_delay, options.autoretry_for) == (5, 3, (OSError,))
    backoff = TaskOptions.of({"retry_backoff": 2, "retry_kwargs": {"countdown": 3}})
    assert (backoff.retry_backoff, backoff.default_retry_delay) == (2, None)
    assert TaskOptions.of({"retry_kwargs": {"max_retries": None}}).unlimited_retries
    with pytest.raises(ConfigError, match="retry_kwargs can contain max_retries and countdown"):
        TaskOptions.of({"retry_kwargs": {"queue": "other"}})


def test_options_that_bulltask_does_not_have_name_the_alternative() -> None:
    app = App("refused", "redis://h")
    with pytest.raises(ConfigError, match="serializer must be json or cloudpickle, not 'pickle'; cloudpickle supports"):
        app.task(serializer="pickle")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="compression must be zlib or zstd, not 'gzip'"):
        app.task(compression="gzip")  # type: ignore[call-overload]

    @app.task(name="plain")
    def plain() -> None: ...

    with pytest.raises(TypeError, match=r"'routing_key' \(Celery's\): use queue="):
        plain.apply_async(routing_key="x")  # type: ignore[call-arg]
    assert CallOptions.of({"task_id": "x", "retry": True}) == CallOptions(job_id="x")
    with pytest.raises(ConfigError, match="throws must be a tuple of exception classes"):
        app.task(throws="KeyError")  # type: ignore[call-overload]
