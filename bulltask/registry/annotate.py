"""Applies ``task_annotations`` to the options of a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from bulltask.config.annotations import Annotations
from bulltask.errors import BulltaskError, ConfigError
from bulltask.registry.task import AnyTask
from bulltask.registry.task_options import TaskOptions

__all__ = ["annotate"]


def annotate(task: AnyTask[Any, Any], annotations: Annotations) -> None:
    """Add the options in ``annotations`` to those of the task, which they override.

    Raises:
        ConfigError: An option is unknown or invalid; the message names the task.
    """
    for where, given in _found(task, annotations):
        try:
            task.options = _changed(task.options, given)
        except (BulltaskError, TypeError, ValueError) as exc:
            raise ConfigError(f"task_annotations[{where!r:.200}] for task {task.name}: {exc}") from exc


def _changed(options: TaskOptions, given: Mapping[str, Any]) -> TaskOptions:
    merged = {**{field.name: getattr(options, field.name) for field in fields(options)}, **given}
    if "max_retries" in given:
        merged["unlimited_retries"] = given["max_retries"] is None
    return TaskOptions.of(merged)


def _found(task: AnyTask[Any, Any], annotations: Annotations) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Return the options for all tasks (``*``), then those for this task, which take precedence."""
    for part in annotations:
        if isinstance(part, Mapping):
            found = {"*": part.get("*"), task.name: part.get(task.name)}
        else:
            found = {"*": getattr(part, "annotate_any", lambda: None)(), task.name: part.annotate(task)}
        yield from ((where, options) for where, options in found.items() if options)
