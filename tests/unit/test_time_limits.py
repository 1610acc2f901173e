"""Validation of time limits, and time limits stored in jobs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from bulltask import App, ConfigError
from bulltask.jobs.fields import NO_LIMITS, TimeLimits
from bulltask.jobs.job import BULLTASK_KEY, RunningJob, StoredOptions

app = App("limits", "redis://127.0.0.1:1/0")


@app.task(soft_time_limit=10, time_limit=timedelta(minutes=1))
def limited() -> None: ...


@app.task
def plain() -> None: ...


def stored_options(**options: Any) -> dict[str, object]:
    stored = limited.s().set(**options).job().opts(0)[BULLTASK_KEY]
    assert isinstance(stored, dict)
    return {name: value for name, value in stored.items() if name != "sender"}


def stored_job(**fields: object) -> RunningJob:
    return replace(RunningJob.placeholder("mail", "1", ""), opts=StoredOptions({BULLTASK_KEY: fields}))


def test_a_job_stores_the_time_limits_of_its_call_but_not_of_its_task() -> None:
    assert stored_options() == {"v": 1}
    assert stored_options(time_limit=timedelta(seconds=20)) == {"v": 1, "timeLimit": 20_000}
    assert stored_options(soft_time_limit=0.5, time_limit=7) == {"v": 1, "softTimeLimit": 500, "timeLimit": 7_000}
    assert limited._options.time_limits == TimeLimits(10_000, 60_000)


@pytest.mark.parametrize(
    ("fields", "limits"),
    [
        ({"v": 1}, NO_LIMITS),
        ({"softTimeLimit": 500}, TimeLimits(500, None)),
        ({"timeLimit": 7_000.0, "softTimeLimit": "x"}, TimeLimits(None, 7_000)),
        ({"timeLimit": 0, "softTimeLimit": -1}, NO_LIMITS),
        ({"timeLimit": True, "softTimeLimit": 1e300}, NO_LIMITS),
    ],
)
def test_an_invalid_stored_time_limit_is_ignored(fields: dict[str, object], limits: TimeLimits) -> None:
    assert stored_job(**fields).opts.time_limits == limits


def test_a_calls_time_limits_override_the_tasks_and_the_apps() -> None:
    assert TimeLimits(1, None).with_defaults(TimeLimits(2, 3)).with_defaults(TimeLimits(4, 5)) == TimeLimits(1, 3)


@pytest.mark.parametrize("limit", [0, -1, 0.0001, float("nan"), float("inf"), "5", True, timedelta()])
@pytest.mark.parametrize("name", ["soft_time_limit", "time_limit"])
def test_a_time_limit_must_be_a_positive_duration(name: str, limit: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        app.task(name="wrong", **{name: limit})(lambda: None)
    with pytest.raises(ConfigError, match=name):
        plain.apply_async(**{name: limit})
    if limit != "5":  # settings may be strings
        with pytest.raises(ConfigError, match=f"task_{name} must be"):
            App("another", **{f"task_{name}": limit})


def test_a_soft_limit_longer_than_the_hard_limit_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"soft_time_limit \(2 s\) of a task must be shorter than time_limit \(2 s\)"):
        app.task(name="wrong", soft_time_limit=2, time_limit=2)(lambda: None)
    with pytest.raises(ConfigError, match=r"soft_time_limit \(10 s\) of a call to task .*limited must be shorter"):
        limited.apply_async(time_limit=5)
    with pytest.raises(ConfigError, match=r"\(61 s\) of a call to task .*limited must be shorter than time_limit \(60"):
        limited.apply_async(soft_time_limit=61)
    config = App("other", "redis://127.0.0.1:1/0", task_soft_time_limit=5, task_time_limit=5)
    with pytest.raises(ConfigError, match=r"task_soft_time_limit \(5 s\) of the settings must be shorter"):
        config.conf.freeze()


def test_a_call_is_checked_against_the_time_limits_of_the_app() -> None:
    short = App("short", "redis://127.0.0.1:1/0", task_time_limit=5)
    short.task(name="any")(lambda: None)
    with pytest.raises(ConfigError, match=r"soft_time_limit \(6 s\) .* time_limit \(5 s\)"):
        short.send_task("any", soft_time_limit=6)
