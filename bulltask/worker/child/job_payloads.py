"""``JobPayloads``: reads the arguments of attempts, and writes their results and exceptions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from bulltask.app import App
from bulltask.errors import BulltaskError, EncodeError, InvalidJobError
from bulltask.jobs import codec
from bulltask.jobs.child_results import ChildResults
from bulltask.jobs.failures import storable_arguments
from bulltask.jobs.job import JobRef, RunningJob
from bulltask.jobs.names import FAN_OUT, STARMAP
from bulltask.payloads.envelope import CLOUDPICKLE
from bulltask.payloads.payload_codec import PLAIN, PayloadCodec, PayloadFormat
from bulltask.registry.request import FailedRequest
from bulltask.registry.task import AnyTask
from bulltask.value_class import value_class

R = TypeVar("R")

__all__ = ["JobArguments", "JobPayloads"]


@value_class
class JobArguments:
    """The arguments of an attempt.

    Attributes:
        form: How the job's data was written.
        with_pickled_result: Whether a result that the job receives was pickled.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: PayloadFormat = PLAIN
    with_pickled_result: bool = False


class JobPayloads:
    """Reads and writes the payloads of jobs.

    Args:
        app: The app, with its settings and tasks.

    Attributes:
        codec: The app's codec.
    """

    def __init__(self, app: App) -> None:
        self._app, self._config, self._tasks = app, app.config, app.tasks
        self.codec, self._convert = PayloadCodec(app.config), app.config.convert
        self._result_forms: dict[str, PayloadFormat] = {}

    def arguments(
        self, job: RunningJob, task: AnyTask[..., Any], children_values: Callable[[], Mapping[str, Any]]
    ) -> JobArguments:
        """Return a job's arguments, converted to the types of their hints unless they were pickled.

        Args:
            job: The job.
            task: Its task.
            children_values: Reads the results of its child jobs.

        Raises:
            DecodeError: The data, or a result that the job receives, is malformed or not accepted.
            InvalidJobError: The data does not match the task.
        """
        loaded = self.codec.load_arguments(job)
        data, is_pickled = loaded.value, loaded.is_pickled
        pickled = task.pickled_parameters(data) if is_pickled else set()
        canvas, result_is_pickled = job.opts.canvas, False
        received = ChildResults.from_wire(canvas) if canvas else None
        if canvas and "request" in canvas:
            self._give_attributes(data, canvas["request"])
        if received is not None:
            results, result_is_pickled = self.codec.load_results(children_values())
            add = functools.partial(received.add_to, data, results, job.id)
            data = self._without_values(job, InvalidJobError, "the job's data", add)
            pickled |= {received.parameter} if result_is_pickled else set()
        form = PayloadFormat(CLOUDPICKLE) if is_pickled else PLAIN
        if not self._config.encryption_keys:
            return JobArguments(*task.unbind_json(data, pickled), form, result_is_pickled)
        unbind = functools.partial(task.unbind_json, data, pickled)
        what = f"the job's data does not match task {job.name}"
        return JobArguments(*self._without_values(job, InvalidJobError, what, unbind), form, result_is_pickled)

    def _give_attributes(self, data: Any, parameter: object) -> None:
        """Give the reference of the failed job, which an error callback receives, the attributes of a request."""
        place: Any = 0 if isinstance(data, list) else parameter
        with suppress(LookupError, TypeError):  # another client may have changed the data
            if isinstance(data[place], list):  # *args
                data, place = data[place], 0
            if isinstance(data[place], dict):
                data[place] = FailedRequest(data[place], self._app)

    def result(self, job: RunningJob, task: AnyTask[..., Any], arguments: JobArguments, value: Any) -> bytes:
        """Return the stored form of a return value.

        Args:
            job: The job.
            task: Its task.
            arguments: The job's arguments.
            value: The return value.

        Raises:
            EncodeError, PayloadTooLargeError: The value cannot be stored.
        """
        conversion, form, what = task.conversion, self._form(task, arguments), f"the return value of task {job.name}"
        if conversion is not None and not form.is_pickled:
            value = self._without_values(job, EncodeError, what, functools.partial(conversion.encode_result, value))
        if form is PLAIN and not self._config.encryption_keys:
            return codec.encode(value, what=what, limit=self._config.max_payload, convert=self._convert)
        return self.codec.dump_result(value, JobRef(job.queue, job.id), form, what)

    def result_of_replacement(
        self, job: RunningJob, of_results: Callable[[Mapping[str, Any]], Any], results: Mapping[str, Any]
    ) -> tuple[bytes, Any]:
        """Return the result of a job that was replaced with a canvas, as it is stored and as a value.

        Args:
            job: The job.
            of_results: Computes the result from the results of the job's child jobs.
            results: The stored results of these child jobs, by key.
        """
        loaded, is_pickled = self.codec.load_results(results)
        value, config = of_results(loaded), self._config
        form = PayloadFormat(CLOUDPICKLE if is_pickled else config.result_serializer, config.result_compression)
        what = f"the return value of job {job.id}"
        return self.codec.dump_result(value, JobRef(job.queue, job.id), form, what), value

    def error(self, job: RunningJob, task: AnyTask[..., Any] | None, exc: BaseException | list[Any] | None) -> str:
        """Return an exception as it is stored; if the job's serializer is JSON, its arguments.

        ``""``: the message is enough to rebuild it, or it cannot be stored.
        """
        if not isinstance(exc, Exception | list):
            return ""
        own, ref = None if task is None else task.options.serializer, JobRef(job.queue, job.id)
        if isinstance(exc, Exception) and (own or self._config.result_serializer) == CLOUDPICKLE:
            return self.codec.dump_error(exc, ref)
        arguments = exc if isinstance(exc, list) else storable_arguments(exc)
        return self.codec.dump_error_arguments(arguments, ref) if arguments else ""

    def error_of_child(self, key: str, error: str) -> Exception | list[Any] | None:
        """Return the exception of a child job, or its arguments.

        Args:
            key: The full key of the child job's hash.
            error: The stored form of its exception, ``""`` for none.
        """
        return self.codec.load_error_by_key(key, error) if error else None

    def _without_values(self, job: RunningJob, kind: type[BulltaskError], what: str, call: Callable[[], R]) -> R:
        return self.codec.without_values(job.queue, what, kind, call) if self._config.encryption_keys else call()

    def _form(self, task: AnyTask[..., Any], arguments: JobArguments) -> PayloadFormat:
        """Return how a result is written; a job that passes other results on keeps their serializer."""
        if task.name == STARMAP:
            task = self._tasks.get(arguments.kwargs.get("task", "")) or task
        form = self._result_forms.get(task.name)
        if form is None:
            form = task.options.result_form(self._config)
            form = self._result_forms[task.name] = PLAIN if form == PLAIN else form  # result() compares the identity
        passes_on = task.name == FAN_OUT and arguments.with_pickled_result
        return form._replace(serializer=CLOUDPICKLE) if passes_on else form
