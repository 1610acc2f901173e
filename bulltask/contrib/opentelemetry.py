"""OpenTelemetry: spans and metrics of sends and attempts, in traces that continue from Node.js and to Node.js.

The trace context is stored where BullMQ's clients store it: in the job's option ``tm``, a JSON object of headers. The
spans have the names and attributes of ``bullmq-otel``, and those of OpenTelemetry's conventions for messaging.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final

from opentelemetry import context, metrics, propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from bulltask.app import App
from bulltask.config.parsers import JOB_BUCKETS
from bulltask.jobs.clock import mono_s
from bulltask.jobs.errors import Ignore, RateLimitQueue, Reject, ReleaseJob, RescheduleJob, Retry, WaitForChildren
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.jobs.payloads import PayloadCodec
from bulltask.observe.hooks import Middleware
from bulltask.observe.signals import report_failure, worker_process_shutdown
from bulltask.registry.request import Request
from bulltask.transport.produce import Producer

__all__ = ["BulltaskInstrumentor"]

_NAME: Final = "bulltask"
_FLUSH_MS: Final = 5_000

_NO_ERRORS: Final = (Ignore, RateLimitQueue, ReleaseJob, RescheduleJob, WaitForChildren)

Attributes = dict[str, Any]


class BulltaskInstrumentor:
    """Traces and measures the sends and the attempts of all apps in this process.

    ::

        BulltaskInstrumentor().instrument()

    It needs only ``opentelemetry-api``; the program configures the SDK. A child of a worker sends the spans and metrics
    that are left before it ends, with the ``force_flush()`` of its providers.

    Exceptions are recorded with their messages and tracebacks; for encrypted queues, only their classes. Arguments and
    results are never recorded.
    """

    _active: _Instrumentation | None = None

    def instrument(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        **_: Any,
    ) -> None:
        """Begin; without effect if this process is instrumented already.

        Args:
            tracer_provider, meter_provider: Default: the global providers, which may be set later.
        """
        if BulltaskInstrumentor._active is None:
            BulltaskInstrumentor._active = _Instrumentation(tracer_provider, meter_provider)

    def uninstrument(self, **_: Any) -> None:
        """End what :meth:`instrument` has begun."""
        if BulltaskInstrumentor._active is not None:
            BulltaskInstrumentor._active.end()
            BulltaskInstrumentor._active = None

    @property
    def is_instrumented_by_opentelemetry(self) -> bool:
        """Whether this process is instrumented."""
        return BulltaskInstrumentor._active is not None


class _Instrumentation:
    """The instruments, and where they are attached: to every app, to the sends, and to the end of a child."""

    def __init__(
        self, tracer_provider: trace.TracerProvider | None, meter_provider: metrics.MeterProvider | None
    ) -> None:
        self._providers = tracer_provider, meter_provider
        own = version(_NAME)
        self.tracer = trace.get_tracer(_NAME, own, tracer_provider)
        meter = metrics.get_meter(_NAME, own, meter_provider)
        self.sent = meter.create_counter("messaging.client.sent.messages", "{message}", "Jobs that were sent")
        self.sends = _histogram(meter, "messaging.client.operation.duration", "Duration of sends")
        self.consumed = meter.create_counter("messaging.client.consumed.messages", "{message}", "Attempts")
        self.runs = _histogram(meter, "messaging.process.duration", "Duration of attempts")
        Producer.tracer = _SendTracer(self)
        App._when_created.append(self._instrument)
        for app in list(App._instances):
            self._instrument(app)
        worker_process_shutdown.connect(self._flush, weak=False)

    def end(self) -> None:
        """Detach everything."""
        Producer.tracer = None
        App._when_created.remove(self._instrument)
        for app in list(App._instances):
            app._middleware.remove(_RunTracer)
        worker_process_shutdown.disconnect(self._flush)

    def _instrument(self, app: App) -> None:
        app._middleware.add_outermost(_RunTracer(app, self))

    def _flush(self, **_: Any) -> None:
        """Send what a child has recorded; the batches of the SDK would be lost when it exits."""
        tracer_provider, meter_provider = self._providers
        for provider in (
            tracer_provider or trace.get_tracer_provider(),
            meter_provider or metrics.get_meter_provider(),
        ):
            if (flush := getattr(provider, "force_flush", None)) is not None:
                flush(_FLUSH_MS)


def _histogram(meter: metrics.Meter, name: str, description: str) -> metrics.Histogram:
    return meter.create_histogram(name, "s", description, explicit_bucket_boundaries_advisory=JOB_BUCKETS)


def _attributes(operation: str, kind: str, queue: str | None) -> Attributes:
    attributes = {"messaging.system": "bullmq", "messaging.operation.name": operation, "messaging.operation.type": kind}
    if queue is not None:
        attributes["messaging.destination.name"] = queue
    return attributes


def _of_job(job_id: str, name: str) -> Attributes:
    return {"messaging.message.id": job_id, "bullmq.job.id": job_id, "bullmq.job.name": name}


def _record(span: Span, exc: BaseException, *, with_message: bool = True) -> str:
    """Record what has ended a span, and return the exception's class."""
    kind = type(exc)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if with_message:
        span.record_exception(exc)
    else:
        span.add_event("exception", {"exception.type": name})
    span.set_attribute("error.type", name)
    span.set_status(Status(StatusCode.ERROR, f"{name}: {exc}" if with_message else name))
    return name


class _OpenSpan:
    """A span that is the current one until it is closed."""

    def __init__(self, span: Span, parent: context.Context) -> None:
        self.span = span
        self._token = context.attach(trace.set_span_in_context(span, parent))
        self._started = mono_s()

    def close(self) -> float:
        """End the span, and return how many seconds it has lasted."""
        context.detach(self._token)
        self.span.end()
        return mono_s() - self._started


class _SendTracer:
    """Traces sends: a span for each, of one job, several jobs or a flow."""

    def __init__(self, instruments: _Instrumentation) -> None:
        self._instruments = instruments

    @contextmanager
    def sending(self, jobs: Sequence[NewJob], *, is_flow: bool = False) -> Iterator[Sequence[NewJob]]:
        """Send ``jobs`` in a span, with its context; if that fails, they are sent without it."""
        queues = {job.queue for job in jobs}
        queue = next(iter(queues)) if len(queues) == 1 else None
        operation = "add" if len(jobs) == 1 else "addFlow" if is_flow else "addBulk"
        attributes = _attributes(operation, "send", queue)
        try:
            opened = self._open(jobs, operation, queue, attributes)
            traced = _with_context(jobs)
        except Exception as exc:  # noqa: BLE001 - a job is sent even if it cannot be traced
            report_failure(type(self), "sending", exc)
            yield jobs
            return
        try:
            yield traced
        except BaseException as exc:
            attributes["error.type"] = _record(opened.span, exc)
            raise
        finally:
            seconds = opened.close()
            self._instruments.sent.add(len(jobs), attributes)
            self._instruments.sends.record(seconds, attributes)

    def _open(self, jobs: Sequence[NewJob], operation: str, queue: str | None, attributes: Attributes) -> _OpenSpan:
        name, more = operation, {"bullmq.queue.operation": operation, **attributes}
        if queue is not None:
            name, more["bullmq.queue.name"] = f"{operation} {queue}", queue
        if operation == "add":
            name += f".{jobs[0].name}"
            more |= _of_job(jobs[0].id, jobs[0].name)
        else:
            more["messaging.batch.message_count"] = more["bullmq.job.bulk.count"] = len(jobs)
            more["bullmq.job.bulk.names"] = sorted({job.name for job in jobs})[:_MAX_NAMES]
        return _OpenSpan(
            self._instruments.tracer.start_span(name, None, SpanKind.PRODUCER, more), context.get_current()
        )


_MAX_NAMES: Final = 20
"""Names of a bulk's tasks in its span."""


def _with_context(jobs: Sequence[NewJob]) -> Sequence[NewJob]:
    """Return jobs with the current trace context, except those that have one, and those that must not have one."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    if not carrier:
        return jobs
    context_json = json.dumps(carrier, separators=(",", ":"))
    # Jobs that share their options share the changed ones, too, because the options are packed once.
    changed: dict[int, JobOptions] = {}
    return [_with_options(job, context_json, changed) for job in jobs]


def _with_options(job: NewJob, context_json: str, changed: dict[int, JobOptions]) -> NewJob:
    options = job.options
    if options.more.get("omc") or "tm" in options.more:
        return job
    if id(options) not in changed:
        changed[id(options)] = replace(options, more={**options.more, "tm": context_json})
    return replace(job, options=changed[id(options)])


class _RunTracer(Middleware):
    """Traces the attempts of an app: a span for each, which continues the trace of the sender."""

    def __init__(self, app: App, instruments: _Instrumentation) -> None:
        self._app = app
        self._instruments = instruments
        self._open: dict[int, _OpenSpan] = {}

    def before_run(self, request: Request) -> None:
        """Start the span of an attempt."""
        queue = request.queue
        attributes = {
            **_attributes("process", "process", queue),
            **_of_job(request.id, request.task),
            "messaging.client.id": request.hostname,
            "bullmq.queue.name": queue,
            "bullmq.queue.operation": "process",
            "bullmq.worker.id": request.hostname,
            "bullmq.job.attempts.made": request.retries,
            "bullmq.job.processed.timestamp": time.time_ns() // 1_000_000,
        }
        sender = propagate.extract(_carrier(request.telemetry_metadata))
        span = self._instruments.tracer.start_span(f"process {queue}", sender, SpanKind.CONSUMER, attributes)
        self._open[id(request)] = _OpenSpan(span, sender)

    def after_run(self, request: Request, result: Any, exception: BaseException | None) -> None:  # noqa: ARG002
        """End the span, and measure the attempt."""
        if (opened := self._open.pop(id(request), None)) is None:
            return  # before_run() has failed
        attributes = {**_attributes("process", "process", request.queue), "bullmq.job.name": request.task}
        if exception is not None and (error := _error(exception)) is not None:
            is_encrypted = PayloadCodec(self._app._config).encrypts(request.queue)
            attributes["error.type"] = _record(opened.span, error, with_message=not is_encrypted)
        opened.span.set_attribute("bullmq.job.finished.timestamp", time.time_ns() // 1_000_000)
        seconds = opened.close()
        self._instruments.consumed.add(1, attributes)
        self._instruments.runs.record(seconds, attributes)


def _carrier(stored: object) -> dict[str, str]:
    """Return the headers in ``tm``; none if another client has stored something else there."""
    try:
        found = json.loads(stored) if isinstance(stored, str) else None
    except ValueError:
        found = None
    return {name: text for name, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def _error(raised: BaseException) -> BaseException | None:
    """Return the error that an attempt has ended with; ``None`` if it only ended early."""
    if isinstance(raised, Retry):
        return raised.exc
    is_no_error = isinstance(raised, _NO_ERRORS) or (isinstance(raised, Reject) and raised.requeue)
    return None if is_no_error else raised
