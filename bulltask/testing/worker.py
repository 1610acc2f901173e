"""What tests use besides the inline worker: servers, worker processes, and assertions on the jobs that were sent.

:func:`use_server` lets an app use a test's server and clock; :func:`assert_enqueued` checks which jobs the code under
test has sent; :class:`RedisServer` and :class:`WorkerProcess` are real processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, Self, TypeVar

from bulltask.app import App
from bulltask.embedded import EmbeddedServer, find_binary
from bulltask.embedded.server import Flavor, wait_for_exit
from bulltask.jobs import codec
from bulltask.jobs.clock import mono_s, to_epoch_ms, to_ms
from bulltask.jobs.errors import BulltaskError
from bulltask.queue import Job
from bulltask.registry.batches import to_wire
from bulltask.registry.task import AnyTask
from bulltask.testing.inline import FakeClock, queues_in_redis
from bulltask.transport.broker import Broker
from bulltask.transport.call import AllNodesCall, command

__all__ = ["RedisServer", "WorkerProcess", "assert_enqueued", "enqueued_jobs", "use_server", "wait_until"]

T = TypeVar("T")

_SETTINGS: Final[Mapping[str, object]] = {"lock_duration": 86_400}
"""A debugger may stop a task for longer than the default lock lasts, and no supervisor renews the lock."""


@contextmanager
def use_server(app: App, url: str, **settings: object) -> Iterator[FakeClock]:
    """Let an app use another server, which is emptied, and a clock that the test can advance.

    Example, for test suites without pytest::

        with RedisServer.start(directory) as server, use_server(app, server.url), InlineWorker(app) as worker:
            add.delay(1, 2)
            worker.run_jobs()

    Args:
        app: The app; jobs that it sends inside the ``with`` block are stored in this server.
        url: The server, **which is emptied**.
        settings: Other settings; they override the app's own settings and the environment.

    Returns:
        The clock.

    Raises:
        ConfigError: A setting is invalid.
        BrokerUnavailableError: The server cannot be reached.
    """
    conf = app.conf.overridden({**_SETTINGS, **settings, "broker_url": url})
    clock = FakeClock()
    broker = Broker(conf.freeze(), url, clock=clock)
    clock.connect(broker.pool)
    broker.pool.run(AllNodesCall(command("FLUSHDB"), len))
    # In eager mode, the app makes its connections itself.
    previous = app._replace_connections(conf, None if conf.freeze().always_eager else broker)
    try:
        yield clock
    finally:
        app.close()
        broker.close()
        app._replace_connections(*previous)


_STATES: Final = ("waiting", "prioritized", "delayed", "waiting-children")
_ETA_TOLERANCE_MS: Final = 1_000


def enqueued_jobs(app: App) -> list[Job]:
    """Return the jobs that are waiting or delayed, in all queues, oldest first."""
    with app._broker.pool.client() as client:
        client.connect()
        names = [keys.queue for keys in queues_in_redis(app, client)]
    jobs = [job for name in names for job in app.queue(name).get_jobs(_STATES)]
    return sorted(jobs, key=lambda job: (job.timestamp_ms, job.id))


def assert_enqueued(
    app: App,
    task: AnyTask[Any, Any] | str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    count: int | None = None,
    **expected: Any,
) -> list[Job]:
    """Assert that a job is waiting or delayed, in any queue; jobs that have already run do not count.

    Args:
        app: The app.
        task: The task or its name.
        args, kwargs: Some or all of the job's arguments; the others may have any value.
        count: The exact number of such jobs, 0 for none; ``None`` means at least one.
        expected: ``countdown``: the job's delay, in seconds or as a ``timedelta``; 0: it is not delayed. ``eta``: when
            it is due, a ``datetime``, accurate to a second. Or an attribute of :class:`bulltask.queue.Job`: ``queue``,
            ``priority``, ``id``, ``attempts`` …

    Returns:
        The jobs, oldest first.

    Raises:
        AssertionError: There are no such jobs, or not ``count``; the message lists all jobs that are enqueued.
        TypeError: The task has no such parameter, or a job no such attribute.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    name, arguments = _call(task, args, kwargs or {})
    for field in expected.keys() - {"countdown", "eta"}:
        if field.startswith("_") or not hasattr(Job, field) or callable(getattr(Job, field)):
            raise TypeError(f"a job has no attribute {field!r}")
    jobs = enqueued_jobs(app)
    found = [
        job
        for job in jobs
        if job.name == name
        and _contains(job.data, arguments)
        and all(_matches(job, field, value) for field, value in expected.items())
    ]
    if len(found) == count or (count is None and found):
        return found
    wanted = f"{name} {arguments}" + "".join(f", {field}={value!r}" for field, value in expected.items())
    number = f"{len(found)} instead of {count} jobs are" if count is not None else "no job is"
    lines = "".join(f"\n  {_describe(job)}" for job in jobs) or " nothing"
    raise AssertionError(f"{number} enqueued for {wanted}; enqueued:{lines}")


def _call(task: AnyTask[Any, Any] | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    if isinstance(task, str):
        return task, list(args) if args else dict(kwargs)
    data: Any = task._codec.arguments.bind_partial(args, kwargs)
    conversion = task._codec.conversion
    data = data if conversion is None else conversion.encode_arguments(data)
    if task._is_batch:
        data = to_wire(data)
    convert = task._sender()._config.convert
    return task.name, codec.decode(codec.encode(data, what=f"the arguments of task {task.name}", convert=convert))


def _contains(data: Any, arguments: Any) -> bool:
    if isinstance(arguments, dict) and isinstance(data, dict):
        return all(name in data and data[name] == value for name, value in arguments.items())
    return not arguments or data == arguments


def _matches(job: Job, field: str, value: Any) -> bool:
    match field:
        case "countdown":
            return job.delay_ms == to_ms(value, field)
        case "eta":
            return abs(job.timestamp_ms + job.delay_ms - to_epoch_ms(value)) <= _ETA_TOLERANCE_MS
        case _:
            return bool(getattr(job, field) == value)


def _describe(job: Job) -> str:
    delay = f", delayed by {job.delay_ms / 1000:g} s" if job.delay_ms else ""
    priority = f", priority {job.priority}" if job.priority else ""
    return f"{job.name} {job.data_text} in queue {job.queue}{delay}{priority}"


class RedisServer:
    """A server on a separate port, with its files in the test's directory; created by `RedisServer.start`.

    It ends with the test process, even if that process is killed. Example::

        def test_an_email_survives_a_crash_of_redis(tmp_path):
            with RedisServer.start(tmp_path, appendonly=True) as server:
                app = App("shop", broker_url=server.url)
                ...
                server.kill()
                server.restart()
    """

    def __init__(self, process: EmbeddedServer) -> None:
        self._process = process

    @classmethod
    def start(
        cls,
        directory: Path | str,
        *,
        flavor: Flavor = "valkey",
        appendonly: bool = False,
        extra: Sequence[str] = (),
        port: int | None = None,
        password: str | None = None,
    ) -> Self:
        """Start a server and wait until it is ready.

        Args:
            directory: Directory for its files; each server needs a separate directory.
            flavor: ``"valkey"`` (the wheel of ``bulltask[embedded]``, else ``PATH``) or ``"redis"`` (``PATH``).
            appendonly: Write every change to a file before the reply (``appendfsync always``), so that the data
                survives `kill`.
            extra: Further arguments, such as ``["--maxmemory", "50mb"]``.
            port: TCP port on 127.0.0.1; ``None`` chooses a free port.
            password: Required from clients (``requirepass``).

        Returns:
            The running server; also a context manager that stops it.

        Raises:
            BrokerUnavailableError: The program was not found, or did not start; the message gives the reason.
        """
        if appendonly:
            # With everysec, a server whose disk is busy replies up to two seconds before it writes to the file.
            extra = ["--appendfsync", "always", *extra]
        process = EmbeddedServer(
            directory,
            port=port,
            binary=find_binary(flavor),
            appendonly=appendonly,
            password=password,
            restricted=False,  # tests change its configuration
            extra=extra,
        )
        process.start()
        return cls(process)

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:PORT/0``, with the password if there is one."""
        return self._process.url

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; `restart` keeps it."""
        return self._process.port

    @property
    def pid(self) -> int:
        """Process id of the server; it changes with `restart`."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True while the server's process is running."""
        return self._process.running

    @property
    def directory(self) -> Path:
        """Absolute path of the directory with the server's files, such as ``server.log``."""
        return self._process.data_dir

    def kill(self) -> None:
        """Kill the server (``SIGKILL``), as a crash would, and wait until it is gone."""
        self._process.kill()

    def stop(self) -> None:
        """Shut the server down cleanly (``SIGTERM``) and wait until it has exited."""
        self._process.stop()

    def restart(self) -> None:
        """Stop the server if it is running, start it again on the same port and data, and wait until it is ready."""
        self._process.stop()
        self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_LAST_LINES = 20


class WorkerProcess:
    """A running worker, created by `WorkerProcess.start`.

    `pause`, `resume` and `close` have the same names as in Node's ``Worker``. Example::

        def test_a_paused_worker_leaves_jobs_alone(server):
            with WorkerProcess.start("shop.tasks:app", broker_url=server.url) as worker:
                worker.pause()
                result = add.delay(1, 2)
                worker.resume()
                assert result.get(timeout=10) == 3

    Attributes:
        pid: Process id of its supervisor.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self._process = process
        self._log = log
        self.pid = process.pid

    @classmethod
    def start(
        cls,
        app: str,
        *options: str,
        broker_url: str | None = None,
        settings: Mapping[str, object] | None = None,
        directory: Path | str | None = None,
        timeout: float = 30.0,
    ) -> Self:
        """Start a worker and wait until it is ready.

        Args:
            app: The value of ``-A``.
            options: Further flags of ``bulltask worker``, such as ``"--paused"``, ``"-Q"``, ``"mail"``.
            broker_url: Address of Redis; default: the app's.
            settings: Other settings by name; they override the app's.
            directory: Working directory, from which the app is imported; default: the current directory.
            timeout: Maximum wait in seconds.

        Returns:
            The worker; also a context manager that stops it.

        Raises:
            BulltaskError: The worker exited; the message shows the end of its log.
            TimeoutError: The worker did not start in time.
        """
        given = {"loglevel": "info", **(settings or {}), "log_format": "json"}
        given |= {} if broker_url is None else {"broker_url": broker_url}
        environ = {f"BULLTASK_{name.upper()}": str(value) for name, value in given.items()}
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop(); unlike a pipe, a file never fills up
        process = subprocess.Popen(  # noqa: S603 - this interpreter with the caller's options
            [sys.executable, "-m", "bulltask", "worker", "-A", app, *options],
            cwd=directory,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        worker = cls(process, log)
        try:
            worker._wait_for("Worker started", 1, timeout)
            if "--paused" in options:
                worker._wait_for("Worker paused", 1, timeout)
        except BaseException:
            worker.close()
            raise
        return worker

    @property
    def text(self) -> str:
        """Its output so far, stdout and stderr."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Its log lines so far, oldest first; ``event`` is the message."""
        lines = (line for line in self.text.splitlines() if line.startswith("{") and line.endswith("}"))
        return [json.loads(line) for line in lines]

    @property
    def is_running(self) -> bool:
        """True while its process is running."""
        return self._process.poll() is None

    @property
    def is_paused(self) -> bool:
        """True after `pause`, or a start with ``--paused``, until `resume`."""
        logged = [line["event"] for line in self.lines if line["event"] in {"Worker paused", "Worker resumed"}]
        return logged[-1:] == ["Worker paused"]

    def pause(self, timeout: float = 30.0) -> None:
        """Pause the worker and wait until it confirms, or raise as `start` does. Running jobs continue."""
        if not self.is_paused:
            self._signal(signal.SIGTSTP, "Worker paused", timeout)

    def resume(self, timeout: float = 30.0) -> None:
        """Let the worker acquire jobs again, and wait until it confirms, or raise as `start` does."""
        if self.is_paused:
            self._signal(signal.SIGCONT, "Worker resumed", timeout)

    def stop(self, *, force: bool = False, timeout: float = 60.0) -> int:
        """Stop the worker and wait until it has exited.

        Args:
            force: Release running jobs immediately instead of waiting up to ``shutdown_timeout`` for them to end.
            timeout: Maximum wait in seconds.

        Returns:
            Its exit code.

        Raises:
            TimeoutError: It is still running.
        """
        if self.is_running:
            self._process.send_signal(signal.SIGQUIT if force else signal.SIGTERM)
        code = wait_for_exit(self._process, timeout)
        if code is None:
            raise TimeoutError(f"the worker (process {self.pid}) is still running after {timeout:g} s")
        return code

    def kill(self) -> None:
        """Kill it (``SIGKILL``), which also kills its children, and wait until it has exited."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill it if it is still running, and delete its log."""
        self.kill()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self.close()

    def _signal(self, number: signal.Signals, event: str, timeout: float) -> None:
        before = self._count(event)
        if self.is_running:
            self._process.send_signal(number)
        self._wait_for(event, before + 1, timeout)

    def _count(self, event: str) -> int:
        return sum(line["event"] == event for line in self.lines)

    def _wait_for(self, event: str, count: int, timeout: float) -> None:
        def logged() -> bool:
            ended = not self.is_running  # checked first, because its last output is read below
            if self._count(event) >= count:
                return True
            if ended:
                last = "\n".join(self.text.splitlines()[-_LAST_LINES:])
                raise BulltaskError(f"the worker exited with code {self._process.returncode}:\n{last}")
            return False

        wait_until(logged, timeout, f"the line {event!r} of the worker (process {self.pid})")


def wait_until(condition: Callable[[], T], timeout: float = 10.0, what: str = "the condition") -> T:
    """Evaluate ``condition`` every 10 ms until its result is true, and return that result.

    Prefer an event if there is one: ``wait()`` for a process, ``BLPOP`` for a list, ``XREAD BLOCK`` for a stream.

    Raises:
        TimeoutError: It did not become true; the message shows ``what`` and the last result.
    """
    deadline = mono_s() + timeout
    timer = threading.Event()
    while not (result := condition()):
        if mono_s() >= deadline:
            raise TimeoutError(f"timed out after {timeout:g} s waiting for {what} (last result: {result!r})")
        timer.wait(0.01)
    return result
