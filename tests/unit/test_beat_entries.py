from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from bulltask import App, ConfigError, crontab
from bulltask.worker.beat_entries import BeatEntry, read_entries


def app_with(entries: object, **settings: Any) -> App:
    app = App("shop", beat_schedule=entries, **settings)

    @app.task(name="clean", queue="night", priority=7)
    def clean(days: int, *, hard: bool = False) -> None: ...

    return app


def entries(said: dict[str, Any], **settings: Any) -> list[BeatEntry]:
    found = read_entries(app_with(said, **settings))
    assert found is not None
    return found


def one(**said: Any) -> BeatEntry:
    return entries({"nightly": {"task": "clean", "schedule": 60, "args": (7,), **said}})[0]


def test_an_entry_of_celerys_shape_is_understood() -> None:
    schedule = crontab(hour=3, minute=0)
    entry = one(schedule=schedule, kwargs={"hard": True}, options={"queue": "other", "expires": 60, "priority": 2})
    assert (entry.name, entry.job.name, entry.job.queue) == ("nightly", "clean", "other")
    assert json.loads(entry.job.data) == {"days": 7, "hard": True}
    assert (entry.rule.pattern, entry.rule.tz, entry.rule.every_ms) == ("0 3 * * *", "UTC", None)
    template = entry.job.options.to_template()
    assert (template["priority"], template["bulltask"]) == (2, {"v": 1, "ttl": 60_000})


def test_queue_and_options_of_the_task_count_where_the_entry_says_none() -> None:
    assert (one().job.queue, one().job.options.priority) == ("night", 7)


@pytest.mark.parametrize(
    ("schedule", "every_ms", "pattern"),
    [
        (30, 30_000, None),
        (0.25, 250, None),
        (timedelta(hours=1), 3_600_000, None),
        (crontab(), None, "* * * * *"),
        ("*/10 * * * * *", None, "*/10 * * * * *"),
        ("@daily", None, "@daily"),
    ],
)
def test_a_schedule_is_seconds_a_timedelta_a_crontab_or_a_pattern(
    schedule: object, every_ms: int | None, pattern: str | None
) -> None:
    rule = one(schedule=schedule).rule
    assert (rule.every_ms, rule.pattern) == (every_ms, pattern)


def test_patterns_are_in_the_apps_time_zone() -> None:
    said = {"nightly": {"task": "clean", "schedule": crontab(hour=3, minute=0), "args": [7]}}
    assert entries(said, timezone="Europe/Berlin")[0].rule.tz == "Europe/Berlin"


def test_a_task_may_be_named_by_itself_or_be_unknown_here() -> None:
    app = app_with(None)
    app.conf.beat_schedule = {
        "a": {"task": app.tasks["clean"], "schedule": 1, "args": [7]},
        "b": {"task": "elsewhere", "schedule": 1, "kwargs": {"x": 1}},
        "c": {"task": "elsewhere", "schedule": 1, "args": [1, 2]},
    }
    found = read_entries(app)
    assert found is not None
    assert [entry.job.name for entry in found] == ["clean", "elsewhere", "elsewhere"]
    assert [json.loads(entry.job.data) for entry in found] == [{"days": 7}, {"x": 1}, [1, 2]]


def test_no_schedule_is_not_the_same_as_an_empty_one() -> None:
    assert read_entries(app_with(None)) is None
    assert read_entries(App("shop")) is None
    assert read_entries(app_with({})) == []


def test_the_digest_tells_entries_apart_and_is_the_same_for_the_same() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"schedule": 61},
        {"schedule": crontab()},
        {"args": (8,)},
        {"kwargs": {"hard": True}},
        {"options": {"priority": 1}},
        {"options": {"expires": 5}},
        {"task": "other"},
    ]
    digests = [one(**change).digest for change in changes]
    assert len(set(digests)) == len(changes)
    assert digests == [one(**change).digest for change in changes]
    other_zone = entries({"n": {"task": "clean", "args": [7], "schedule": "@daily"}}, timezone="Asia/Tokyo")[0]
    assert other_zone.digest != one(schedule="@daily").digest


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("clean", "must be a dictionary"),
        ({}, "the key 'task' is missing"),
        ({"task": "clean"}, "the key 'schedule' is missing"),
        ({"task": "clean", "schedul": 1}, "unknown key 'schedul'; did you mean 'schedule'"),
        ({"task": "clean", "schedule": None}, "schedule must be crontab"),
        ({"task": "clean", "schedule": True}, "schedule must be crontab"),
        ({"task": "clean", "schedule": 0}, "at least a millisecond"),
        ({"task": "clean", "schedule": -5}, "every"),
        ({"task": "clean", "schedule": "whenever"}, "must have 5 fields"),
        ({"task": 5, "schedule": 1}, "task must be the name of a task"),
        ({"task": "clean", "schedule": 1}, "days"),
        ({"task": "clean", "schedule": 1, "args": [1, 2, 3]}, "argument"),
        ({"task": "clean", "schedule": 1, "args": [object()]}, "JSON does not have"),
        ({"task": "clean", "schedule": 1, "args": [1], "options": {"queu": "x"}}, "unknown option 'queu'"),
        (
            {"task": "clean", "schedule": 1, "args": [1], "options": {"countdown": 5}},
            "countdown cannot be used",
        ),
        ({"task": "clean", "schedule": 1, "args": [1], "options": {"job_id": "x"}}, "job_id cannot be used"),
        ({"task": "clean", "schedule": 1, "args": [1], "options": 5}, "options must be a dictionary"),
        ({"task": "clean", "schedule": 1, "args": [1], "relative": True}, "relative intervals are not supported"),
    ],
)
def test_a_wrong_entry_is_refused_by_its_name(entry: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_entries(app_with({"nightly": entry}))
    assert "beat_schedule['nightly']" in str(caught.value)


def test_names_are_those_of_job_schedulers() -> None:
    with pytest.raises(ConfigError, match="more than three ':'"):
        read_entries(app_with({"a:b:c:d:e": {"task": "clean", "schedule": 1, "args": [1]}}))


@pytest.mark.parametrize("said", ["x", [], 5, {1: {}}])
def test_the_setting_is_a_dictionary(said: object) -> None:
    with pytest.raises(ConfigError, match="beat_schedule must be a dictionary of entries by name"):
        App("shop", beat_schedule=said)
