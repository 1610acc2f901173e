"""The steps of the differential tests as bulltask does them; Node's side is ``../node/sequence.js``.

A step is ``{"do": name, "at": epoch ms, …}``. ``"job": k`` means the k-th job that was ever made (modulo how many
there are), with ``"of": state`` the k-th of those in that state, ``"held": k`` the k-th of those that were taken and
not ended. Options are spelled as Node spells them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC
from types import SimpleNamespace
from typing import Any, Final, cast

import redis

from bulltask import App, codec
from bulltask.errors import BulltaskError, NothingPending, PermanentError
from bulltask.events import Bus
from bulltask.job import ActiveJob, NewJob, ParentLink
from bulltask.queue.following import following
from bulltask.queue.job import Job
from bulltask.queue.queue import Queue
from bulltask.queue.schedulers import JobSchedulers
from bulltask.transport import scripts_move
from bulltask.transport.call import Call
from bulltask.transport.replies import JOB_ERRORS, Fetched
from bulltask.transport.scripts_add import add_job
from bulltask.transport.scripts_job import extend_lock
from bulltask.transport.scripts_queue import get_metrics
from bulltask.transport.scripts_read import is_finished
from bulltask.transport.scripts_schedule import update_job_scheduler
from bulltask.transport.transaction import atomic
from bulltask.worker.child.settle import Settler
from bulltask.worker.child.verdict import judge
from bulltask.worker.child.work import Completed, Failed, Picked, RetryLater

__all__ = ["LOCK_MS", "WORKER", "Ours"]

LOCK_MS: Final = 300_000
WORKER: Final = "w"
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

_ERRORS: Final[Mapping[str, type[Exception]]] = {"ConnectionError": ConnectionError, "ValueError": ValueError}

Step = Mapping[str, Any]


class Ours:
    """One queue, driven by steps.

    Args:
        url: the server.
        name: the queue.
        settings: of bulltask; those that would write defaults into options are off unless they are given.

    Attributes:
        ids: of all jobs, in the order in which they were made.
    """

    def __init__(self, url: str, name: str, **settings: object) -> None:
        given: Any = {
            "queue_hash_tag": False,
            "lock_duration": LOCK_MS / 1000,
            "result_expires": None,
            "result_failure_expires": None,
            **settings,
        }
        self.app = App("differential", url, **given)
        self.queue = Queue(name, url, **given)
        self.schedulers = JobSchedulers(self.queue.link)
        self.ids: list[str] = []
        self._held: list[Picked] = []
        self._now_ms = 0
        link = self.queue.link
        setattr(link.broker.clock, "now_ms", lambda: self._now_ms)  # noqa: B010 - every user of the clock has this one
        self.keys = link.keys
        self._settler = Settler(self.app.conf.freeze(), link.broker.clock, Bus(), WORKER)
        self._client = link.broker.client()
        self._redis: Any = redis.Redis.from_url(url, decode_responses=True)

    def run(self, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Do the steps; the outcomes are ``{"ok": value}`` or ``{"error": text, "code": a script's or None}``."""
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
        self.queue.close()
        self.app.close()

    # ---- jobs ----------------------------------------------------------------------------------------------------

    def number(self, job_id: str) -> int:
        """Remember a job and return its number."""
        if job_id not in self.ids:
            self.ids.append(job_id)
        return self.ids.index(job_id)

    def numbers(self, ids: list[str]) -> list[int]:
        """The numbers of jobs that are known."""
        return [self.ids.index(job_id) if job_id in self.ids else -1 for job_id in ids]

    def with_job(self, step: Step, work: Callable[[Job], Any]) -> Any:
        """Do something with the job that the step means."""
        ids = self.ids
        if state := step.get("of"):
            key = self.keys.base + state
            there = self._redis.lrange(key, 0, -1) if state in _LISTS else self._redis.zrange(key, 0, -1)
            ids = [job_id for job_id in ids if job_id in there]
        if not ids:
            return "nothing"
        job = self.queue.get_job(ids[step["job"] % len(ids)])
        return "gone" if job is None else work(job)

    def add(self, step: Step) -> int:
        """Add a job."""
        return self.number(self.queue.add(step["name"], step["data"], **options_of(step["opts"])).id)

    def add_bulk(self, step: Step) -> list[int]:
        """Add several."""
        jobs = [{"name": job["name"], "data": job["data"], "options": options_of(job["opts"])} for job in step["jobs"]]
        return [self.number(job.id) for job in self.queue.add_bulk(cast(Any, jobs))]

    def flow(self, step: Step) -> list[int]:
        """Add a tree of jobs in one transaction."""
        new = self._tree(step["flow"], None)
        calls = [add_job(self.keys, job, self._now_ms) for job in new]
        results = self._client.run_many(atomic(calls, "here"))[-1]
        for result in results:
            if isinstance(result, BulltaskError):
                raise result
        return [self.number(job_id) for job_id in results]

    def _tree(self, node: Step, parent: NewJob | None) -> list[NewJob]:
        job = self.queue.link.build(node["name"], node.get("data"), options_of(node.get("opts", {})))
        if parent is not None:
            qualified = self.keys.base[:-1]
            flags = {name: True for name in ("fpof", "cpof", "idof", "rdof") if name in job.options.more}
            link = ParentLink(self.keys.job(parent.id), {"id": parent.id, "queueKey": qualified, **flags})
            more = {**job.options.more, "parent": {"id": parent.id, "queue": qualified}}
            job = replace(job, parent=link, options=replace(job.options, more=more))
        children = node.get("children", [])
        job = replace(job, has_children=bool(children))
        return [job, *(new for child in children for new in self._tree(child, job))]

    def add_child(self, step: Step) -> Any:
        """Add a child to a job that is there."""

        def work(parent: Job) -> int:
            address = {"id": parent.id, "queue": self.queue.qualified_name}
            options = options_of(step["opts"]) | {"parent": address}
            return self.number(self.queue.add(step["name"], step["data"], **options).id)

        return self.with_job(step, work)

    # ---- a worker's steps ----------------------------------------------------------------------------------------

    def take(self, step: Step) -> int | None:
        """Take the next job."""
        claim = scripts_move.Claim(step["token"], LOCK_MS, WORKER)
        return self._hold(self._client.run(scripts_move.move_to_active(self.keys, claim, self._now_ms)), step["token"])

    def _hold(self, fetched: Fetched, token: str) -> int | None:
        if not fetched.job_id:
            return None
        job = ActiveJob.from_hash(self.keys.queue, fetched.job_id, fetched.fields)
        if job.scheduler_id and (iteration := following(job, self._now_ms, UTC)) is not None:
            self._client.run(update_job_scheduler(self.keys, job.scheduler_id, job.id, iteration, self._now_ms))
        self._held.append(Picked(cast(Any, SimpleNamespace(token=token)), 0, self.keys, job))
        return self.number(job.id)

    def with_held(self, step: Step, work: Callable[[Picked, str], Any]) -> Any:
        """Do something with a job that was taken, and let it go."""
        if not self._held:
            return "nothing"
        picked = self._held.pop(step["held"] % len(self._held))
        token = step.get("token") or picked.slot.token
        return work(replace(picked, slot=cast(Any, SimpleNamespace(token=token))), token)

    def complete(self, step: Step) -> Any:
        """Complete a job."""

        def work(picked: Picked, token: str) -> int | None:
            outcome = Completed(codec.encode(step["value"], what="value"), step["value"])
            return self._finish(self._settler.call(picked, outcome, fetch_next=step["next"]), token)

        return self.with_held(step, work)

    def fail(self, step: Step) -> Any:
        """Let an attempt fail."""

        def work(picked: Picked, token: str) -> int | None:
            kind = PermanentError if step.get("unrecoverable") else _ERRORS[step.get("kind", "ConnectionError")]
            outcome = judge(kind(step["message"]), picked.job, None, self.app)
            assert isinstance(outcome, Failed | RetryLater)
            outcome = replace(outcome, trace=step["trace"])
            return self._finish(self._settler.call(picked, outcome, fetch_next=step["next"]), token)

        return self.with_held(step, work)

    def _finish(self, call: Call[Any], token: str) -> int | None:
        reply = self._client.run(call)
        return self._hold(reply, token) if isinstance(reply, Fetched) else None

    def delay(self, step: Step) -> Any:
        """Put a job off."""
        return self.with_held(
            step,
            lambda picked, token: self._client.run(
                scripts_move.move_to_delayed(
                    self.keys, picked.job.id, token, step["ms"], failure=None, now_ms=self._now_ms
                )
            ),
        )

    def give_back(self, step: Step) -> Any:
        """Give a job back."""
        return self.with_held(
            step,
            lambda picked, token: self._client.run(
                scripts_move.move_from_active_to_wait(self.keys, picked.job.id, token)
            ),
        )

    def await_children(self, step: Step) -> Any:
        """Let a job wait for its children; true if it has some that are pending."""

        def work(picked: Picked, token: str) -> bool:
            try:
                self._client.run(scripts_move.move_to_waiting_children(self.keys, picked.job.id, token, self._now_ms))
            except NothingPending:
                return False
            return True

        return self.with_held(step, work)

    def _held_one(self, step: Step) -> Picked | None:
        return self._held[step["held"] % len(self._held)] if self._held else None

    def extend_lock(self, step: Step) -> Any:
        """Renew one lock."""
        if (picked := self._held_one(step)) is None:
            return "nothing"
        token = step.get("token") or picked.slot.token
        job = self.queue.get_job(picked.job.id)
        if job is None:  # Node's Job object does not look
            return self._client.run(extend_lock(self.keys, picked.job.id, token, step["ms"]))
        return job.extend_lock(token, step["ms"] / 1000)

    def extend_locks(self, step: Step) -> list[int]:
        """Renew all locks; the numbers of those that are lost."""
        held = [(picked.slot.token, picked.job.id) for picked in self._held]
        if not held:
            return []
        return self.numbers(self._client.run(scripts_move.renew_locks(self.keys, held, step["ms"])))

    def lose_lock(self, step: Step) -> Any:
        """Let a lock run out."""
        if (picked := self._held_one(step)) is None:
            return "nothing"
        return self._redis.delete(self.keys.lock(picked.job.id))

    def check_stalled(self, step: Step) -> list[int]:
        """Look for stalled jobs, whenever the last look was."""
        self._redis.delete(self.keys.stalled_check)
        call = scripts_move.move_stalled_jobs_to_wait(self.keys, 1, STALLED_MS, self._now_ms)
        return self.numbers(self._client.run(call))

    def flag(self, *, paused: bool) -> None:
        """Pause or resume as BullMQ 6 does, by the flag alone."""
        if paused:
            self._redis.hset(self.keys.meta, "paused", 1)
        else:
            self._redis.hdel(self.keys.meta, "paused")

    # ---- schedulers ----------------------------------------------------------------------------------------------

    def upsert_scheduler(self, step: Step) -> bool:
        """Make or change a scheduler; true if a job of it follows."""
        repeat, template = dict(step["repeat"]), step["template"]
        if "every" in repeat:
            repeat["every"] /= 1000
        if "pattern" in repeat:
            repeat["cron"] = repeat.pop("pattern")
        made = self.schedulers.upsert(
            step["id"],
            name=template["name"],
            data=template["data"],
            options=cast(Any, options_of(template["opts"])),
            **repeat,
        )
        return made is not None

    def get_scheduler(self, step: Step) -> Any:
        """What a scheduler says of itself, in Node's words."""
        found = self.schedulers.get(step["id"])
        if found is None:
            return None
        return {"key": found.id, "name": found.name, "next": found.next_ms, "iterationCount": found.iterations}

    # ---- questions -----------------------------------------------------------------------------------------------

    def jobs(self, step: Step) -> list[int]:
        """Read jobs."""
        found = self.queue.get_jobs(step["states"], step["start"], step["end"], asc=step["asc"])
        return self.numbers([job.id for job in found])

    def finished(self, step: Step) -> Any:
        """How a job ended."""

        def work(job: Job) -> list[Any]:
            said = self._client.run(is_finished(self.keys, job.id))
            return [0] if said is None else [1 if said.completed else 2, said.text]

        return self.with_job(step, work)

    def metrics(self, step: Step) -> dict[str, Any]:
        """How many jobs ended."""
        said = self._client.run(get_metrics(self.keys, step["kind"], 0, -1))
        facts = {"count": said.count, "prevTS": said.previous_ms, "prevCount": said.previous_count}
        return {"meta": facts, "data": list(said.data), "count": said.points}


def options_of(opts: Mapping[str, Any]) -> dict[str, Any]:
    """Node's options of a job in bulltask's words; Node retries at once unless told otherwise, and only once."""
    found: dict[str, Any] = {"attempts": 0, "backoff": None}
    for name, value in opts.items():
        if name == "delay":
            found["delay"] = value / 1000
        elif name == "backoff":
            found["backoff"] = value / 1000 if isinstance(value, int) else {**value, "delay": value["delay"] / 1000}
        elif name == "deduplication":
            ttl = {"ttl": value["ttl"] / 1000} if "ttl" in value else {}
            found["deduplication"] = {**value, **ttl}
        else:
            found[_OPTIONS[name]] = value
    return found


def _on_queue(work: Callable[[Queue, Step], Any]) -> Callable[[Ours, Step], Any]:
    return lambda run, step: work(run.queue, step)


def _on_job(work: Callable[[Job, Step], Any]) -> Callable[[Ours, Step], Any]:
    return lambda run, step: run.with_job(step, lambda job: work(job, step))


_STEPS: dict[str, Callable[[Ours, Step], Any]] = {
    "add": Ours.add,
    "add_bulk": Ours.add_bulk,
    "flow": Ours.flow,
    "add_child": Ours.add_child,
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
    "take": Ours.take,
    "complete": Ours.complete,
    "fail": Ours.fail,
    "delay": Ours.delay,
    "give_back": Ours.give_back,
    "await_children": Ours.await_children,
    "extend_lock": Ours.extend_lock,
    "extend_locks": Ours.extend_locks,
    "lose_lock": Ours.lose_lock,
    "check_stalled": Ours.check_stalled,
    "upsert_scheduler": Ours.upsert_scheduler,
    "get_scheduler": Ours.get_scheduler,
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
    "counts": _on_queue(lambda queue, step: queue.get_job_counts(*step["states"])),
    "counts_per_priority": _on_queue(
        lambda queue, step: {str(k): v for k, v in queue.get_counts_per_priority(step["priorities"]).items()}
    ),
    "jobs": Ours.jobs,
    "state": _on_job(lambda job, step: job.get_state().value),
    "finished": Ours.finished,
    "is_maxed": _on_queue(lambda queue, step: queue.is_maxed()),
    "rate_ttl": _on_queue(lambda queue, step: math.ceil(queue.get_rate_limit_ttl(step["max"]) / 100)),
    "metrics": Ours.metrics,
    "dependency_counts": _on_job(lambda job, step: job.get_dependencies_count()),
    "dependencies": lambda run, step: run.with_job(
        step, lambda job: run.queue.get_dependencies(job.id, step["kind"]).total
    ),
}
