"""Merges the options of a call, its task and the app into those of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

import uuid_utils

from bulltask.clock import to_epoch_ms, to_ms
from bulltask.config.config import Config
from bulltask.config.payload_settings import check_payload_options, check_serializer, compression
from bulltask.config.routes import Routes
from bulltask.errors import ConfigError
from bulltask.jobs import codec
from bulltask.jobs.job import JobOptions, NewJob, ParentLink
from bulltask.jobs.names import FAN_OUT, STARMAP, check_job_id, check_job_name, check_queue_name
from bulltask.jobs.options import check_priority, check_size, link_to_parent, stored_options, unchecked_bytes
from bulltask.jobs.time_limits import TimeLimits
from bulltask.payloads.payload_codec import PayloadCodec, PayloadFormat
from bulltask.registry.call_options import CallOptions
from bulltask.registry.option_values import check_max_retries, expiry_ms, keep_ms
from bulltask.registry.task_options import TaskOptions
from bulltask.user_warnings import warn_user
from bulltask.value_class import value_class

__all__ = ["JobPlan", "build_job", "plan_job"]


_IN_NO_MODULE: Final = "__main__."


@value_class
class JobPlan:
    """A call's options without its arguments; it can build any number of jobs.

    Attributes:
        max_payload: Maximum size of data and options in bytes, ``None`` for no limit.
        unchecked_bytes: Up to how many bytes of data are below all limits.
        what: Name of the arguments in messages.
        payloads: Writes the data; ``None``: it is plain JSON.
        form: How the data is written.
        convert: Converts values without a type hint that JSON does not support; ``None``: they are refused.
    """

    name: str
    queue: str
    options: JobOptions
    parent: ParentLink | None
    timestamp_ms: int | None
    max_payload: int | None
    unchecked_bytes: int
    what: str
    payloads: PayloadCodec | None
    form: PayloadFormat
    convert: Callable[[Any], Any] | None = None

    def job(self, data: Any, job_id: str | None = None) -> NewJob:
        """Return the job to send.

        Args:
            data: The arguments.
            job_id: The job's id, default: a new UUIDv7.

        Raises:
            EncodeError, PayloadTooLargeError, InvalidNameError: The serializer does not support the arguments; they are
                too large; or the id is invalid.
        """
        if self.payloads is None:
            encoded = codec.encode(data, what=self.what, limit=self.max_payload, convert=self.convert)
        else:
            encoded = self.payloads.dump_arguments(data, self.queue, self.name, self.form, self.what)
        if len(encoded) > self.unchecked_bytes:
            check_size(encoded, self.options, self.max_payload, self.what)
        new_id = str(uuid_utils.uuid7()) if job_id is None else check_job_id(job_id)
        return NewJob(
            self.queue,
            new_id,
            self.name,
            encoded,
            self.options,
            parent=self.parent,
            timestamp_ms=self.timestamp_ms,
            has_custom_id=job_id is not None,
        )


def plan_job(name: str, task: TaskOptions, call: CallOptions, config: Config, data: Any = None) -> JobPlan:
    """Merge the options of a call, its task and the app.

    Args:
        name: The task's name.
        task, call, config: The options, those of the call first.
        data: The arguments, for functions in ``task_routes``.

    Raises:
        EncodeError, InvalidNameError, ConfigError: An option is invalid; the message names the task.
    """
    if name.startswith(_IN_NO_MODULE) and not config.always_eager:
        warn_user(
            f"task {name!r} is defined in a notebook or a shell, from which no worker can import it, so its jobs will "
            "wait: define it in a module such as tasks.py, import that module here, and start the worker with -A tasks"
        )
    if config.routes is not None and not (call.queue or task.queue):
        call = _with_route(name, task, call, config.routes, data)
    limits = TimeLimits.of(call.soft_time_limit, call.time_limit)
    limits.with_defaults(task.time_limits).with_defaults(config.time_limits).check(f"a call to task {name}")
    expires_in_ms, expires_ms = expiry_ms(task.expires if call.expires is None else call.expires)
    given = {**task.stored, **call.stored}
    stored = stored_options(given, config.backoff_strategies) if given else {}
    parent, timestamp_ms = (
        link_to_parent(call.parent, stored, prefix=config.prefix, hash_tag=config.queue_hash_tag),
        stored.get("timestamp"),
    )
    options = JobOptions(
        attempts=task.attempts(config) if call.max_retries is None else check_max_retries(call.max_retries) + 1,
        backoff=None if "backoff" in stored else task.backoff(config),
        delay_ms=0 if call.countdown is None else to_ms(call.countdown, "countdown"),
        eta_ms=None if call.eta is None else to_epoch_ms(call.eta),
        priority=check_priority(task.priority if call.priority is None else call.priority),
        lifo=call.lifo or task.lifo,
        keep_completed_ms=keep_ms(task.result_expires, config.result_expires_ms),
        keep_failed_ms=keep_ms(task.result_failure_expires, config.failure_expires_ms),
        headers="" if not call.headers else codec.encode(call.headers, what=f"headers of task {name}").decode(),
        expires_in_ms=expires_in_ms,
        expires_ms=expires_ms,
        time_limits=limits,
        ignore_result=call.ignore_result,
        sender=config.sender,
        max_explicit_retries=None if call.max_retries is not None else task.max_explicit_retries(config),
        more=stored,
    )
    form = _form(queue := check_queue_name(call.queue or task.queue or config.default_queue), name, task, call, config)
    return JobPlan(
        name=check_job_name(name),
        queue=queue,
        options=options,
        parent=parent,
        timestamp_ms=timestamp_ms if isinstance(timestamp_ms, int) else None,
        max_payload=config.max_payload,
        unchecked_bytes=unchecked_bytes(options, config.max_payload),
        what=f"the arguments of task {name}",
        payloads=None if form is None else PayloadCodec(config),
        form=form or PayloadFormat(),
        convert=config.convert,
    )


def build_job(name: str, data: Any, task: TaskOptions, call: CallOptions, config: Config) -> NewJob:
    """Return a call's job; raises the errors of :func:`plan_job` and :meth:`JobPlan.job`."""
    return plan_job(name, task, call, config, data).job(data, call.job_id)


def _form(queue: str, name: str, task: TaskOptions, call: CallOptions, config: Config) -> PayloadFormat | None:
    """Check a call's payload options, and return how its arguments are written; ``None`` for plain JSON."""
    if name == FAN_OUT:
        return None  # workers without keys must be able to read which jobs follow
    check_payload_options(call.serializer, call.compression)
    own = call.serializer or task.serializer
    check_serializer(own, config, f"the serializer of task {name} is cloudpickle")
    packed = call.compression or task.compression or config.task_compression
    form = PayloadFormat(own or config.task_serializer, packed and compression(packed, "compression"))
    return form if form.differs_from_json or PayloadCodec(config).encrypts(queue) else None


def _with_route(name: str, task: TaskOptions, call: CallOptions, routes: Routes, data: Any) -> CallOptions:
    """Return the call with the options of its route that neither the call nor the task sets."""
    given = {field.name: value for field in fields(call) if (value := getattr(call, field.name)) not in (None, False)}
    set_by_task = {field.name for field in fields(task) if getattr(task, field.name) not in (None, False, ())}
    route = routes.find(data["task"] if name == STARMAP else name, data, given)
    if "serializer" in route:
        raise ConfigError(f"task_routes for {name} cannot set the serializer; set it for the task or the call")
    try:
        return CallOptions.of({**{key: value for key, value in route.items() if key not in set_by_task}, **given})
    except TypeError as exc:
        raise ConfigError(f"task_routes for {name}: {exc}") from exc
