"""Scenarios: what Celery 5.7 does, what bulltask does, and why they differ.

A scenario is code that a Celery project contains. It runs without changes in both libraries, so it must not import
either of them; `Project` has what it needs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import redis

from tests.celery_parity.tasks import define

__all__ = ["TIMEOUT", "Area", "Project", "Scenario"]

TIMEOUT = 60.0

Code = Callable[[Any], object]


class Project:
    """A project with a running worker. Its tasks are attributes.

    Args:
        library: The module ``celery`` or ``bulltask``.
        app: The app that sends.
        journal: The server for the tasks' notes and gates.
        tasks: The tasks by name; default: defined now.

    Attributes:
        library, app: The arguments.
        is_celery: Whether the library is Celery, for scenarios in which the two have different names.
        key: A name that only this scenario uses.
    """

    def __init__(self, library: Any, app: Any, journal: redis.Redis, tasks: dict[str, Any] | None = None) -> None:
        self.library, self.app, self.is_celery = library, app, library.__name__ == "celery"
        self.key, self._journal = uuid.uuid4().hex, journal
        self._tasks = define(app) if tasks is None else tasks

    def __getattr__(self, name: str) -> Any:
        """Return a task, or an attribute of the library: ``group``, ``chain`` …"""
        return self._tasks[name] if name in self._tasks else getattr(self.library, name)

    def again(self) -> Project:
        """Return the same project for another scenario."""
        return Project(self.library, self.app, self._journal, self._tasks)

    def get(self, sent: Any) -> Any:
        """Wait for a result, or for that of a canvas, which is sent first."""
        return (sent if hasattr(sent, "get") and not isinstance(sent, dict) else sent.delay()).get(timeout=TIMEOUT)

    def fails(self, sent: Any) -> str:
        """Return the exception with which a result fails, as text."""
        return raised(lambda: self.get(sent))

    def notes(self, count: int = 1) -> list[str]:
        """Wait until the tasks have made ``count`` notes under this scenario's key; return and remove them."""
        found: list[Any] = [self._journal.blpop([self.key], int(TIMEOUT)) for _ in range(count)]
        return [note[1].decode() for note in found]

    def notes_so_far(self) -> list[str]:
        """Return the notes that the tasks have made under this scenario's key, without waiting."""
        notes: Any = self._journal.lrange(self.key, 0, -1)
        return [note.decode() for note in notes]

    def open_gate(self, times: int = 1) -> None:
        """Let ``times`` calls of ``hold`` with this scenario's key return."""
        self._journal.rpush(f"gate:{self.key}", *["open"] * times)

    def wait_for(self, condition: Callable[[], object]) -> bool:
        """Wait until a condition is true; return whether it became true."""
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            if time.monotonic() > deadline:
                return False
            self._journal.blpop(["nothing"], 0.02)
        return True


@dataclass(frozen=True)
class Scenario:
    """What happens in a situation.

    Attributes:
        sentence: What Celery does.
        run: The code; an exception that it raises is its outcome, as text.
        celery, bulltask: The outcome in each library.
        verdict, because: How bulltask compares, and why it differs.
    """

    sentence: str
    run: Code
    celery: object
    bulltask: object
    verdict: Literal["same", "better", "differs"]
    because: str

    def outcome(self, project: Project) -> object:
        """Run the code and return its outcome."""
        outcome: object = None

        def run() -> None:
            nonlocal outcome
            outcome = self.run(project)

        return raised(run) or outcome


class Area:
    """A list of scenarios. Each method adds one; without ``run``, it returns a decorator for the code."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.scenarios: list[Scenario] = []

    def same(self, sentence: str, outcome: object, run: Code | None = None) -> Any:
        """The outcome is the same in both libraries."""
        return self._add(sentence, run, outcome, outcome, "same", "")

    def better(self, sentence: str, outcomes: tuple[object, object], because: str, run: Code | None = None) -> Any:
        """Bulltask does what Celery's users would prefer; ``outcomes`` are Celery's and bulltask's."""
        return self._add(sentence, run, *outcomes, "better", because)

    def differs(self, sentence: str, outcomes: tuple[object, object], because: str, run: Code | None = None) -> Any:
        """Bulltask does something else, or cannot do it; ``outcomes`` are Celery's and bulltask's."""
        return self._add(sentence, run, *outcomes, "differs", because)

    def _add(self, sentence: str, run: Code | None, celery: object, bulltask: object, verdict: Any, why: str) -> Any:
        def add(code: Code) -> Code:
            self.scenarios.append(Scenario(sentence, code, celery, bulltask, verdict, why))
            return code

        return add if run is None else add(run)


def raised(run: Callable[[], object]) -> str:
    """Return the name of the class of the exception that ``run`` raises, else ``""``."""
    try:
        run()
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt):
            raise
        return type(exc).__name__
    return ""
