"""Two queues that go the same way, one through Node and one through bulltask, and what differs in the end."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import redis

from bulltask.lua import loader, wrappers
from bulltask.lua.loader import Script
from tests.interop.differential.hands import LOCK_MS, WORKER, Form
from tests.interop.differential.intended import apply
from tests.interop.differential.ours import STALLED_MS, Ours
from tests.interop.differential.state import State, difference, dump
from tests.interop.node_bridge import NodeBridge

__all__ = ["HOUR", "START_MS", "Outcome", "Pair"]

START_MS: Final = 1_800_000_000_000
"""The time of the first step; each further one is a second later unless ``wait`` says otherwise."""
HOUR: Final = 3_600_000
_STEP_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both sides after the same steps.

    Attributes:
        theirs, ours: what each step answered.
        their_state, our_state: everything in Redis.
        their_scripts, our_scripts: which official scripts each side called.
    """

    steps: list[dict[str, Any]]
    theirs: list[dict[str, Any]]
    ours: list[dict[str, Any]]
    their_state: State
    our_state: State
    their_scripts: frozenset[str]
    our_scripts: frozenset[str]

    def report(self) -> str:
        """What differs, readable; ``""``: nothing."""
        lines = []
        for number, (step, a, b) in enumerate(zip(self.steps, self.theirs, self.ours, strict=True)):
            if not _same(a, b):
                lines.append(f"step {number} {json.dumps(step)}\n  - Node     {a}\n  + bulltask {b}")
        if found := difference(self.their_state, self.our_state):
            lines.append(found)
        if lines:
            lines.append("all steps (Node's answer):")
            lines += [
                f"  {n} {json.dumps(s)} -> {a}" for n, (s, a) in enumerate(zip(self.steps, self.theirs, strict=True))
            ]
        return "\n".join(lines)


class Pair:
    """Runs steps on both sides, each time on two new queues.

    Args:
        url: the server.
        node: the Node process.
        settings: of bulltask.
    """

    _numbers = itertools.count()

    def __init__(self, url: str, node: NodeBridge, **settings: object) -> None:
        self.url, self._node, self._settings = url, node, settings
        self._runner = asyncio.Runner()  # one event loop for all runs
        self.names = ("", "")
        self.redis: redis.Redis = redis.Redis.from_url(url, decode_responses=True)

    def run(
        self,
        steps: list[dict[str, Any]],
        form: Form = "worker",
        *,
        intended: bool = True,
        made: list[dict[str, Any]] | None = None,
        prepare: Callable[[], object] = lambda: None,
    ) -> Outcome:
        """Do ``steps`` on both sides.

        Args:
            steps: see :mod:`tests.interop.differential.ours`.
            form: by which of bulltask's interfaces.
            intended: take the differences of :mod:`tests.interop.differential.intended` out of both states.
            made: what Node does on both queues before, because only it can; then every job is Node's, under its own
                id, and no difference is intended.
            prepare: is called before everything, when both queues have their ``names``.
        """
        timed = at_their_times([*(made or []), *steps])
        first, timed = timed[: len(made or [])], timed[len(made or []) :]
        number = next(self._numbers)
        self.names = their_name, our_name = f"theirs-{number}", f"ours-{number}"
        prepare()
        for name in self.names if first else ():
            self._by_node(name, first)
        theirs = self._by_node(their_name, timed)
        ours = Ours(self.url, our_name, form, self._runner, **self._settings)
        try:
            with called_scripts() as called:
                outcomes = ours.run(timed)
        finally:
            ours.close()
        their_state = dump(self.redis, f"bull:{their_name}:", theirs["ids"])
        our_state = dump(self.redis, f"bull:{our_name}:", ours.ids)
        if made is not None:
            for state in (their_state, our_state):
                state.pop("meta", None)
        elif intended:
            apply(their_state, our_state)
        return Outcome(
            timed, theirs["outcomes"], outcomes, their_state, our_state, frozenset(theirs["scripts"]), frozenset(called)
        )

    def _by_node(self, name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
        options = {"lockDuration": LOCK_MS, "stalledInterval": STALLED_MS, "maxStalledCount": 1, "name": WORKER}
        done: dict[str, Any] = self._node.call("sequence.run", queue=name, steps=steps, worker=options)
        return done

    def close(self) -> None:
        """Close the connection and the event loop."""
        self._runner.close()
        self.redis.close()


@contextmanager
def called_scripts() -> Iterator[set[str]]:
    """Note the names of the official scripts that bulltask calls."""
    called: set[str] = set()
    official, guarded = loader.official_script, wrappers.with_guard

    def note(name: str) -> Script:
        called.add(name)
        return official(name)

    def note_guarded(name: str, guard: str) -> Script:
        called.add(name)
        return guarded(name, guard)

    with mock.patch.object(loader, "official", note), mock.patch.object(wrappers, "guarded", note_guarded):
        yield called


def at_their_times(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each step its time; ``{"do": "wait", "ms": n}`` only moves the clock."""
    now_ms, timed = START_MS, []
    for step in steps:
        if step["do"] == "wait":
            now_ms += step["ms"]
            continue
        timed.append({**step, "at": now_ms})
        now_ms += _STEP_MS
    return timed


def _same(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    if "error" in theirs or "error" in ours:
        both = "error" in theirs and "error" in ours
        # Where one side's client refuses before or after the script, there is no code.
        return both and (theirs["code"] == ours["code"] or None in (theirs["code"], ours["code"]))
    return bool(theirs["ok"] == ours["ok"])
