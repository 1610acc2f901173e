"""Kills a relay with SIGKILL at each of its operations, and counts how often each job runs.

Usage: python -m tests.outbox.kill_matrix DATABASE-URL BROKER-URL. Prints the number of the operations at which a relay
was killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import redis
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.engine.default import DefaultDialect

from bulltask import App, group
from bulltask.outbox.sqlalchemy import Outbox
from bulltask.testing import InlineWorker, use_server


class Fuse:
    """Kills this process after its ``count``-th operation: a query, a commit, or a command to Redis."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._wrap(DefaultDialect, "do_execute")
        self._wrap(DefaultDialect, "do_commit")
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

    def __init__(self, database_url: str, broker_url: str) -> None:
        self.ran, self.broker_url = Counter[str](), broker_url
        self.app = App("killed", broker_url)
        self.engine = sa.create_engine(database_url)
        self.outbox = Outbox(self.app, self.engine)
        self.outbox.metadata.create_all(self.engine)
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
                worker.drain()
                self.outbox.relay()  # sends what the first relay may have sent
                worker.drain()
                assert self.outbox.backlog().waiting == 0
                count += 1
                self._write(count)
            worker.drain()
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
            self.outbox.relay()
            os._exit(0)
        return os.waitpid(pid, 0)[1]


if __name__ == "__main__":
    sys.stdout.write(f"{Matrix(*sys.argv[1:]).run()}\n")
