"""Django tasks of the tests."""

from __future__ import annotations

from typing import Any

from bulltask.contrib.django.project import api

task = api("base").task

CALLS: list[Any] = []


@task
def add(a: int, b: int = 0) -> int:
    return a + b


@task
async def add_async(a: int, b: int = 0) -> int:
    return a + b


@task(takes_context=True)
def describe(context: Any) -> list[Any]:
    result = context.task_result
    CALLS.append(result)
    return [result.id, context.attempt, result.status, result.task.priority, result.task.queue_name]


@task
def fail(kind: str) -> None:
    raise {"value": ValueError, "connection": ConnectionError, "exit": SystemExit}[kind]("no luck")


@task(takes_context=True)
def fail_first(context: Any) -> int:
    if context.attempt == 1:
        raise ConnectionError("no luck")
    return int(context.attempt)


@task(takes_context=True)
async def fail_first_async(context: Any) -> int:
    if context.attempt == 1:
        raise ConnectionError("no luck")
    return int(context.attempt)


@task
def unserializable() -> Any:
    return object()


@task
def note(value: Any) -> None:
    CALLS.append(value)
