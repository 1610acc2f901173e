"""Run the same steps on two queues, one with Node and one with bulltask, and report the differences."""

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
from tests.interop.differential.bulltask_side import STALLED_MS, BulltaskSide
from tests.interop.differential.intended_differences import apply
from tests.interop.differential.processors import LOCK_MS, WORKER, Form
from tests.interop.differential.state import State, difference, dump
from tests.interop.node_bridge import NodeBridge

__all__ = ["HOUR", "START_MS", "Outcome", "Pair"]

START_MS: Final = 1_800_000_000_000
"""The time of the first step; each further one is a second later except after ``wait``."""
HOUR: Final = 3_600_000
_STEP_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results and states of both sides after the same steps.

    Attributes:
        node_results, bulltask_results: The result of each step.
        node_state, bulltask_state: Everything in Redis.
        node_scripts, bulltask_scripts: The official scripts that each side called.
    """

    steps: list[dict[str, Any]]
    node_results: list[dict[str, Any]]
    bulltask_results: list[dict[str, Any]]
    node_state: State
    bulltask_state: State
    node_scripts: frozenset[str]
    bulltask_scripts: frozenset[str]

    def report(self) -> str:
        """Return the differences as text, ``""`` if there are none."""
        lines = []
        for number, (step, a, b) in enumerate(zip(self.steps, self.node_results, self.bulltask_results, strict=True)):
            if not _same(a, b):
                lines.append(f"step {number} {json.dumps(step)}\n  - Node     {a}\n  + bulltask {b}")
        if differences := difference(self.node_state, self.bulltask_state):
            lines.append(differences)
        if lines:
            lines.append("all steps (Node's answer):")
            lines += [
                f"  {n} {json.dumps(s)} -> {a}"
                for n, (s, a) in enumerate(zip(self.steps, self.node_results, strict=True))
            ]
        return "\n".join(lines)


class Pair:
    """Runs steps on both sides, each time on two new queues.

    Args:
        url: The server.
        node: The Node process.
        settings: Settings of bulltask.
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
        node_setup: list[dict[str, Any]] | None = None,
        prepare: Callable[[], object] = lambda: None,
    ) -> Outcome:
        """Run ``steps`` on both sides.

        Args:
            steps: See :mod:`tests.interop.differential.bulltask_side`.
            form: bulltask's interface.
            intended: Whether to remove the intended differences from both states.
            node_setup: Steps that Node first runs on both queues, because bulltask cannot. Every job is Node's, and
                no difference is intended.
            prepare: Called first, when both queues have their ``names``.
        """
        timed = with_times([*(node_setup or []), *steps])
        first, timed = timed[: len(node_setup or [])], timed[len(node_setup or []) :]
        number = next(self._numbers)
        self.names = node_name, bulltask_name = f"node-{number}", f"bulltask-{number}"
        prepare()
        for name in self.names if first else ():
            self._run_in_node(name, first)
        node_run = self._run_in_node(node_name, timed)
        bulltask_side = BulltaskSide(self.url, bulltask_name, form, self._runner, **self._settings)
        try:
            with called_scripts() as called:
                outcomes = bulltask_side.run(timed)
        finally:
            bulltask_side.close()
        node_state = dump(self.redis, f"bull:{node_name}:", node_run["ids"])
        bulltask_state = dump(self.redis, f"bull:{bulltask_name}:", bulltask_side.ids)
        if node_setup is not None:
            for state in (node_state, bulltask_state):
                state.pop("meta", None)
        elif intended:
            apply(node_state, bulltask_state)
        return Outcome(
            timed,
            node_run["outcomes"],
            outcomes,
            node_state,
            bulltask_state,
            frozenset(node_run["scripts"]),
            frozenset(called),
        )

    def _run_in_node(self, name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
        options = {"lockDuration": LOCK_MS, "stalledInterval": STALLED_MS, "maxStalledCount": 1, "name": WORKER}
        reply: dict[str, Any] = self._node.call("sequence.run", queue=name, steps=steps, worker=options)
        return reply

    def close(self) -> None:
        """Close the connection and the event loop."""
        self._runner.close()
        self.redis.close()


@contextmanager
def called_scripts() -> Iterator[set[str]]:
    """Record the names of the official scripts that bulltask calls."""
    called: set[str] = set()
    official_script, with_guard = loader.official_script, wrappers.with_guard

    def record(name: str) -> Script:
        called.add(name)
        return official_script(name)

    def record_with_guard(name: str, guard: str) -> Script:
        called.add(name)
        return with_guard(name, guard)

    with (
        mock.patch.object(loader, "official_script", record),
        mock.patch.object(wrappers, "with_guard", record_with_guard),
    ):
        yield called


def with_times(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the time to each step; ``{"do": "wait", "ms": n}`` only moves the clock."""
    now_ms, timed = START_MS, []
    for step in steps:
        if step["do"] == "wait":
            now_ms += step["ms"]
            continue
        timed.append({**step, "at": now_ms})
        now_ms += _STEP_MS
    return timed


def _same(node: dict[str, Any], bulltask: dict[str, Any]) -> bool:
    if "error" in node or "error" in bulltask:
        both = "error" in node and "error" in bulltask
        # An error that a client raises outside the script has no code.
        return both and (node["code"] == bulltask["code"] or None in (node["code"], bulltask["code"]))
    return bool(node["ok"] == bulltask["ok"])
