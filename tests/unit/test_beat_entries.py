from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from bulltask import App, ConfigError, crontab
from bulltask.worker.beat import BeatEntry, read_entries


def app_with(entries: Any, **settings: Any) -> App:
    app = App("shop", beat_schedule=entries, **settings)

    @app.task(name="clean", queue="night", priority=7)
    def clean(days: int, *, hard: bool = False) -> None: ...

    return app


def entries(definitions: dict[str, Any], **settings: Any) -> list[BeatEntry]:
    parsed = read_entries(app_with(definitions, **settings))
    assert parsed is not None
    return parsed


def entry(**fields: Any) -> BeatEntry:
    return entries({"nightly": {"task": "clean", "schedule": 60, "args": (7,), **fields}})[0]


def test_an_entry_in_celerys_format_is_read() -> None:
    schedule = crontab(hour=3, minute=0)
    options = {"queue": "other", "expires": 60, "priority": 2}
    nightly = entry(schedule=schedule, kwargs={"hard": True}, options=options)
    assert (nightly.name, nightly.job.name, nightly.job.queue) == ("nightly", "clean", "other")
    assert json.loads(nightly.job.data) == {"days": 7, "hard": True}
    assert (nightly.rule.pattern, nightly.rule.tz, nightly.rule.every_ms) == ("0 3 * * *", "UTC", None)
    template = nightly.job.options.to_template()
    assert (template["priority"], template["bulltask"]) == (2, {"v": 1, "ttl": 60_000})


def test_an_entry_defaults_to_the_queue_and_options_of_its_task() -> None:
    assert (entry().job.queue, entry().job.options.priority) == ("night", 7)


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
def test_a_schedule_may_be_seconds_a_timedelta_a_crontab_or_a_pattern(
    schedule: object, every_ms: int | None, pattern: str | None
) -> None:
    rule = entry(schedule=schedule).rule
    assert (rule.every_ms, rule.pattern) == (every_ms, pattern)


def test_a_pattern_uses_the_apps_time_zone() -> None:
    definitions = {"nightly": {"task": "clean", "schedule": crontab(hour=3, minute=0), "args": [7]}}
    assert entries(definitions, timezone="Europe/Berlin")[0].rule.tz == "Europe/Berlin"


def test_a_task_may_be_a_task_object_or_an_unknown_name() -> None:
    app = app_with(None)
    app.conf.beat_schedule = {
        "a": {"task": app.tasks["clean"], "schedule": 1, "args": [7]},
        "b": {"task": "unknown", "schedule": 1, "kwargs": {"x": 1}},
        "c": {"task": "unknown", "schedule": 1, "args": [1, 2]},
    }
    parsed = read_entries(app)
    assert parsed is not None
    assert [entry.job.name for entry in parsed] == ["clean", "unknown", "unknown"]
    assert [json.loads(entry.job.data) for entry in parsed] == [{"days": 7}, {"x": 1}, [1, 2]]


def test_a_missing_schedule_differs_from_an_empty_schedule() -> None:
    assert read_entries(app_with(None)) is None
    assert read_entries(App("shop")) is None
    assert read_entries(app_with({})) == []


def test_only_equal_entries_have_equal_digests() -> None:
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
    digests = [entry(**change).digest for change in changes]
    assert len(set(digests)) == len(changes)
    assert digests == [entry(**change).digest for change in changes]
    other_zone = entries({"n": {"task": "clean", "args": [7], "schedule": "@daily"}}, timezone="Asia/Tokyo")[0]
    assert other_zone.digest != entry(schedule="@daily").digest


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("clean", "must be a dictionary"),
        ({}, "the key 'task' is missing"),
        ({"task": "clean"}, "the key 'schedule' is missing"),
        ({"task": "clean", "schedul": 1}, "unknown key 'schedul'; did you mean 'schedule'"),
        ({"task": "clean", "schedule": None}, "schedule must be crontab"),
        ({"task": "clean", "schedule": True}, "schedule must be crontab"),
        ({"task": "clean", "schedule": 0}, "at least 0.001 s"),
        ({"task": "clean", "schedule": -5}, "every"),
        ({"task": "clean", "schedule": "whenever"}, "must have 5 fields"),
        ({"task": 5, "schedule": 1}, "task must be the name of a task"),
        ({"task": "clean", "schedule": 1}, "days"),
        ({"task": "clean", "schedule": 1, "args": [1, 2, 3]}, "argument"),
        ({"task": "clean", "schedule": 1, "args": [object()]}, "JSON does not support"),
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
def test_an_invalid_entry_is_rejected_with_its_name(entry: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_entries(app_with({"nightly": entry}))
    assert "beat_schedule['nightly']" in str(caught.value)


def test_a_name_with_too_many_colons_is_rejected() -> None:
    with pytest.raises(ConfigError, match="more than three ':'"):
        read_entries(app_with({"a:b:c:d:e": {"task": "clean", "schedule": 1, "args": [1]}}))


@pytest.mark.parametrize("value", ["x", [], 5, {1: {}}])
def test_the_setting_must_be_a_dictionary(value: Any) -> None:
    with pytest.raises(ConfigError, match="beat_schedule must be a dictionary of entries by name"):
        App("shop", beat_schedule=value)
