"""The setting task_annotations."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask import App, ConfigError


class Annotation:
    """An object with Celery's methods for annotations."""

    def annotate(self, task: Any) -> dict[str, Any] | None:
        return {"queue": "fast"} if task.name == "quick" else None

    def annotate_any(self) -> dict[str, Any]:
        return {"expires": 60}


def app_with(annotations: object) -> App:
    app = App("shop", task_annotations=annotations, set_as_current=False)
    app.task(name="quick", max_retries=1, priority=7)(lambda: None)
    app.task(name="slow")(lambda: None)
    return app


def test_annotations_of_a_task_name_override_those_of_all_tasks_and_the_decorator() -> None:
    app = app_with({"*": {"max_retries": 5, "time_limit": 9}, "quick": {"max_retries": 3}})
    assert app._config.max_retries == 2
    options = [app.tasks[name]._options for name in ("quick", "slow")]
    assert [(o.max_retries, o.time_limit, o.priority) for o in options] == [(3, 9, 7), (5, 9, None)]
    assert [app._build_job(name, (), {}, {}).options.attempts for name in ("quick", "slow")] == [4, 6]


def test_annotations_may_be_objects_or_a_list() -> None:
    app = app_with([Annotation(), {"slow": {"queue": "bulk", "max_retries": None}}])
    jobs = [app._build_job(name, (), {}, {}) for name in ("quick", "slow")]
    assert [(job.queue, job.options.expires_in_ms) for job in jobs] == [("fast", 60_000), ("bulk", 60_000)]
    assert app.tasks["slow"]._options.unlimited_retries


def test_tasks_that_are_defined_after_the_first_use_are_annotated_too() -> None:
    app = app_with({"late": {"queue": "later"}})
    assert app._config.annotations
    app.task(name="late")(lambda: None)
    assert app._build_job("late", (), {}, {}).queue == "later"


@pytest.mark.parametrize(
    ("annotations", "message"),
    [
        (3, "task_annotations must be a dictionary of options by task name"),
        ({"quick": 3}, r"task_annotations\['quick'\] must be a dictionary of the task's options, not 3"),
        ({"*": {"retrys": 3}}, r"task_annotations\['\*'\] for task quick: unknown task option 'retrys'"),
        ({"quick": {"max_retries": -1}}, r"task_annotations\['quick'\] for task quick: max_retries must be"),
    ],
)
def test_an_invalid_annotation_is_rejected_before_the_first_job(annotations: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = app_with(annotations)._config


def test_settings_with_an_invalid_annotation_can_still_be_corrected() -> None:
    app = app_with({"quick": {"retrys": 3}})
    with pytest.raises(ConfigError):
        _ = app._config
    app.conf.task_annotations = {"quick": {"max_retries": 3}}
    assert app._config.annotations
