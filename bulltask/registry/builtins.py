"""Tasks that every app has, for those jobs of a canvas that call none of the user's functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bulltask.jobs.names import FAN_OUT, STARMAP
from bulltask.ports import Sender
from bulltask.registry.task import AnyTask, Task
from bulltask.registry.task_options import TaskOptions

__all__ = ["builtin_tasks"]


def builtin_tasks(sender: Callable[[], Sender], find: Callable[[str], AnyTask[Any, Any]]) -> dict[str, Task[..., Any]]:
    """Return the built-in tasks of an app by name.

    Args:
        sender: Returns the app.
        find: Returns the app's task with a given name.
    """

    def fan_out(dependents: Sequence[str], result: Any = None) -> Any:  # noqa: ARG001 - the worker reads them
        return result

    def starmap(task: str, items: Iterable[Any]) -> list[Any]:
        called = find(task)
        pickles = called.options.result_form(sender().config).is_pickled
        # All arguments are read first: if this worker cannot read one, another worker may make all the calls.
        bound = [called.unbind_json(item) for item in items]
        return [_call(called, *arguments, pickles=pickles) for arguments in bound]

    functions: dict[str, Callable[..., Any]] = {FAN_OUT: fan_out, STARMAP: starmap}
    options = TaskOptions(rate_limit=0)  # task_default_rate_limit is for the user's tasks
    return {name: Task(function, name, options, sender, bind=False) for name, function in functions.items()}


def _call(task: AnyTask[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, pickles: bool) -> Any:
    result = task.direct(args, kwargs)
    if task.is_async:
        result = asyncio.run(result)
    conversion = task.conversion
    return result if conversion is None or pickles else conversion.encode_result(result)
