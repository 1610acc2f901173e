"""A child that is a new interpreter: reads what it is to be, imports the app, and works like a forked one."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from bulltask.app import App
from bulltask.config.urls import SecretUrl, concealed
from bulltask.observe import log
from bulltask.observe.counters import MetricsMemory
from bulltask.registry.discovery import find_app
from bulltask.worker.child.main import ChildPlan, child_bus, run_child
from bulltask.worker.slots import Slots

__all__ = ["SpawnSpec", "main"]


@dataclass(frozen=True, slots=True)
class SpawnSpec:
    """What a spawned child must know; JSON, because nothing of the supervisor's memory is its own.

    Attributes:
        app: what stood behind ``-A``.
        overrides: settings of the command line.
        path: the supervisor's ``sys.path``.
        slots_fd, children, per_child: the shared memory of the slots.
        metrics_fd: the shared counters, ``None`` when metrics are off.
    """

    app: str
    overrides: dict[str, Any]
    path: list[str]
    queues: list[str]
    worker_id: str
    index: int
    parent_pid: int
    slots_fd: int
    children: int
    per_child: int
    metrics_fd: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", concealed(self.overrides))

    def write(self) -> int:
        """Return the descriptor of a nameless file with this order, at its beginning."""
        fd = os.memfd_create("bulltask-order")
        os.write(fd, json.dumps(asdict(self), default=SecretUrl.get_secret_value).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


def main(order_fd: int) -> None:
    """Be the child that the order describes; never returns."""
    with os.fdopen(order_fd, "rb") as file:
        order = SpawnSpec(**json.load(file))
    sys.path[:] = order.path
    app = find_app(order.app, App)
    for name, value in order.overrides.items():
        app.conf.override(name, value)
    app.load_tasks()
    logger = log.configure(level=app.config.log_level, worker_id=order.worker_id)
    slots = Slots(order.children, order.per_child, order.slots_fd)
    memory = None
    if order.metrics_fd is not None:
        memory = MetricsMemory(order.queues, order.children + 1, order.metrics_fd)

    def bus() -> Any:
        return child_bus(logger, memory, order.index, order.queues, app.listeners)

    plan = ChildPlan(
        app=app,
        queues=order.queues,
        worker_id=order.worker_id,
        index=order.index,
        block=slots.children[order.index],
        control=slots.control,
        bus=bus,
        close_inherited=lambda: None,
    )
    run_child(plan, order.parent_pid)


if __name__ == "__main__":
    main(int(sys.argv[1]))
