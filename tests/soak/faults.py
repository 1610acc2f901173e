"""The faults. Each breaks something, waits, and mends it; when it returns, Redis should answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import redis

from tests.soak.load import RUNS, Outcome, Sent
from tests.soak.malformed import add_malformed
from tests.soak.scene import LOCK_S, PASSWORD, Scene

__all__ = ["FAULTS"]

Fault = Callable[[Scene], None]
FAULTS: Final[dict[str, Fault]] = {}
"""Every fault by its name."""

HTTP_400: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request"
)
NO_SERVER: Final = ("127.0.0.1", 1)


def _fault(function: Fault) -> Fault:
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


# ---- Redis -----------------------------------------------------------------------------------------------------------


@_fault
def redis_killed(scene: Scene) -> None:
    scene.server.kill()
    scene.pause(scene.rng.uniform(0.1, 1))
    scene.server.restart()


@_fault
def redis_killed_for_longer_than_a_lock(scene: Scene) -> None:
    scene.server.kill()
    scene.pause(LOCK_S + 1.5)
    scene.server.restart()


@_fault
def redis_stopped(scene: Scene) -> None:
    os.kill(scene.server.pid, signal.SIGSTOP)
    scene.pause(LOCK_S + 1)
    os.kill(scene.server.pid, signal.SIGCONT)


@_fault
def redis_read_only(scene: Scene) -> None:
    scene.redis.replicaof(*NO_SERVER)
    scene.pause(scene.rng.uniform(2, LOCK_S + 2))
    scene.redis.replicaof("NO", "ONE")


@_fault
def redis_full(scene: Scene) -> None:
    scene.redis.config_set("maxmemory", "1mb")
    scene.pause(LOCK_S + 1)
    scene.redis.config_set("maxmemory", "0")


@_fault
def redis_full_then_killed(scene: Scene) -> None:
    scene.redis.config_set("maxmemory", "1mb")
    scene.pause(3)
    scene.server.kill()
    scene.server.restart()  # without the limit, which was set at run time


@_fault
def scripts_flushed(scene: Scene) -> None:
    for _ in range(20):
        scene.redis.script_flush()
        scene.pause(0.05)


@_fault
def password_rotated(scene: Scene) -> None:
    with redis.Redis.from_url(scene.url, single_connection_client=True) as admin:
        admin.config_set("requirepass", "another")
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        scene.pause(LOCK_S)
        admin.config_set("requirepass", PASSWORD)


# ---- the way to Redis ------------------------------------------------------------------------------------------------


@_fault
def errors_then_a_broken_connection(scene: Scene) -> None:
    scene.proxy.inject_error("LOADING Redis is loading the dataset in memory", None)
    scene.pause(3)
    scene.proxy.pass_all()
    scene.proxy.refuse()
    scene.proxy.reset()
    scene.pause(1)
    scene.proxy.accept()


@_fault
def http_instead_of_redis(scene: Scene) -> None:
    scene.proxy.inject_reply(HTTP_400, None)
    scene.pause(4)
    scene.proxy.pass_all()


@_fault
def connections_reset(scene: Scene) -> None:
    for _ in range(3):
        scene.proxy.reset()
        scene.pause(0.3)


@_fault
def replies_lost(scene: Scene) -> None:
    scene.proxy.drop_replies(10, match="evalsha")
    scene.pause(2)
    scene.proxy.pass_all()


@_fault
def connections_half_open(scene: Scene) -> None:
    scene.proxy.freeze()
    scene.pause(LOCK_S)
    scene.proxy.reset()


@_fault
def nothing_passes(scene: Scene) -> None:
    scene.proxy.blackhole()
    scene.pause(LOCK_S + 1)
    scene.proxy.pass_all()


@_fault
def replies_drip(scene: Scene) -> None:
    scene.proxy.bandwidth(20, replies_only=True)
    scene.pause(4)
    scene.proxy.pass_all()


# ---- our processes ---------------------------------------------------------------------------------------------------


@_fault
def child_killed(scene: Scene) -> None:
    with suppress(ProcessLookupError):
        os.kill(scene.some_child(), signal.SIGKILL)


@_fault
def child_stopped(scene: Scene) -> None:
    child = scene.some_child()
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGSTOP)
        scene.pause(LOCK_S + 1)
        os.kill(child, signal.SIGCONT)


@_fault
def supervisor_stopped(scene: Scene) -> None:
    supervisor = scene.rng.choice(scene.fleet.workers)
    supervisor.send(signal.SIGSTOP)
    scene.pause(LOCK_S + 1)
    supervisor.send(signal.SIGCONT)


@_fault
def supervisor_killed(scene: Scene) -> None:
    scene.fleet.kill(scene.rng.randrange(len(scene.fleet.workers)))


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _send(scene: Scene, task: str, outcome: Outcome = "completed", **arguments: Any) -> None:
    sent = Sent(task, "main", outcome, RUNS.get(task, 1))
    options: dict[str, Any] = {"queue": "main", "max_retries": 20}
    scene.ledger.send(sent, lambda: [scene.direct.send_task(task, kwargs=arguments, **options).id])


@_fault
def malformed_jobs(scene: Scene) -> None:
    scene.malformed |= add_malformed(scene.redis, scene.keys("main"), scene.rng)


@_fault
def tasks_that_fork(scene: Scene) -> None:
    for then in ("return", "raise", "exit"):
        _send(scene, "forks", "either", then=then)


@_fault
def tasks_that_stop_their_loop(scene: Scene) -> None:
    for _ in range(2):
        _send(scene, "stops_its_loop", "either")


@_fault
def tasks_that_hold_the_gil(scene: Scene) -> None:
    _send(scene, "holds_the_gil", seconds=LOCK_S + 1)
    _send(scene, "aholds_the_gil", seconds=2)
    scene.pause(LOCK_S + 2)


@_fault
def tasks_that_kill_their_child(scene: Scene) -> None:
    for _ in range(2):
        _send(scene, "kills_its_child")
