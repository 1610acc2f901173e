"""``DjangoConnections``: closes database connections around a task as Django does around a request."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from bulltask.hooks.middleware import Middleware
from bulltask.registry.request import Request

__all__ = ["DjangoConnections"]


class DjangoConnections(Middleware):
    """Responsible for the connections of Django's ORM and caches in a worker.

    Before and after each task, connections that are broken, or older than ``CONN_MAX_AGE``, are closed. Otherwise,
    every task after a restart of the database would fail. A connection inside a transaction stays open, because the
    transaction belongs to a test.

    All async tasks of a child share one thread for Django's ORM, and therefore one connection. While other tasks are
    running, only broken connections are closed, because those tasks may be reading from a cursor.
    """

    def __init__(self) -> None:
        self._async_runs = 0

    def before_run(self, request: Request) -> None:  # noqa: ARG002 - the signature of middleware
        """Close old connections, and delete the queries of earlier tasks that Django has recorded (``DEBUG``)."""
        _prepare()

    def after_run(self, request: Request, result: Any, exception: BaseException | None) -> None:  # noqa: ARG002
        """Close old database connections, and the connections of caches."""
        _clean_up()

    async def abefore_run(self, request: Request) -> None:  # noqa: ARG002
        """:meth:`before_run` in the thread in which Django's async methods run."""
        self._async_runs += 1
        await _in_django_thread(_prepare, lambda: self._async_runs == 1)

    async def aafter_run(self, request: Request, result: Any, exception: BaseException | None) -> None:  # noqa: ARG002
        """:meth:`after_run` in the thread in which Django's async methods run."""
        self._async_runs -= 1
        await _in_django_thread(_clean_up, lambda: self._async_runs == 0)


def _always() -> bool:
    return True


def _prepare(can_close_old: Callable[[], bool] = _always) -> None:
    _close_unusable(can_close_old)
    import_module("django.db").reset_queries()


def _clean_up(can_close_old: Callable[[], bool] = _always) -> None:
    _close_unusable(can_close_old)
    import_module("django.core.cache").caches.close_all()


def _close_unusable(can_close_old: Callable[[], bool]) -> None:
    for connection in import_module("django.db").connections.all(initialized_only=True):
        if connection.in_atomic_block:
            continue
        if can_close_old():
            connection.close_if_unusable_or_obsolete()
        elif connection.errors_occurred and not connection.is_usable():
            connection.close()


async def _in_django_thread(function: Callable[..., None], *args: Any) -> None:
    await import_module("asgiref.sync").sync_to_async(function)(*args)
