"""Each of Celery's task options is supported, or leads to a warning or an error with the reason."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from bulltask import App
from bulltask.errors import ConfigError
from bulltask.registry.call import plan_job
from bulltask.registry.options import CallOptions, TaskOptions

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
    "shared": True,
    "autoregister": True,
    "delivery_mode": 2,
    "Request": "celery.worker.request:Request",
    "pydantic_strict": False,
    "pydantic_context": None,
    "routing_key": None,
}
SAME_IN_CALLS = {
    "retry": True,
    "retry_policy": None,
    "add_to_parent": False,
    "immediate": False,
    "delivery_mode": "persistent",
    "retries": 0,
    "group_id": None,
    "exchange": "",
    "routing_key": "mail",
}


def test_options_that_describe_what_bulltask_does_anyway_are_accepted_silently() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TaskOptions.of(SAME) == TaskOptions()
        assert CallOptions.of({"queue": "mail", **SAME_IN_CALLS}) == CallOptions(queue="mail")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"acks_late": False}, "jobs are always acknowledged late"),
        ({"reject_on_worker_lost": False}, "runs again; max_crashes limits this"),
        ({"retry_on_worker_lost": False}, "runs again; max_crashes limits this"),
        ({"acks_on_failure_or_timeout": False}, "always stored as failed"),
        ({"typing": False}, "always checked"),
        ({"backend": "other"}, "a job stores its own result"),
        ({"Strategy": "shop.strategy"}, "use middleware"),
    ],
)
def test_options_without_effect_warn_at_the_decorator_and_say_why(options: dict[str, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=reason) as warned:
        App("warned", "redis://h").task(**options)
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"retry": False}, "retried up to broker_publish_retries times"),
        ({"retry_policy": {"max_retries": 3}}, "these settings apply to all calls"),
        ({"shadow": "shown"}, "use headers= for another name"),
        ({"delivery_mode": 1}, "the Redis server's configuration decides"),
        ({"argsrepr": "(***)"}, "log lines do not contain the arguments"),
        ({"correlation_id": "x"}, "it is the job's id"),
    ],
)
def test_call_options_without_effect_warn_at_the_call_and_say_why(options: dict[str, Any], reason: str) -> None:
    with pytest.warns(UserWarning, match=reason) as warned:
        assert CallOptions.of(options) == CallOptions()
    assert [warning.filename for warning in warned] == [__file__]


def test_a_call_option_without_effect_warns_once_per_line_even_if_its_value_differs() -> None:
    @App("once", "redis://h").task(name="plain")
    def plain(x: int) -> int:
        return x

    call = plain.s(1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for shadow in ("one", "two"):
            call.set(shadow=shadow)
    assert [str(one.message) for one in warned] == [
        "Celery's call option shadow has no effect: a job has the name of its task; use headers= for another name"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call.clone(countdown=1).options == CallOptions(countdown=1)


def test_an_unknown_call_option_raises_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"^unknown option 'countdwn'; did you mean 'countdown'\?$"):
        CallOptions.of({"countdwn": 1})


def test_gzip_is_celerys_name_for_zlib() -> None:
    app = App("compressed", "redis://h", task_compression="gzip")

    @app.task(name="plain", compression="gzip")
    def plain() -> None: ...

    assert app._config.task_compression == "zlib"
    assert plain._options.result_form(app._config).compression == "zlib"
    assert plan_job("plain", plain._options, CallOptions(compression="gzip"), app._config).form.compression == "zlib"


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
    with pytest.raises(ConfigError, match="compression must be zlib or zstd, not 'bzip2'"):
        app.task(compression="bzip2")  # type: ignore[call-overload]

    @app.task(name="plain")
    def plain() -> None: ...

    with pytest.raises(TypeError, match=r"'routing_key' \(a Celery option\): use queue="):
        plain.apply_async(routing_key="x")  # type: ignore[call-arg]
    assert CallOptions.of({"task_id": "x"}) == CallOptions(job_id="x")
    with pytest.raises(TypeError, match=r"unknown task option 'filter' \(a Celery option\): use a decorator"):
        app.task(filter=print)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="throws must be a tuple of exception classes"):
        app.task(throws="KeyError")  # type: ignore[call-overload]
