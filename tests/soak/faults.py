"""The faults. Each function breaks something, waits, and repairs it; Redis is available again when it returns."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import redis

from tests.soak.environment import LOCK_S, PASSWORD, SoakEnvironment
from tests.soak.load import ATTEMPTS, Outcome, Sent
from tests.soak.malformed import add_malformed

__all__ = ["FAULTS"]

Fault = Callable[[SoakEnvironment], None]
FAULTS: Final[dict[str, Fault]] = {}
"""All faults by name."""

HTTP_400: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request"
)
NO_SERVER: Final = ("127.0.0.1", 1)


def _fault(function: Fault) -> Fault:
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


# ---- Redis -----------------------------------------------------------------------------------------------------------


@_fault
def redis_killed(env: SoakEnvironment) -> None:
    env.server.kill()
    env.pause(env.rng.uniform(0.1, 1))
    env.server.restart()


@_fault
def redis_killed_for_longer_than_a_lock(env: SoakEnvironment) -> None:
    env.server.kill()
    env.pause(LOCK_S + 1.5)
    env.server.restart()


@_fault
def redis_stopped(env: SoakEnvironment) -> None:
    os.kill(env.server.pid, signal.SIGSTOP)
    env.pause(LOCK_S + 1)
    os.kill(env.server.pid, signal.SIGCONT)


@_fault
def redis_read_only(env: SoakEnvironment) -> None:
    env.redis.replicaof(*NO_SERVER)
    env.pause(env.rng.uniform(2, LOCK_S + 2))
    env.redis.replicaof("NO", "ONE")


@_fault
def redis_full(env: SoakEnvironment) -> None:
    env.redis.config_set("maxmemory", "1mb")
    env.pause(LOCK_S + 1)
    env.redis.config_set("maxmemory", "0")


@_fault
def redis_full_then_killed(env: SoakEnvironment) -> None:
    env.redis.config_set("maxmemory", "1mb")
    env.pause(3)
    env.server.kill()
    env.server.restart()  # without the limit, which was set at run time


@_fault
def scripts_flushed(env: SoakEnvironment) -> None:
    for _ in range(20):
        env.redis.script_flush()
        env.pause(0.05)


@_fault
def password_rotated(env: SoakEnvironment) -> None:
    with redis.Redis.from_url(env.url, single_connection_client=True) as admin:
        admin.config_set("requirepass", "another")
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        env.pause(LOCK_S)
        admin.config_set("requirepass", PASSWORD)


# ---- connections to Redis --------------------------------------------------------------------------------------------


@_fault
def error_replies_then_a_broken_connection(env: SoakEnvironment) -> None:
    env.proxy.inject_error("LOADING Redis is loading the dataset in memory", None)
    env.pause(3)
    env.proxy.pass_all()
    env.proxy.refuse()
    env.proxy.reset()
    env.pause(1)
    env.proxy.accept()


@_fault
def http_instead_of_redis(env: SoakEnvironment) -> None:
    env.proxy.inject_reply(HTTP_400, None)
    env.pause(4)
    env.proxy.pass_all()


@_fault
def connections_reset(env: SoakEnvironment) -> None:
    for _ in range(3):
        env.proxy.reset()
        env.pause(0.3)


@_fault
def replies_lost(env: SoakEnvironment) -> None:
    env.proxy.drop_replies(10, match="evalsha")
    env.pause(2)
    env.proxy.pass_all()


@_fault
def connections_half_open(env: SoakEnvironment) -> None:
    env.proxy.freeze()
    env.pause(LOCK_S)
    env.proxy.reset()


@_fault
def all_traffic_blocked(env: SoakEnvironment) -> None:
    env.proxy.blackhole()
    env.pause(LOCK_S + 1)
    env.proxy.pass_all()


@_fault
def replies_slowed_down(env: SoakEnvironment) -> None:
    env.proxy.bandwidth(20, replies_only=True)
    env.pause(4)
    env.proxy.pass_all()


# ---- bulltask's processes --------------------------------------------------------------------------------------------


@_fault
def child_killed(env: SoakEnvironment) -> None:
    with suppress(ProcessLookupError):
        os.kill(env.random_child(), signal.SIGKILL)


@_fault
def child_stopped(env: SoakEnvironment) -> None:
    child = env.random_child()
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGSTOP)
        env.pause(LOCK_S + 1)
        os.kill(child, signal.SIGCONT)


@_fault
def supervisor_stopped(env: SoakEnvironment) -> None:
    supervisor = env.rng.choice(env.fleet.workers)
    supervisor.send(signal.SIGSTOP)
    env.pause(LOCK_S + 1)
    supervisor.send(signal.SIGCONT)


@_fault
def supervisor_killed(env: SoakEnvironment) -> None:
    env.fleet.kill(env.rng.randrange(len(env.fleet.workers)))


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _send(env: SoakEnvironment, task: str, outcome: Outcome = "completed", **arguments: Any) -> None:
    sent = Sent(task, "main", outcome, ATTEMPTS.get(task, 1))
    options: dict[str, Any] = {"queue": "main", "max_retries": 20}
    env.acknowledged.send(sent, lambda: [env.direct.send_task(task, kwargs=arguments, **options).id])


@_fault
def malformed_jobs(env: SoakEnvironment) -> None:
    env.malformed |= add_malformed(env.redis, env.keys("main"), env.rng)


@_fault
def tasks_that_fork(env: SoakEnvironment) -> None:
    for then in ("return", "raise", "exit"):
        _send(env, "forks", "either", then=then)


@_fault
def tasks_that_stop_their_loop(env: SoakEnvironment) -> None:
    for _ in range(2):
        _send(env, "stops_its_loop", "either")


@_fault
def tasks_that_hold_the_gil(env: SoakEnvironment) -> None:
    _send(env, "holds_the_gil", seconds=LOCK_S + 1)
    _send(env, "aholds_the_gil", seconds=2)
    env.pause(LOCK_S + 2)


@_fault
def tasks_that_kill_their_child(env: SoakEnvironment) -> None:
    for _ in range(2):
        _send(env, "kills_its_child")
