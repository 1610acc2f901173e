"""The tasks of the scenarios. Celery and bulltask run the same code."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from importlib import import_module
from typing import Any
from uuid import UUID

import redis

__all__ = ["Order", "Refused", "define"]


class Refused(Exception):
    """An error of the project."""


class Declined(Refused):
    """A subclass of it."""


class Order:
    """A class with an exception in it, like Django's models."""

    class DoesNotExist(Exception):
        """The exception."""


class Invoice(Exception):
    """An exception whose constructor needs two arguments."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"invoice {number}: {reason}")


@functools.cache
def journal(pid: int) -> redis.Redis:
    """Return this process's client of the server for notes and gates."""
    return redis.Redis.from_url(os.environ["JOURNAL_URL"], socket_timeout=None)


def write(key: str, note: object) -> None:
    """Make a note that the scenario reads."""
    journal(os.getpid()).rpush(key, str(note))


def wait_at_gate(key: str) -> None:
    """Wait until the scenario opens the gate."""
    journal(os.getpid()).blpop([f"gate:{key}"], 60)


def exceptions_of(app: Any) -> Any:
    """Return the module with the exceptions of the library."""
    return importlib.import_module(f"{type(app).__module__.partition('.')[0]}.exceptions")


def plain(x):
    """Return x."""
    return x


def define(app: Any) -> dict[str, Any]:
    """Define the tasks in an app; return them by name."""
    tasks: dict[str, Any] = {"plain": app.task(plain)}
    for define_some in (_define_values, _define_processes, _define_failures, _define_retries):
        defined = define_some(app)
        tasks |= {name: task for name, task in defined.items() if hasattr(task, "delay")}
    return tasks


def _define_values(app: Any) -> dict[str, Any]:
    @app.task
    def add(x, y):
        return x + y

    @app.task(rate_limit="5/s")
    def limited():
        return time.time()

    @app.task
    def total(numbers):
        return sum(numbers)

    @app.task
    def collect(*values, **named):
        return [list(values), named] if named else list(values)

    @app.task
    def greet(name, greeting="hello", *, mark="!"):
        return f"{greeting} {name}{mark}"

    @app.task(ignore_result=True)
    def ignored(x):
        return x

    @app.task
    def nothing():
        return None

    @app.task
    def returns_object():
        return object()

    @app.task
    def kind(value):
        return type(value).__name__

    @app.task
    def typed(when: datetime, uid: UUID, price: Decimal, raw: bytes) -> list:
        return [type(value).__name__ for value in (when, uid, price, raw)]

    @app.task(name="named.by.hand")
    def renamed(x):
        return x

    return locals()


def _define_processes(app: Any) -> dict[str, Any]:
    @app.task
    def note(*values):
        write(values[-1], list(values[:-1]))
        return values[0]

    @app.task
    def hold(key):
        write(key, "held")
        wait_at_gate(key)
        write(key, "released")
        return "held"

    @app.task
    def hold_and_clean_up(key):
        write(key, "held")
        try:
            wait_at_gate(key)
        finally:
            write(key, "cleaned up")

    @app.task
    def describe_failure(request, exc, traceback, key):
        write(key, [type(value).__name__ for value in (request, exc, traceback)])

    @app.task
    def note_failed_id(task_id, key):
        write(key, task_id)

    @app.task(bind=True)
    def request(self, names: Sequence[str]):
        return [getattr(self.request, name, "missing") for name in names]

    @app.task(bind=True)
    def adds_to_chord(self):
        self.add_to_chord(self.s())

    @app.task(bind=True)
    def attribute_of_self(self, name):
        value = getattr(self, name)
        return value if isinstance(value, str | int) else type(value).__name__

    @app.task
    def attribute_of_current_task(name):
        return getattr(app.current_task, name)

    @app.task(bind=True)
    def sends_itself(self, key, times=1):
        write(key, times)
        if times:
            return self.apply_async((key, times - 1)).id
        return self.AsyncResult(self.request.id).id == self.request.id

    @app.task(bind=True)
    def ignored_in_state(self, state, meta=None):
        self.update_state(state=state, meta=meta)
        raise import_module(f"{type(app).__module__.partition('.')[0]}.exceptions").Ignore

    @app.task(bind=True)
    def progress(self, key):
        self.update_state(state="PROGRESS", meta={"done": 5})
        write(key, "reported")
        wait_at_gate(key)

    @app.task
    def calls_another(key):
        return note.delay("from a task", key).id

    @app.task
    def sends_a_chain(key):
        return (note.si("inside", key) | note.si("after", key)).delay().id

    @app.task(bind=True)
    def replaces_itself(self):
        return self.replace(plain_task.s(3))

    @app.task(bind=True)
    def has_method(self, name):
        return hasattr(self, name)

    @app.task
    def plain_task(x):
        return x

    @app.task
    def waits_for_another(key):
        return note.delay(3, key).get(timeout=30)

    @app.task
    def waits_and_says_so(key):
        return note.delay(3, key).get(timeout=30, disable_sync_subtasks=False)

    @app.task
    def waits_where_it_is_allowed(key):
        with import_module(f"{type(app).__module__.partition('.')[0]}.result").allow_join_result():
            return note.delay(3, key).get(timeout=30)

    @app.task
    def dies_once(key):
        write(key, "started")
        if journal(os.getpid()).incr(f"deaths:{key}") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return "survived"

    @app.task(acks_late=True, reject_on_worker_lost=True)
    def dies_once_acknowledged_late(key):
        if journal(os.getpid()).incr(f"deaths:{key}") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return "survived"

    @app.task(track_started=True)
    def tracked(key):
        write(key, "started")
        wait_at_gate(key)

    @app.task
    def sends_a_request(key):
        return note_request.delay(key).id

    @app.task(bind=True)
    def note_request(self, key):
        write(key, [[self.request.root_id, self.request.parent_id]])

    @app.task
    def exits():
        sys.exit(3)

    @app.task(soft_time_limit=1)
    def cleans_up_at_the_soft_limit(key):
        try:
            wait_at_gate(key)
        except BaseException as exc:  # noqa: BLE001 - the classes have different base classes
            return type(exc).__name__

    @app.task(soft_time_limit=1, max_retries=0)
    def swallows_the_soft_limit(key):
        try:
            wait_at_gate(key)
        except Exception:  # noqa: BLE001 - as many tasks do
            return "swallowed"

    @app.task(time_limit=1, max_retries=0)
    def exceeds_the_hard_limit(key):
        wait_at_gate(key)

    return locals()


def _define_failures(app: Any) -> dict[str, Any]:
    @app.task
    def boom(*values):
        raise ValueError("boom")

    @app.task
    def fails_with(what):
        errors = {
            "KeyError": KeyError("key"),
            "Refused": Refused("no", 7),
            "nested": Order.DoesNotExist("no order"),
            "Invoice": Invoice(7, "void"),
            "empty": RuntimeError(),
        }
        raise errors[what]

    @app.task
    def chained_error():
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    @app.task
    def disconnects(key):
        write(key, "run")
        raise ConnectionError("refused")

    @app.task(max_retries=0)
    def disconnects_without_retries(key):
        write(key, "run")
        raise ConnectionError("refused")

    return locals()


def _define_retries(app: Any) -> dict[str, Any]:
    @app.task(autoretry_for=(Refused,), max_retries=2, default_retry_delay=0)
    def autoretries(key, failures, declined=False):
        write(key, "run")
        if journal(os.getpid()).incr(f"runs:{key}") <= failures:
            raise (Declined if declined else Refused)("not yet")
        return "done"

    @app.task(autoretry_for=(Exception,), dont_autoretry_for=(Declined,), max_retries=2, default_retry_delay=0)
    def autoretries_most(key):
        write(key, "run")
        raise Declined("never")

    @app.task(autoretry_for=(Refused,), default_retry_delay=0)
    def autoretries_by_default(key):
        write(key, "run")
        raise Refused("always")

    @app.task(autoretry_for=(Refused,), max_retries=3, retry_backoff=1, retry_jitter=False)
    def backs_off(key):
        write(key, time.monotonic())
        if len(journal(os.getpid()).lrange(key, 0, -1)) < 3:
            raise Refused("not yet")

    @app.task(autoretry_for=(Refused,), retry_kwargs={"max_retries": 3, "countdown": 0})
    def autoretries_with_kwargs(key):
        write(key, "run")
        raise Refused("always")

    @app.task(acks_late=True)
    def raises_exception(key, name, **options):
        write(key, "run")
        if journal(os.getpid()).incr(f"runs:{key}") == 1:
            raise getattr(exceptions_of(app), name)(*["reason"] * bool(options), **options)
        return "done"

    @app.task(bind=True, max_retries=3)
    def retries(self, key, failures, exc=None, **options):
        write(key, [self.request.retries, self.request.id])
        if self.request.retries < failures:
            error = None if exc is None else {"ValueError": ValueError("last")}[exc]
            self.retry(exc=error, **{"countdown": 0, **options})
            write(key, "after retry")
        return self.request.retries

    @app.task(bind=True, max_retries=3)
    def raises_retry(self):
        if self.request.retries == 0:
            raise self.retry(countdown=0)
        return self.request.retries

    @app.task(bind=True, max_retries=3)
    def retries_inside_try(self, key):
        write(key, "run")
        try:
            if self.request.retries == 0:
                self.retry(countdown=0)
        except Exception:  # noqa: BLE001 - as many tasks do
            return "swallowed"
        return self.request.retries

    @app.task(bind=True, max_retries=None)
    def retries_forever(self, failures):
        if self.request.retries < failures:
            self.retry(countdown=0)
        return self.request.retries

    @app.task(bind=True, max_retries=0)
    def may_not_retry(self, key):
        write(key, "run")
        self.retry(exc=ValueError("last"), countdown=0)

    @app.task(bind=True)
    def retries_as_often_as_the_default_allows(self, key):
        write(key, "run")
        self.retry(exc=ValueError("last"), countdown=0)

    @app.task(bind=True, max_retries=3)
    def retries_directly(self, exc=None):
        self.retry(exc=None if exc is None else ValueError("last"))

    @app.task(bind=True, max_retries=3)
    def retries_later(self, key, error):
        write(key, "run")
        if self.request.retries == 0:
            self.retry(countdown=2, exc=ValueError("busy") if error else None)
        return "done"

    return locals()
