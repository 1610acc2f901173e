"""Kills a relay with SIGKILL at each of its operations, and counts how often each job runs.

Usage: python -m tests.outbox.fault_injection DATABASE-URL BROKER-URL sync|async|django. The rows are always
written with SQLAlchemy; the third argument says which outbox relays them. Prints the number of the operations at which
a relay was killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import django
import redis
import sqlalchemy as sa
from django.conf import settings
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from sqlalchemy import orm
from sqlalchemy.engine.default import DefaultDialect
from sqlalchemy.ext.asyncio import create_async_engine

from bulltask import App, group
from bulltask.outbox.django import Outbox as DjangoOutbox
from bulltask.outbox.sqlalchemy import Outbox
from bulltask.testing import InlineWorker, use_server


class Fuse:
    """Kills this process after its ``count``-th operation: a query, a commit, or a command to Redis."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._wrap(DefaultDialect, "do_execute")
        self._wrap(DefaultDialect, "do_commit")
        self._wrap(CursorWrapper, "execute")
        self._wrap(BaseDatabaseWrapper, "_commit")
        self._wrap(redis.Connection, "send_packed_command")

    def _wrap(self, owner: type, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, wrapped)


class Matrix:
    """The app, its outbox, and how often each job has run."""

    def __init__(self, database_url: str, broker_url: str, kind: str) -> None:
        self.ran, self.broker_url, self.database_url = Counter[str](), broker_url, database_url
        self.app = App("killed", broker_url)
        self.engine = sa.create_engine(database_url)
        self.outbox = Outbox(self.app, self.engine)
        self.outbox.metadata.create_all(self.engine)
        self._relay = {"sync": self.outbox.relay, "async": self._relay_async, "django": self._relay_django}[kind]
        if kind == "django":
            set_up_django(self.engine.url)
        self.once = self.app.task(name="once", result_expires=0)(self._once)
        self.body = self.app.task(name="body", result_expires=0)(self._body)

    def _once(self, name: str) -> None:
        self.ran[name] += 1

    def _body(self, results: list[None], name: str) -> None:
        self.ran[name] += 1

    def run(self) -> int:
        """Kill relays until one has no operation left at which it could be killed."""
        count = 1
        with use_server(self.app, self.broker_url), InlineWorker(self.app) as worker:
            self._write(count)
            while self._relay_in_child(count) == signal.SIGKILL:
                worker.run_jobs()
                self._relay()  # sends what the first relay may have sent
                worker.run_jobs()
                assert self.outbox.backlog().waiting == 0
                count += 1
                self._write(count)
            worker.run_jobs()
        names = {f"{number}{rest}" for number in range(1, count + 1) for rest in ("", " own", " a", " b", " body")}
        assert self.ran == Counter(names), {name: self.ran[name] for name in names ^ {*self.ran} if self.ran[name] != 1}
        return count - 1

    def _write(self, count: int) -> None:
        with orm.Session(self.engine) as session:
            with session.begin():
                self.outbox.delay(session, self.once, f"{count}")
                self.outbox.send(session, self.once.s(f"{count} own").set(job_id=f"job-{count}"))
                members = group(self.once.s(f"{count} a"), self.once.s(f"{count} b"))
                self.outbox.send(session, cast(Any, members) | self.body.s(f"{count} body"))
            self.outbox.delay(session, self.once, "rolled back")
            session.rollback()

    def _relay_in_child(self, count: int) -> int:
        self.engine.dispose()
        self.app.close()
        pid = os.fork()
        if pid == 0:
            Fuse(count)
            self._relay()
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    def _relay_async(self) -> None:
        async def relay() -> None:
            engine = create_async_engine(self.database_url.replace("sqlite:", "sqlite+aiosqlite:"))
            await Outbox(self.app, engine).arelay()
            await engine.dispose()

        asyncio.run(relay())

    def _relay_django(self) -> None:
        DjangoOutbox(self.app).relay()
        connections.close_all()


def set_up_django(url: sa.URL) -> None:
    """Configure Django with the same database."""
    database = {"ENGINE": f"django.db.backends.{url.get_backend_name().replace('sqlite', 'sqlite3')}"}
    database |= {"NAME": url.database or "", "USER": url.username or "", "HOST": str(url.query.get("host", ""))}
    settings.configure(INSTALLED_APPS=["bulltask.outbox.django"], DATABASES={"default": database})
    django.setup()


if __name__ == "__main__":
    sys.stdout.write(f"{Matrix(*sys.argv[1:]).run()}\n")
