"""Run operations of the official Python client, from stdin to stdout, in a separate environment without bulltask.

The protocol is that of node/bridge.js:

    in    {"id": 1, "op": "queue.add", "queue": "{mail}", "name": "send", "data": {}}   one JSON object per line
    out   {"id": 1, "ok": {...}}  or  {"id": 1, "error": "TypeError: the message"}     in order of completion
    out   {"event": "worker.error", "args": {...}, "queue": "{mail}"}                   whenever it happens

The process exits immediately at the end of stdin: a worker with jobs must not outlive the test.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import bullmq  # type: ignore[import-not-found] # only in the environment that runs this file
from bullmq.custom_errors import UnrecoverableError  # type: ignore[import-not-found]

FIELDS = {
    **{name: name for name in ("id", "name", "data", "opts", "progress", "returnvalue", "failedReason", "stacktrace")},
    **{name: name for name in ("attemptsMade", "attemptsStarted", "stalledCounter", "timestamp", "processedOn")},
    **{name: name for name in ("finishedOn", "delay", "parentKey")},
}
OUT = os.dup(1)
os.dup2(2, 1)  # the client prints tracebacks; only replies and events may be on the original stdout


def write(message: dict[str, Any]) -> None:
    """Write one line; jobs in threads write too."""
    os.write(OUT, json.dumps(message).encode() + b"\n")


def emit(event: str, args: dict[str, Any], **more: Any) -> None:
    """Write an event."""
    write({"event": event, "args": args, **more})


def plain(value: Any) -> Any:
    """Convert a method's result to JSON: jobs become their fields, alone, in lists and in flows."""
    if isinstance(value, bullmq.Job):
        return {name: getattr(value, field, None) for name, field in FIELDS.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    return value


async def resolve(value: Any) -> Any:
    """Await a value if it is awaitable: some methods are coroutines, others return one."""
    return await value if inspect.isawaitable(value) else value


# ---- processors -----------------------------------------------------------------------------------------------------

Processor = Callable[[Any, str], Awaitable[Any]]


def echo(_: dict[str, Any]) -> Processor:
    async def run(job: Any, _token: str) -> Any:
        return job.data

    return run


def fail(args: dict[str, Any]) -> Processor:
    async def run(_job: Any, _token: str) -> Any:
        raise (UnrecoverableError if args.get("unrecoverable") else Exception)(args.get("message", "it failed"))

    return run


def fail_n(args: dict[str, Any]) -> Processor:
    """Raise in the first ``n`` attempts; then return their number."""

    async def run(job: Any, _token: str) -> Any:
        if job.attemptsMade < args["n"]:
            raise ConnectionResetError(f"attempt {job.attemptsMade + 1} failed")
        return job.attemptsMade

    return run


def progress(args: dict[str, Any]) -> Processor:
    async def run(job: Any, _token: str) -> Any:
        for step in args["steps"]:
            await job.updateProgress(step)
            await job.log(f"at {step}")
        return len(args["steps"])

    return run


def gather(_: dict[str, Any]) -> Processor:
    async def run(job: Any, _token: str) -> Any:
        return sorted((await job.getChildrenValues()).values())

    return run


def sleep(args: dict[str, Any]) -> Processor:
    """Take ``ms`` milliseconds without blocking the event loop."""

    async def run(job: Any, _token: str) -> Any:
        emit("start", {"jobId": job.id})
        await asyncio.sleep(args["ms"] / 1000)
        return args["ms"]

    return run


def block(args: dict[str, Any]) -> Processor:
    """Block the event loop until a file exists, like code that computes or calls a blocking library."""

    async def run(job: Any, _token: str) -> Any:
        emit("start", {"jobId": job.id})
        while not Path(args["until"]).exists():  # noqa: ASYNC240 (blocking is its purpose)
            threading.Event().wait(0.02)
        return "official"

    return run


def record(args: dict[str, Any]) -> Processor:
    """Append "<job id> <process id>" to a file, in one write."""
    handle = os.open(args["file"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    async def run(job: Any, _token: str) -> Any:
        os.write(handle, f"{job.id} {os.getpid()}\n".encode())
        return os.getpid()

    return run


def attempt(args: dict[str, Any]) -> Processor:
    """Take the ``ms`` of the job's data; before and after, append "start" or "end <job id> <process id> <epoch ms>"."""
    handle = os.open(args["file"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    async def run(job: Any, _token: str) -> Any:
        os.write(handle, f"start {job.id} {os.getpid()} {int(time.time() * 1000)}\n".encode())
        await asyncio.sleep(job.data["ms"] / 1000)
        os.write(handle, f"end {job.id} {os.getpid()} {int(time.time() * 1000)}\n".encode())
        return job.data["ms"]

    return run


def nan(_: dict[str, Any]) -> Processor:
    async def run(_job: Any, _token: str) -> Any:
        return float("nan")

    return run


PROCESSORS = {
    factory.__name__.replace("_", "-"): factory for factory in (echo, fail, fail_n, progress, gather, sleep, block)
}
PROCESSORS |= {"attempt": attempt, "record": record, "nan": nan}


# ---- operations ------------------------------------------------------------------------------------------------------


class Bridge:
    """The queues, flow producers and workers of this process."""

    def __init__(self) -> None:
        self._queues: dict[str, Any] = {}
        self._workers: dict[str, Any] = {}

    async def run(self, op: str, fields: dict[str, Any]) -> Any:
        """Run one operation."""
        kind, _, name = op.partition(".")
        return plain(await resolve(getattr(self, f"{kind}_{name}" if name else kind)(**fields)))

    def queue(self, queue: str, connection: dict[str, Any], prefix: str, **opts: Any) -> Any:
        key = json.dumps([queue, connection, prefix, opts])
        if key not in self._queues:
            self._queues[key] = bullmq.Queue(queue, {"connection": connection, "prefix": prefix, **opts})
        return self._queues[key]

    async def job(self, job: str, at: dict[str, Any]) -> Any:
        stored = await bullmq.Job.fromId(self.queue(**at), job)
        if stored is None:
            raise LookupError(f"no job {job} in queue {at['queue']}")
        return stored

    async def queue_add(self, name: str, data: Any, opts: dict[str, Any], **at: Any) -> Any:
        return await self.queue(**at).add(name, data, opts)

    async def queue_getJobCounts(self, states: list[str] | None = None, **at: Any) -> Any:
        return await self.queue(**at).getJobCounts(*(states or ()))

    async def queue_getJob(self, job: str, **at: Any) -> Any:
        queue = self.queue(**at)
        stored = await bullmq.Job.fromId(queue, job)
        if stored is None:
            return None
        return {**plain(stored), "state": await stored.getState(), "logs": (await queue.getJobLogs(job))["logs"]}

    async def queue_call(self, method: str, args: list[Any], **at: Any) -> Any:
        return await resolve(getattr(self.queue(**at), method)(*args))

    async def job_call(self, job: str, method: str, args: list[Any], **at: Any) -> Any:
        return await resolve(getattr(await self.job(job, at), method)(*args))

    async def flow_add(self, flow: dict[str, Any], connection: dict[str, Any], prefix: str) -> Any:
        flows = bullmq.FlowProducer(connection, {"prefix": prefix})
        try:
            return plain(await flows.add(flow))
        finally:
            await flows.close()

    async def flow_state(self, flow: dict[str, Any], connection: dict[str, Any], prefix: str) -> Any:
        """Add a flow, and read the state of the returned job."""
        flows = bullmq.FlowProducer(connection, {"prefix": prefix})
        try:
            job = (await flows.add(flow))["job"]
            return {"id": job.id, "state": await job.getState()}
        finally:
            await flows.close()

    def worker_start(self, queue: str, connection: dict[str, Any], prefix: str, processor: str, **more: Any) -> str:
        opts = {"connection": connection, "prefix": prefix, **more.get("opts", {})}
        worker = bullmq.Worker(queue, PROCESSORS[processor](more.get("args", {})), opts)
        worker.on("error", lambda error, *_: emit("worker.error", {"message": str(error)}, queue=queue))
        worker.on("stalled", lambda job: emit("worker.stalled", {"jobId": job}, queue=queue))
        worker.on("completed", lambda job, _: emit("worker.completed", {"jobId": job.id}, queue=queue))
        worker.on("failed", lambda job, error: emit("worker.failed", {"jobId": job.id, "failedReason": str(error)}))
        self._workers[handle := f"Worker-{len(self._workers) + 1}"] = worker
        return handle

    async def worker_call(self, worker: str, method: str, args: list[Any] | None = None, **_: Any) -> Any:
        return await resolve(getattr(self._workers[worker], method)(*(args or ())))

    async def worker_close(self, worker: str, **_: Any) -> None:
        await self._workers[worker].close()

    async def names(self, connection: dict[str, Any], prefix: str) -> dict[str, list[str]]:
        """Return the names in the package and its classes, for tests of missing names."""
        at: dict[str, Any] = {"connection": connection, "prefix": prefix}
        queue = self.queue("names", **at)
        objects = [queue, bullmq.Job(queue, "a", {}), bullmq.FlowProducer(connection, at), bullmq.Worker("a", None, at)]
        members = {type(item).__name__: [name for name in dir(item) if not name.startswith("_")] for item in objects}
        awaited = [name for name, method in inspect.getmembers(queue, inspect.iscoroutinefunction)]
        folder = Path(bullmq.__file__).parent
        more = {"awaited": awaited, "files": [path.name for path in folder.iterdir()], "version": [version("bullmq")]}
        return {**members, "bullmq": dir(bullmq), **more}

    async def reset(self, **_: Any) -> None:
        """Close everything. Workers are cancelled, because a close would wait for running jobs and for BZPOPMIN."""
        for worker in self._workers.values():
            await (cancel_worker(worker) if hasattr(worker, "timer") else worker.close(True))
        for queue in self._queues.values():
            await queue.close()
        self._workers.clear()
        self._queues.clear()


async def cancel_worker(worker: Any) -> None:
    """Stop a worker of 2.x, whose forced close leaves its timers running."""
    worker.closing = worker.closed = True
    worker.cancelProcessing()
    for timer in (worker.timer, worker.stalledCheckTimer):
        timer.stop()
    await worker.redisConnection.close()
    await worker.blockingRedisConnection.close()


async def answer(bridge: Bridge, line: bytes) -> None:
    """Run the operation of a line, and write its result."""
    message = json.loads(line)
    number, op = message.pop("id"), message.pop("op")
    try:
        write({"id": number, "ok": await bridge.run(op, message)})
    except Exception as error:  # noqa: BLE001 (any error of the client is the reply)
        write({"id": number, "error": f"{type(error).__name__}: {error}"})


async def main() -> None:
    """Read all lines, and run each in a separate task."""
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin.buffer:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    bridge, tasks = Bridge(), set()
    while line := await lines.get():
        tasks.add(task := asyncio.create_task(answer(bridge, line)))
        task.add_done_callback(tasks.discard)


asyncio.run(main())
