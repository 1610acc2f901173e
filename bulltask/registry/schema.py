"""JSON Schema of an app's tasks: what a job's data must be, and what its return value is."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Final

from bulltask.config.config import Config
from bulltask.errors import BulltaskError, ConfigError
from bulltask.jobs.names import bullmq_name
from bulltask.registry.call_options import CallOptions
from bulltask.registry.job_plan import JobPlan, plan_job
from bulltask.registry.task import AnyTask
from bulltask.typed.definitions import Definitions, Schema, renamed

__all__ = ["plan_of", "schema_of"]

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def schema_of(tasks: Iterable[AnyTask[..., Any]], config: Config) -> Schema:
    """Return a document with the JSON Schema of each task, derived from its type hints.

    Args:
        tasks: The tasks.
        config: The configuration of their app, which determines the queues.

    Returns:
        ``tasks``: for each name, the ``description``, BullMQ's name of the ``queue``, and the schemas of the job's
        ``data`` and ``returnvalue``; ``$defs``: the types to which these schemas refer. A parameter without a hint may
        be anything.
    """
    tasks = sorted(tasks, key=lambda task: task.name)
    data, results = Definitions(), Definitions(of_results=True)
    entries = {task.name: _entry(task, config, data) for task in tasks}
    returnvalues = {
        task.name: {"type": "null"} if task.options.ignore_result else task.types.result.schema(results)
        for task in tasks
    }
    names = results.rename_other(data.schemas)
    for name, schema in returnvalues.items():
        entries[name]["returnvalue"] = renamed(schema, names)
    definitions = {names.get(name, name): renamed(schema, names) for name, schema in results.schemas.items()}
    return {"$schema": _DIALECT, "tasks": entries, "$defs": dict(sorted({**data.schemas, **definitions}.items()))}


def plan_of(task: AnyTask[..., Any], config: Config) -> JobPlan:
    """Return the plan of a task's calls without options, as far as it does not depend on their arguments.

    Raises:
        ConfigError: A function in ``task_routes`` needs the arguments, or an option is invalid.
    """
    try:
        return plan_job(task.name, task.options, CallOptions(), config, {})
    except BulltaskError:
        raise
    except Exception as exc:
        raise ConfigError(
            f"a function in task_routes failed for task {task.name!r} without arguments ({type(exc).__name__}: {exc}); "
            "set queue= for the task, or let the function return None"
        ) from exc


def _entry(task: AnyTask[..., Any], config: Config, definitions: Definitions) -> Schema:
    queue = bullmq_name(plan_of(task, config).queue, hash_tag=config.queue_hash_tag)
    description = (inspect.getdoc(task.function) or "").partition("\n\n")[0].replace("\n", " ")
    return {
        **({"description": description} if description else {}),
        "queue": queue,
        "data": task.data_schema(definitions),
    }
