"""Parts of the supervisor that can be tested without child processes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from bulltask import App
from bulltask.config.settings import Settings
from bulltask.events import Bus, StacksDumped
from bulltask.observe.log import worker_id
from bulltask.transport.call import Call, QueueKeys
from bulltask.worker import child_pool, limits, spark_tasks
from bulltask.worker.async_loop import jobs_per_child
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child_pool import (
    _MAX_BOOT_FAILURES,
    ChildBootError,
    ChildPool,
    MemoryCheck,
    OutOfMemoryKills,
    _cancelled,
    choose_launcher,
    limit_native_threads,
)
from bulltask.worker.limits import RevocationCheck
from bulltask.worker.locks import Heartbeat
from bulltask.worker.recovery import FailureRecorder, KilledAttempt
from bulltask.worker.run import _Assembly
from bulltask.worker.slots import CancelReason, Deadlines, ProcessState, Slots, SlotState, SlotView
from bulltask.worker.supervisor import _directory

KEYS = QueueKeys("bull", "{mail}", "mail")
CONFIG = Settings({}, {}).freeze()


def fork(index: int) -> int:
    return 1_000 + index


def spawn(index: int) -> int:
    return 2_000 + index


@pytest.mark.parametrize(
    ("method", "spawner", "threads", "pid", "warned"),
    [
        ("fork", spawn, 9, 1_003, 0),
        ("spawn", spawn, 1, 2_003, 0),
        ("spawn", None, 1, 1_003, 1),
        ("auto", spawn, 1, 1_003, 0),
        ("auto", spawn, 2, 2_003, 1),
        ("auto", None, 2, 1_003, 1),
    ],
)
def test_the_start_method_selects_the_launcher(
    monkeypatch: pytest.MonkeyPatch, method: str, spawner: Any, threads: int, pid: int, warned: int
) -> None:
    monkeypatch.setattr(child_pool, "thread_count", lambda: threads)
    texts: list[str] = []
    forker: Any = fork
    start = choose_launcher(method, forker, spawner, texts.append)
    assert [start(3), start(3)] == [pid, pid]
    assert len(texts) == warned


def test_a_block_stores_the_file_descriptor_for_stacks() -> None:
    slots = Slots(1, 1)
    (block,) = slots.children
    block.reset()
    assert block.stacks_fd == -1
    block.stacks_fd = 7
    assert block.stacks_fd == 7


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("retried", [False, True])
def test_the_deadlines_of_an_attempt_are_read_back_unchanged(is_async: bool, retried: bool) -> None:
    slots = Slots(1, 1)
    (block,) = slots.children
    block.reset()
    (slot,) = block.slots()
    free = slot.read()
    deadlines = Deadlines(soft_at_ms=5, hard_at_ms=6, hard_ms=7, is_async=is_async, will_retry=retried)
    slot.set_deadlines(deadlines)
    assert slot.read().deadlines == deadlines
    assert slot.read() == free, "comparisons ignore deadlines"


def test_the_file_of_the_supervisors_stacks_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("stacks")
    monkeypatch.setattr(child_pool, "anonymous_file", lambda _: fd)
    bus, emitted = Bus(), list[StacksDumped]()
    bus.subscribe(StacksDumped, emitted.append)
    child_pool.StackCollector(bus).dump_supervisor()
    assert "dump_supervisor" in emitted[0].stacks
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


class Client:
    """A fake client: every script succeeds, and other commands return the fields that a test has set."""

    def __init__(self, fields: dict[str, str] | None = None) -> None:
        self.flat = [text.encode() for pair in (fields or {}).items() for text in pair]
        self.scripts: list[str] = []

    def run(self, call: Call[Any]) -> Any:
        if call.script is None:
            return self.flat
        self.scripts.append(call.script.name)
        return None


@pytest.mark.parametrize(
    ("will_retry", "backoff", "script", "counter"),
    [
        (True, 500, "moveToDelayed", "retried"),
        (True, 0, "retryJob", "retried"),
        (True, "soon", "moveToFinished", "transient_exhausted"),
        (False, 500, "moveToFinished", "transient_exhausted"),
    ],
)
def test_a_killed_attempt_is_retried_if_its_child_has_decided_so_and_counts(
    will_retry: bool, backoff: object, script: str, counter: str
) -> None:
    counted: list[object] = []
    counts: Any = SimpleNamespace(ended=lambda *ended: counted.extend(ended[1:4]))
    opts = json.dumps({"attempts": 1, "backoff": {"type": "fixed", "delay": backoff}})
    client: Any = Client({"name": "send", "data": "{}", "opts": opts, "timestamp": "1", "ats": "1"})
    clock: Any = SimpleNamespace(now_ms=lambda: 1_000)
    killed = KilledAttempt(
        reason=CancelReason.HARD_LIMIT, token="t", attempt=1, job_id="7", since_ms=0, hard_ms=9, will_retry=will_retry
    )
    FailureRecorder(client, clock, CONFIG, Bus(), counts).record_killed(KEYS, "7", killed)
    assert client.scripts == [script]
    assert counted == ["mail", "send", counter]


@pytest.mark.parametrize(
    ("state", "reason", "blocked", "is_killed"),
    [
        (SlotState.ACTIVE, CancelReason.HARD_LIMIT, False, True),
        (SlotState.ACTIVE, CancelReason.HARD_LIMIT, True, False),
        (SlotState.ACTIVE, CancelReason.REVOKED, True, True),
        (SlotState.ACTIVE, CancelReason.NONE, False, False),
        (SlotState.FINISHING, CancelReason.HARD_LIMIT, False, False),
    ],
)
def test_an_attempt_that_was_being_cancelled_when_its_child_died_counts_as_killed(
    state: SlotState, reason: CancelReason, blocked: bool, is_killed: bool
) -> None:
    view = SlotView(state, "token", 0, "7", 0, attempt=1, cancel_reason=reason)
    assert (_cancelled(view, blocked=blocked) is not None) == is_killed


def test_a_reported_lost_lock_is_forgotten_after_its_attempt() -> None:
    nothing: Any = None
    view = SlotView(SlotState.FREE, "token", 0, "", 0, attempt=2)
    heartbeat = Heartbeat([KEYS], lambda: [view], nothing, CONFIG, Bus(), ReconnectBackoff(Bus(), CONFIG))
    heartbeat._reported_lost = {("token", 1), ("token", 2)}
    heartbeat._locked_slots()
    assert heartbeat._reported_lost == {("token", 2)}


@pytest.mark.parametrize(("renew", "interval_ms"), [(15.0, 7_500), (0.2, 100), (0.1, 50)])
def test_the_heartbeat_interval_is_half_the_lock_renew_time(renew: float, interval_ms: int) -> None:
    nothing: Any = None
    config = Settings({"lock_duration": 60, "lock_renew_time": renew}, {}).freeze()
    heartbeat = Heartbeat([KEYS], list, nothing, config, Bus(), ReconnectBackoff(Bus(), config))
    assert heartbeat.interval_ms == interval_ms


def test_revocation_requests_are_read_from_the_first_again_after_the_last() -> None:
    nothing: Any = None
    broker: Any = SimpleNamespace(config=CONFIG, topology=None)
    revocation_check = RevocationCheck(broker, [KEYS], nothing, nothing, Bus(), nothing)
    revocation_check._skipped = [100]
    revocation_check._handle_requests(0, None)
    assert revocation_check._skipped == [0]


def test_a_worker_looks_for_revocation_requests_every_second() -> None:
    assert RevocationCheck.interval_ms == 1_000


def test_a_child_that_has_just_died_does_not_stop_the_check_of_the_memory() -> None:
    killed: list[int] = []
    pool: Any = SimpleNamespace(
        busy_children=lambda: [(0, 2**22 + 1), (1, os.getpid())],  # the first is larger than any pid of Linux
        kill_for_memory=lambda index, *_: killed.append(index),
    )
    MemoryCheck(pool, limit_kib=1).tick(0, 0)
    assert killed == [1]


def test_slots_in_use_are_those_of_running_children() -> None:
    app = App("shop")

    @app.task
    async def waits() -> None: ...

    per_child = jobs_per_child(app)
    slots = Slots(3, per_child)
    for number, block in enumerate(slots.children):
        block.reset()
        block.pid = number  # 0: it does not run
        if number:
            block.slots()[0].activate(0, "7", 1)
    worker: Any = SimpleNamespace(slots=slots, app=app)
    assert per_child > 1
    assert _Assembly._slots_in_use(worker) == (2 * per_child, 2)


def test_the_log_says_by_how_many_seconds_the_clock_was_set() -> None:
    worker: Any = SimpleNamespace(beat=None, logger=MagicMock())
    _Assembly._report_clock_change(worker, -90_000)
    assert worker.logger.warning.call_args.kwargs["seconds"] == -90


@pytest.mark.parametrize(("with_java", "text"), [(True, ""), (False, "has no bin/java")])
def test_java_is_found_in_java_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, with_java: bool, text: str
) -> None:
    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    monkeypatch.setattr(spark_tasks, "find_spec", lambda _: SimpleNamespace())
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    if with_java:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "java").touch(mode=0o755)
    missing = spark_tasks.missing_dependencies()
    assert text in missing
    assert bool(missing) != with_java


def test_only_consecutive_boot_failures_end_the_worker() -> None:
    nothing: Any = None
    slots: Any = SimpleNamespace(children=[nothing])
    pool = ChildPool(slots, nothing, nothing, Bus(), 1)
    child: Any = SimpleNamespace(stop_requested=False)
    died: Any = SimpleNamespace(run_state=ProcessState.INIT)
    for _ in range(2):
        for _ in range(_MAX_BOOT_FAILURES - 1):
            pool._count_boot_failures(died, child)
        pool._count_boot_failures(SimpleNamespace(run_state=ProcessState.RUN), child)  # type: ignore[arg-type]
    for _ in range(_MAX_BOOT_FAILURES - 1):
        pool._count_boot_failures(died, child)
    with pytest.raises(ChildBootError, match=f"^{_MAX_BOOT_FAILURES} children"):
        pool._count_boot_failures(died, child)


def test_the_supervisor_waits_for_the_earliest_delayed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    monkeypatch.setattr(child_pool, "mono_ms", lambda: 1_000)
    pool = ChildPool(Slots(3, 1), fork, nothing, Bus(), 3)
    pool._delayed_until_ms = [1_700, 1_400]
    assert pool.start_missing() == 400
    assert pool.alive == 1
    pool._delayed_until_ms = [1_000, 900]
    assert pool.start_missing() is None
    assert pool.alive == 3


def test_the_states_in_shared_memory_have_different_numbers() -> None:
    assert [*map(int, SlotState)] == [*range(10)]
    assert [*map(int, CancelReason)] == [*range(5)]
    assert [*map(int, ProcessState)] == [*range(5)]


def test_numpy_starts_one_thread_unless_the_environment_sets_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    limit_native_threads()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    limit_native_threads()
    assert os.environ["OPENBLAS_NUM_THREADS"] == "4"


def test_a_worker_id_has_the_workers_name_host_and_process() -> None:
    assert re.fullmatch(rf"mail@.+-{os.getpid()}-[0-9a-f]{{6}}", worker_id("mail"))
    assert re.fullmatch(rf"[^@]+-{os.getpid()}-[0-9a-f]{{6}}", worker_id())


def test_a_restart_does_not_resolve_links_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "release").mkdir()
    (tmp_path / "current").symlink_to("release")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("PWD", str(tmp_path / "current"))
    assert _directory() == str(tmp_path / "current")
    monkeypatch.setenv("PWD", str(tmp_path))
    assert _directory() == str(tmp_path / "release")


def test_a_reserved_slot_keeps_the_job_id_of_its_previous_job() -> None:
    nothing: Any = None
    slots = Slots(1, 2)
    pool = ChildPool(slots, fork, nothing, Bus(), 1)
    assert pool.start_missing() is None
    reserved, active = slots.children[0].slots()
    for slot in (reserved, active):
        slot.activate(0, "7", 1)
    reserved.enter(SlotState.RESERVED, 2)
    dead = pool._remove_dead(0, pool._children[0], 9)
    assert dead.tokens == (reserved.token, active.token)
    assert dead.jobs == ((0, active.token, "7"),)


def test_the_jobs_of_a_dead_child_do_not_include_those_that_were_taken_over() -> None:
    nothing: Any = None
    slots = Slots(1, 3)
    pool = ChildPool(slots, fork, nothing, Bus(), 1)
    assert pool.start_missing() is None
    written, releasing, active = slots.children[0].slots()
    for slot in (written, releasing, active):
        slot.activate(0, "7", 1)
    written.enter(SlotState.WRITTEN, 2)
    releasing.enter(SlotState.RELEASING, 2)
    dead = pool._remove_dead(0, pool._children[0], 9)
    assert dead.jobs == ((0, active.token, "7"),)
    assert dead.tokens == (written.token, releasing.token, active.token)
    assert dead.unstarted == {releasing.token}


def test_an_unacknowledged_request_is_sent_again_after_increasing_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notified = SimpleNamespace(ms=1_000), list[int]()
    (slot,) = Slots(1, 1).children[0].slots()
    slot.activate(0, "7", 1)
    pool: Any = SimpleNamespace(
        view=lambda _: slot.read(),
        request_cancel=lambda _token, attempt, reason: slot.request_cancel(attempt, reason),
        index_of=lambda _: 0,
        notify=lambda _: notified.append(clock.ms),
        interrupt_at_ms=None,
    )
    monkeypatch.setattr(limits, "mono_ms", lambda: clock.ms)
    cancelling = limits.Canceller(pool, Bus())
    assert cancelling.cancel(slot.read(), CancelReason.SOFT_LIMIT)
    for clock.ms in range(1_000, 2_000, 10):
        cancelling.tick(0, 0)
    assert notified == [1_000, 1_100, 1_300, 1_700]


def test_the_stacks_of_a_child_that_does_not_write_them_are_read_after_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ms = 1_000
    monkeypatch.setattr(child_pool, "mono_ms", lambda: now_ms)
    block: Any = SimpleNamespace(request_stacks=lambda: None, stacks_pending=True, stacks_fd=-1)
    collector = child_pool.StackCollector(Bus())
    collector.request(0, 2**22, block)  # larger than any pid
    assert collector.collect() == 20
    now_ms = 1_999
    assert collector.collect() == 20
    now_ms = 2_000
    assert collector.collect() is None


@pytest.mark.parametrize("text", ["low 0\noom 1\noom_kill {}\n", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"])
def test_a_kill_by_the_kernel_is_claimed_once(tmp_path: Path, text: str) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text(text.format(5))
    kills = OutOfMemoryKills(counter)
    assert not kills.claim()
    counter.write_text(text.format(7))
    assert [kills.claim() for _ in range(3)] == [True, True, False]
    counter.unlink()
    assert not kills.claim()


def test_a_machine_without_a_counter_of_kills_has_none(tmp_path: Path) -> None:
    assert not OutOfMemoryKills(tmp_path / "missing").claim()
    OutOfMemoryKills().claim()  # this machine's
