"""For tests of a Django project: a mixin that checks which jobs were sent, and runs them in the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bulltask.app import App
from bulltask.contrib.django.project import project_app
from bulltask.embedded import server_of_tests
from bulltask.jobs.clock import Duration
from bulltask.jobs.errors import BulltaskError
from bulltask.observe.events import ChildEvent
from bulltask.queue import Job
from bulltask.registry.task import AnyTask
from bulltask.testing import FakeClock, InlineWorker, assert_enqueued, use_server

if TYPE_CHECKING:
    from unittest import TestCase as Base
else:
    Base = object

__all__ = ["JobsMixin"]


class JobsMixin(Base):
    """Gives each test of a test case an empty server, whose jobs it can check and run.

    ::

        class OrderTest(JobsMixin, TestCase):
            def test_an_order_sends_a_receipt(self):
                with self.captureOnCommitCallbacks(execute=True):
                    self.client.post("/orders", {"email": "ada@example.com"})
                self.assert_enqueued(send_receipt, count=1)
                self.run_jobs()
                self.assertEqual(len(mail.outbox), 1)

    It works with all of Django's test cases. A ``setUp`` of the test case must call ``super().setUp()``.

    Attributes:
        bulltask_app: The app under test; default: the project's app.
        bulltask_url: The server, **which is emptied before each test**; default: a server of the test process.
        bulltask_worker: An :class:`bulltask.testing.InlineWorker`; ``None`` in eager mode, in which jobs run when they
            are sent.
        bulltask_clock: The app's clock, which tests can advance.
    """

    bulltask_app: App | None = None
    bulltask_url: str | None = None
    bulltask_worker: InlineWorker | None
    bulltask_clock: FakeClock

    def setUp(self) -> None:
        """Empty the server, and let the app use it until the end of the test."""
        super().setUp()
        app = self._tested_app()
        url = server_of_tests().url if self.bulltask_url is None else self.bulltask_url
        self.bulltask_clock = self.enterContext(use_server(app, url))
        self.bulltask_worker = None if app._config.always_eager else self.enterContext(InlineWorker(app))

    def assert_enqueued(
        self,
        task: AnyTask[Any, Any] | str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        count: int | None = None,
        **expected: Any,
    ) -> list[Job]:
        """Assert that a job is waiting or delayed; :func:`bulltask.testing.assert_enqueued` has the arguments."""
        __tracebackhide__ = True
        return assert_enqueued(self._tested_app(), task, args, kwargs, count=count, **expected)

    def run_jobs(self, *, propagate: bool = True) -> list[ChildEvent]:
        """Run all jobs that are ready, and those that they send; see :meth:`InlineWorker.run_jobs`."""
        return self._inline_worker().run_jobs(propagate=propagate)

    async def arun_jobs(self, *, propagate: bool = True) -> list[ChildEvent]:
        """:meth:`run_jobs` for asyncio."""
        return await self._inline_worker().arun_jobs(propagate=propagate)

    def run_for(self, duration: Duration, *, propagate: bool = True) -> list[ChildEvent]:
        """Advance the clock without waiting, and run each job when it is due; see :meth:`InlineWorker.run_for`."""
        return self._inline_worker().run_for(duration, propagate=propagate)

    async def arun_for(self, duration: Duration, *, propagate: bool = True) -> list[ChildEvent]:
        """:meth:`run_for` for asyncio."""
        return await self._inline_worker().arun_for(duration, propagate=propagate)

    def _tested_app(self) -> App:
        return project_app() if self.bulltask_app is None else self.bulltask_app

    def _inline_worker(self) -> InlineWorker:
        if self.bulltask_worker is None:
            raise BulltaskError(f"{self._tested_app()!r} is in eager mode: its jobs run when they are sent")
        return self.bulltask_worker
