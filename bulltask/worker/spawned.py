"""A spawned child: a new interpreter that reads its spec, imports the app, and then works like a forked child."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bulltask.app import App
from bulltask.config.parsers import wrap_secrets
from bulltask.config.process import anonymous_file, inherit_life_line
from bulltask.jobs.clock import value_class
from bulltask.observe.bus import Bus
from bulltask.observe.counters import MetricsBlock
from bulltask.observe.log import LogListener, configure_logging
from bulltask.registry.tasks import find_app
from bulltask.worker.child import ChildPlan, child_bus, metrics_memory, run_child
from bulltask.worker.slots import Slots

__all__ = ["SpawnSpec", "main"]


@value_class
class SpawnSpec:
    """The parameters of a spawned child, as JSON, because it does not inherit the supervisor's memory.

    Attributes:
        app, overrides: The value of ``-A``, and settings from the command line.
        queues, added: The queues with which the worker was started, and those that were added later.
        slots_fd, children, per_child: The shared memory of the slots.
        parent_fd: The supervisor's :func:`bulltask.config.process.life_line`.
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
    parent_fd: int | None = None
    added: Sequence[str] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", wrap_secrets(self.overrides))

    def write(self) -> int:
        """Return the descriptor of an anonymous file with this spec, positioned at its start."""
        fd = anonymous_file("bulltask-spawn-spec")
        os.write(fd, json.dumps(asdict(self), default=lambda secret: secret.get_secret_value()).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd


def main(spec_fd: int) -> None:
    """Run a child with the spec in a file descriptor; never returns."""
    with os.fdopen(spec_fd, "rb") as file:
        spec = SpawnSpec(**json.load(file))
    inherit_life_line(spec.parent_fd)
    sys.path[:] = spec.path
    app = find_app(spec.app, App)
    for name, value in spec.overrides.items():
        app.conf.override(name, value)
    app._load_tasks()
    config = app._config
    logger = configure_logging(level=config.log_level, worker_id=spec.worker_id, log_format=config.log_format)
    slots = Slots(spec.children, spec.per_child, spec.slots_fd)
    memory, queues = None, [*spec.queues, *spec.added]
    if spec.metrics_fd is not None:
        memory = metrics_memory(app, spec.queues, spec.children, spec.metrics_fd)
        for queue in spec.added:
            memory.add_queue(queue)

    def bus(counts: MetricsBlock | None) -> tuple[Bus, LogListener]:
        return child_bus(logger, counts, queues, app)

    plan = ChildPlan(
        app=app,
        queues=queues,
        worker_id=spec.worker_id,
        index=spec.index,
        block=slots.children[spec.index],
        control=slots.control,
        memory=memory,
        bus=bus,
        close_inherited=lambda: None,
    )
    run_child(plan, spec.parent_pid)


if __name__ == "__main__":
    main(int(sys.argv[1]))
