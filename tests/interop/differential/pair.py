"""Two queues that go the same way, one through Node and one through bulltask, and what differs in the end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import redis

from bulltask.lua import loader
from bulltask.lua.loader import Script
from tests.interop.differential.intended import apply
from tests.interop.differential.ours import LOCK_MS, STALLED_MS, WORKER, Ours
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
        self.redis: redis.Redis = redis.Redis.from_url(url, decode_responses=True)

    def run(self, steps: list[dict[str, Any]], *, intended: bool = True) -> Outcome:
        """Do ``steps`` on both sides.

        Args:
            steps: see :mod:`tests.interop.differential.ours`.
            intended: take the differences of :mod:`tests.interop.differential.intended` out of both states.
        """
        timed = at_their_times(steps)
        number = next(self._numbers)
        their_name, our_name = f"theirs-{number}", f"ours-{number}"
        options = {"lockDuration": LOCK_MS, "stalledInterval": STALLED_MS, "maxStalledCount": 1, "name": WORKER}
        theirs = self._node.call("sequence.run", queue=their_name, steps=timed, worker=options)
        ours = Ours(self.url, our_name, **self._settings)
        try:
            with called_scripts() as called:
                outcomes = ours.run(timed)
        finally:
            ours.close()
        their_state = dump(self.redis, f"bull:{their_name}:", theirs["ids"])
        our_state = dump(self.redis, f"bull:{our_name}:", ours.ids)
        if intended:
            apply(their_state, our_state)
        return Outcome(
            timed, theirs["outcomes"], outcomes, their_state, our_state, frozenset(theirs["scripts"]), frozenset(called)
        )

    def close(self) -> None:
        """Close the connection."""
        self.redis.close()


@contextmanager
def called_scripts() -> Iterator[set[str]]:
    """Note the names of the official scripts that bulltask calls."""
    called: set[str] = set()
    official = loader.official

    def note(name: str) -> Script:
        called.add(name)
        return official(name)

    with mock.patch.object(loader, "official", note):
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
