"""Run the steps of the differential tests with bulltask; ``../node/sequence.js`` runs them with Node.

A step is ``{"do": name, "at": epoch ms, …}``. ``"job": k`` is the k-th job that was added (modulo their number),
with ``"of": state`` the k-th job in that state, ``"held": k`` the k-th job that was acquired and has not ended. Options
have BullMQ's names.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast

import redis

from bulltask.errors import BulltaskError
from bulltask.queue import AsyncFlowProducer, AsyncQueue, FlowJob, FlowProducer, Job, Queue
from bulltask.transport.call import JOB_ERRORS
from bulltask.transport.scripts.job import extend_lock, is_finished
from bulltask.transport.scripts.move import renew_locks
from bulltask.transport.scripts.queue import get_metrics
from tests.interop.differential.processors import LOCK_MS, ActiveJob, Form, ManualProcessor, Processor, WorkerProcessor
from tests.support.sync_facade import SyncFacade

__all__ = ["STALLED_MS", "BulltaskSide"]

STALLED_MS: Final = 100_000
_LISTS: Final = {"wait", "paused", "active"}
_OPTIONS: Final[Mapping[str, str]] = {
    "attempts": "attempts",
    "priority": "priority",
    "lifo": "lifo",
    "jobId": "job_id",
    "removeOnComplete": "remove_on_complete",
    "removeOnFail": "remove_on_fail",
    "keepLogs": "keep_logs",
    "stackTraceLimit": "stack_trace_limit",
    "failParentOnFailure": "fail_parent_on_failure",
    "continueParentOnFailure": "continue_parent_on_failure",
    "ignoreDependencyOnFailure": "ignore_dependency_on_failure",
    "removeDependencyOnFailure": "remove_dependency_on_failure",
}

_CODES: Final[Mapping[type[BulltaskError], int]] = {kind: code for code, kind in JOB_ERRORS.items()}

Step = Mapping[str, Any]


class BulltaskSide:
    """A queue on which bulltask runs the steps.

    Args:
        url: The server.
        name: The queue.
        form: The interface: ``worker`` runs a worker's code, ``sync`` and ``async`` process jobs manually.
        runner: The runner of the async interface's event loop.
        settings: Settings of bulltask; those that write defaults into options are off by default.

    Attributes:
        ids: The ids of all jobs, in the order in which they were added.
    """

    def __init__(self, url: str, name: str, form: Form, runner: asyncio.Runner, **settings: object) -> None:
        given: Any = {
            "queue_hash_tag": False,
            "lock_duration": LOCK_MS / 1000,
            "stalled_interval": STALLED_MS / 1000,
            "result_expires": None,
            "result_failure_expires": None,
            **settings,
        }
        queue = SyncFacade(AsyncQueue(name, url, **given), runner) if form == "async" else Queue(name, url, **given)
        self.queue = cast("Queue", queue)
        self.schedulers = self.queue.schedulers
        self.ids: list[str] = []
        self._held: list[ActiveJob] = []
        self._now_ms = 0
        context = self.queue.context
        setattr(context.broker.clock, "now_ms", lambda: self._now_ms)  # noqa: B010 - all users share this clock
        self.keys = context.keys
        self.flows: FlowProducer = (
            cast("FlowProducer", SyncFacade(AsyncFlowProducer(broker=lambda: context.broker), runner))
            if form == "async"
            else FlowProducer(broker=lambda: context.broker)
        )
        self._client = context.broker.client()
        self._processor: Processor = (
            WorkerProcessor(self.queue, self._client, given) if form == "worker" else ManualProcessor(self.queue)
        )
        self._redis: Any = redis.Redis.from_url(url, decode_responses=True)

    def run(self, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Run the steps; return ``{"ok": value}`` or ``{"error": text, "code": a script's or None}`` for each."""
        outcomes = []
        self._client.connect()
        for step in steps:
            self._now_ms = step["at"]
            try:
                outcomes.append({"ok": _STEPS[step["do"]](self, step)})
            except BulltaskError as exc:
                outcomes.append({"error": f"{type(exc).__name__}: {exc}", "code": _CODES.get(type(exc))})
        return outcomes

    def close(self) -> None:
        """Close all connections."""
        self._client.close()
        self._redis.close()
        self._processor.close()
        self.queue.close()

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def number(self, job_id: str) -> int:
        """Remember a job and return its number."""
        if job_id not in self.ids:
            self.ids.append(job_id)
        return self.ids.index(job_id)

    def numbers(self, ids: list[str]) -> list[int]:
        """Return the numbers of jobs by their ids."""
        return [self.ids.index(job_id) if job_id in self.ids else -1 for job_id in ids]

    def with_job(self, step: Step, work: Callable[[Job], Any]) -> Any:
        """Call ``work`` with the job that a step selects."""
        ids = self.ids
        if state := step.get("of"):
            key = self.keys.base + state
            members = self._redis.lrange(key, 0, -1) if state in _LISTS else self._redis.zrange(key, 0, -1)
            ids = [job_id for job_id in ids if job_id in members]
        if not ids:
            return "nothing"
        job = self.queue.get_job(ids[step["job"] % len(ids)])
        return "gone" if job is None else work(job)

    def add(self, step: Step) -> int:
        """Add a job."""
        return self.number(self.queue.add(step["name"], step["data"], **options_of(step["opts"])).id)

    def add_bulk(self, step: Step) -> list[int]:
        """Add several jobs."""
        jobs = [{"name": job["name"], "data": job["data"], "options": options_of(job["opts"])} for job in step["jobs"]]
        return [self.number(job.id) for job in self.queue.add_bulk(cast(Any, jobs))]

    def flow(self, step: Step) -> list[int]:
        """Add a flow; each job is remembered before its children."""
        return [self.number(node.job.id) for node in self.flows.add(self._tree(step["flow"])).walk()]

    def _tree(self, node: Step) -> FlowJob:
        children = [self._tree(child) for child in node.get("children", [])]
        options = cast(Any, options_of(node.get("opts", {})))
        return FlowJob(node["name"], self.queue.name, node.get("data"), options, children)

    def add_child(self, step: Step) -> Any:
        """Add a child to an existing job."""

        def work(parent: Job) -> int:
            address = {"id": parent.id, "queue": self.queue.qualified_name}
            options = options_of(step["opts"]) | {"parent": address}
            return self.number(self.queue.add(step["name"], step["data"], **options).id)

        return self.with_job(step, work)

    # ---- a worker's steps ----------------------------------------------------------------------------------------

    def acquire(self, step: Step) -> int | None:
        """Acquire the next job."""
        return self._hold(self._processor.acquire(step["token"]))

    def _hold(self, held: ActiveJob | None) -> int | None:
        if held is None:
            return None
        self._held.append(held)
        return self.number(held.id)

    def with_held(self, step: Step, work: Callable[[ActiveJob, str], Any]) -> Any:
        """Call ``work`` with an acquired job; then forget the job."""
        if not self._held:
            return "nothing"
        held = self._held.pop(step["held"] % len(self._held))
        return work(held, step.get("token") or held.token)

    def complete(self, step: Step) -> Any:
        """Complete a job."""
        return self.with_held(
            step,
            lambda held, token: self._hold(
                self._processor.complete(held, token, step["value"], fetch_next=step["next"])
            ),
        )

    def fail(self, step: Step) -> Any:
        """Fail an attempt."""
        kind = "PermanentError" if step.get("unrecoverable") else step.get("kind", "ConnectionError")
        failure = (kind, step["message"], step["trace"])
        return self.with_held(
            step, lambda held, token: self._hold(self._processor.fail(held, token, failure, fetch_next=step["next"]))
        )

    def delay(self, step: Step) -> Any:
        """Postpone a job."""
        return self.with_held(step, lambda held, token: self._processor.delay(held, token, step["ms"]))

    def release(self, step: Step) -> Any:
        """Release a job."""
        return self.with_held(step, self._processor.release)

    def await_children(self, step: Step) -> Any:
        """Let a job wait for its children; return whether any are pending."""
        return self.with_held(step, self._processor.await_children)

    def _held_job(self, step: Step) -> ActiveJob | None:
        return self._held[step["held"] % len(self._held)] if self._held else None

    def extend_lock(self, step: Step) -> Any:
        """Renew one lock."""
        if (held := self._held_job(step)) is None:
            return "nothing"
        token = step.get("token") or held.token
        job = self.queue.get_job(held.id)
        if job is None:  # Node's Job object does not check this
            return self._client.run(extend_lock(self.keys, held.id, token, step["ms"]))
        return job.extend_lock(token, step["ms"] / 1000)

    def extend_locks(self, step: Step) -> list[int]:
        """Renew all locks; return the numbers of the jobs whose locks are lost."""
        held = [(held.token, held.id) for held in self._held]
        if not held:
            return []
        return self.numbers(self._client.run(renew_locks(self.keys, held, step["ms"])))

    def expire_lock(self, step: Step) -> Any:
        """Let a lock expire."""
        if (held := self._held_job(step)) is None:
            return "nothing"
        return self._redis.delete(self.keys.lock(held.id))

    def check_stalled(self, step: Step) -> list[int]:
        """Run the stalled check, regardless of when the last one was."""
        self._redis.delete(self.keys.stalled_check)
        return self.numbers(self.queue.check_stalled(1))

    def flag(self, *, paused: bool) -> None:
        """Pause or resume as BullMQ 6 does, with the flag alone."""
        if paused:
            self._redis.hset(self.keys.meta, "paused", 1)
        else:
            self._redis.hdel(self.keys.meta, "paused")

    # ---- schedulers ----------------------------------------------------------------------------------------------

    def upsert_scheduler(self, step: Step) -> bool:
        """Create or change a scheduler; return whether it has a next job."""
        repeat, template = dict(step["repeat"]), step["template"]
        if "every" in repeat:
            repeat["every"] /= 1000
        if "pattern" in repeat:
            repeat["cron"] = repeat.pop("pattern")
        scheduler = self.schedulers.upsert(
            step["id"],
            name=template["name"],
            data=template["data"],
            options=cast(Any, options_of(template["opts"])),
            **repeat,
        )
        return scheduler is not None

    def get_scheduler(self, step: Step) -> Any:
        """Return a scheduler with Node's field names."""
        scheduler = self.schedulers.get(step["id"])
        if scheduler is None:
            return None
        return {
            "key": scheduler.id,
            "name": scheduler.name,
            "next": scheduler.next_ms,
            "iterationCount": scheduler.iterations,
        }

    def remove_repeatable(self, step: Step) -> bool:
        """Remove a repeatable job by its name and rule."""
        rule = dict(step["repeat"])
        options: dict[str, Any] = {"cron": rule.get("pattern"), "tz": rule.get("tz"), "job_id": step.get("jobId")}
        if "every" in rule:
            options["every"] = rule["every"] / 1000
        if "endDate" in rule:
            options["end"] = datetime.fromtimestamp(rule["endDate"] / 1000, UTC)
        return self.queue.repeatables.remove(step["name"], **options)

    # ---- reading -------------------------------------------------------------------------------------------------

    def jobs(self, step: Step) -> list[int]:
        """Read jobs."""
        jobs = self.queue.get_jobs(step["states"], step["start"], step["end"], asc=step["asc"])
        return self.numbers([job.id for job in jobs])

    def of_state(self, step: Step) -> list[Any]:
        """Return the jobs of one state, and their number."""
        name = re.sub(r"(?<=.)([A-Z])", r"_\1", step["state"]).lower()
        jobs = getattr(self.queue, f"get_{name}")(step["start"], step["end"])
        return [self.numbers([job.id for job in jobs]), getattr(self.queue, f"get_{name}_count")()]

    def finished(self, step: Step) -> Any:
        """Return how a job ended."""

        def work(job: Job) -> list[Any]:
            reply = self._client.run(is_finished(self.keys, job.id))
            return [0] if reply is None else [1 if reply.completed else 2, reply.text]

        return self.with_job(step, work)

    def metrics(self, step: Step) -> dict[str, Any]:
        """Return the counts of finished jobs."""
        metrics = self._client.run(get_metrics(self.keys, step["kind"], 0, -1))
        facts = {"count": metrics.count, "prevTS": metrics.previous_ms, "prevCount": metrics.previous_count}
        return {"meta": facts, "data": list(metrics.data), "count": metrics.points}


def options_of(opts: Mapping[str, Any]) -> dict[str, Any]:
    """Translate Node's job options to bulltask's; without these options, Node makes one attempt."""
    options: dict[str, Any] = {"attempts": 0, "backoff": None}
    for name, value in opts.items():
        if name == "delay":
            options["delay"] = value / 1000
        elif name == "backoff":
            options["backoff"] = value / 1000 if isinstance(value, int) else {**value, "delay": value["delay"] / 1000}
        elif name == "deduplication":
            ttl = {"ttl": value["ttl"] / 1000} if "ttl" in value else {}
            options["deduplication"] = {**value, **ttl}
        else:
            options[_OPTIONS[name]] = value
    return options


def _on_queue(work: Callable[[Queue, Step], Any]) -> Callable[[BulltaskSide, Step], Any]:
    return lambda run, step: work(run.queue, step)


def _on_job(work: Callable[[Job, Step], Any]) -> Callable[[BulltaskSide, Step], Any]:
    return lambda run, step: run.with_job(step, lambda job: work(job, step))


_STEPS: dict[str, Callable[[BulltaskSide, Step], Any]] = {
    "add": BulltaskSide.add,
    "add_bulk": BulltaskSide.add_bulk,
    "flow": BulltaskSide.flow,
    "add_child": BulltaskSide.add_child,
    "pause": _on_queue(lambda queue, step: queue.pause()),
    "resume": _on_queue(lambda queue, step: queue.resume()),
    "drain": _on_queue(lambda queue, step: queue.drain(delayed=step["delayed"])),
    "clean": lambda run, step: run.numbers(run.queue.clean(step["grace"] / 1000, step["limit"], step["state"])),
    "obliterate": _on_queue(lambda queue, step: queue.obliterate(force=step["force"])),
    "retry_jobs": _on_queue(lambda queue, step: queue.retry_jobs(state=step["state"])),
    "promote_jobs": _on_queue(lambda queue, step: queue.promote_jobs()),
    "rate_limit": _on_queue(lambda queue, step: queue.rate_limit(step["ms"] / 1000)),
    "remove_rate_limit": _on_queue(lambda queue, step: queue.remove_rate_limit_key()),
    "set_concurrency": _on_queue(lambda queue, step: queue.set_global_concurrency(step["n"])),
    "remove_concurrency": _on_queue(lambda queue, step: queue.remove_global_concurrency()),
    "set_rate": _on_queue(lambda queue, step: queue.set_global_rate_limit(step["max"], step["ms"] / 1000)),
    "remove_rate": _on_queue(lambda queue, step: queue.remove_global_rate_limit()),
    "remove_dedup": _on_queue(lambda queue, step: queue.remove_deduplication_key(step["id"])),
    "flag_on": lambda run, step: run.flag(paused=True),
    "flag_off": lambda run, step: run.flag(paused=False),
    "acquire": BulltaskSide.acquire,
    "complete": BulltaskSide.complete,
    "fail": BulltaskSide.fail,
    "delay": BulltaskSide.delay,
    "release": BulltaskSide.release,
    "await_children": BulltaskSide.await_children,
    "extend_lock": BulltaskSide.extend_lock,
    "extend_locks": BulltaskSide.extend_locks,
    "expire_lock": BulltaskSide.expire_lock,
    "check_stalled": BulltaskSide.check_stalled,
    "upsert_scheduler": BulltaskSide.upsert_scheduler,
    "get_scheduler": BulltaskSide.get_scheduler,
    "repeatables": lambda run, step: [
        [repeatable.key, repeatable.name, repeatable.next_ms] for repeatable in run.queue.repeatables.list()
    ],
    "remove_repeatable": BulltaskSide.remove_repeatable,
    "remove_repeatable_by_key": lambda run, step: run.queue.repeatables.remove_by_key(step["key"]),
    "remove_scheduler": lambda run, step: run.schedulers.remove(step["id"]),
    "promote": _on_job(lambda job, step: job.promote()),
    "change_delay": _on_job(lambda job, step: job.change_delay(step["ms"] / 1000)),
    "change_priority": _on_job(lambda job, step: job.change_priority(step["priority"], lifo=step["lifo"])),
    "update_data": _on_job(lambda job, step: job.update_data(step["data"])),
    "progress": _on_job(lambda job, step: job.update_progress(step["value"])),
    "log": _on_job(lambda job, step: job.log(step["line"])),
    "clear_logs": _on_job(lambda job, step: job.clear_logs(step["keep"])),
    "retry": _on_job(lambda job, step: job.retry(step["state"])),
    "remove": _on_job(lambda job, step: job.remove(children=step["children"])),
    "remove_dependency": _on_job(lambda job, step: job.remove_child_dependency()),
    "remove_unprocessed": _on_job(lambda job, step: job.remove_unprocessed_children()),
    "of_state": BulltaskSide.of_state,
    "count_by_types": _on_queue(lambda queue, step: queue.get_job_count_by_types(*step["states"])),
    "counts": _on_queue(lambda queue, step: queue.get_job_counts(*step["states"])),
    "counts_per_priority": _on_queue(
        lambda queue, step: {str(k): v for k, v in queue.get_counts_per_priority(step["priorities"]).items()}
    ),
    "jobs": BulltaskSide.jobs,
    "state": _on_job(lambda job, step: job.get_state().value),
    "finished": BulltaskSide.finished,
    "is_maxed": _on_queue(lambda queue, step: queue.is_maxed()),
    "rate_ttl": _on_queue(lambda queue, step: math.ceil(queue.get_rate_limit_ttl(step["max"]) / 100)),
    "metrics": BulltaskSide.metrics,
    "dependency_counts": _on_job(lambda job, step: job.get_dependencies_count()),
    "dependencies": lambda run, step: run.with_job(
        step, lambda job: run.queue.get_dependencies(job.id, step["kind"]).total
    ),
}
