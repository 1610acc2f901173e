"""The memory that a worker's processes share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.config.process import anonymous_file
from bulltask.errors import ConfigError
from bulltask.worker.slots import (
    ID_BYTES,
    CancelReason,
    ChildBlock,
    Deadlines,
    ProcessState,
    Slot,
    Slots,
    SlotState,
    SlotView,
    free_slots,
)

# Python 3.12 warns about a fork in a process with threads (xdist's). These children only write to memory and exit.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def new_slots(children: int = 1, per_child: int = 1) -> Slots:
    slots = Slots(children, per_child)
    for block in slots.children:
        block.reset()
    return slots


def one_slot() -> Slot:
    return new_slots().children[0].slots()[0]


@pytest.fixture
def child_pids() -> Iterator[list[int]]:
    """A list for the ids of forked children, which are killed and reaped at the end."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_new_slot_is_free_and_has_a_token() -> None:
    slot = one_slot()
    assert slot.read() == SlotView(SlotState.FREE, slot.token, 0, "", 0)
    assert len(slot.token) == 36


def test_a_slot_has_its_state_and_the_time_of_the_last_change() -> None:
    slot = one_slot()
    slot.enter(SlotState.RESERVED, 5)
    assert (slot.read().state, slot.read().since_ms, slot.since_ms) == (SlotState.RESERVED, 5, 5)
    slot.activate(3, "job-1", 7)
    assert slot.read() == SlotView(SlotState.ACTIVE, slot.token, 3, "job-1", 7)
    slot.enter(SlotState.FINISHING, 9)
    assert slot.read() == SlotView(SlotState.FINISHING, slot.token, 3, "job-1", 9)
    slot.free(11)
    assert (slot.read().state, slot.read().since_ms) == (SlotState.FREE, 11)


@pytest.mark.parametrize("job_id", ["", "1", "é" * (ID_BYTES // 2), "x" * ID_BYTES, "a\udcffb", "\x00"])
def test_a_job_id_that_fits_is_stored_unchanged(job_id: str) -> None:
    slot = one_slot()
    slot.activate(0, job_id, 1)
    assert slot.read().job_id == job_id


@pytest.mark.parametrize("job_id", ["x" * (ID_BYTES + 1), "é" * ID_BYTES])
def test_a_job_id_that_is_too_long_is_not_stored(job_id: str) -> None:
    slot = one_slot()
    slot.activate(0, "old", 1)
    slot.activate(2, job_id, 5)
    assert slot.read() == SlotView(SlotState.ACTIVE, slot.token, 2, "", 5)
    slot.activate(1, "short", 6)
    assert slot.read().job_id == "short"


ID_CHARACTERS = st.characters(exclude_categories=["Cs"])
operations: st.SearchStrategy[tuple[SlotState, Any]] = st.one_of(
    st.tuples(st.sampled_from([SlotState.RESERVED, SlotState.FINISHING, SlotState.FREE]), st.none()),
    st.tuples(st.just(SlotState.ACTIVE), st.tuples(st.integers(0, 100), st.text(ID_CHARACTERS, max_size=400))),
)


@given(st.lists(operations), st.data())
def test_a_write_to_a_slot_does_not_change_other_slots(steps: list[tuple[SlotState, Any]], data: st.DataObject) -> None:
    slots = new_slots(children=2, per_child=2)
    every = [slot for block in slots.children for slot in block.slots()]
    expected = {slot: slot.read() for slot in every}
    for now_ms, (state, argument) in enumerate(steps, 1):
        slot = data.draw(st.sampled_from(every))
        before = expected[slot]
        queue, job_id = argument or (before.queue_index, before.job_id)
        if state is SlotState.ACTIVE:
            slot.activate(queue, job_id, now_ms)
            job_id = job_id if len(job_id.encode()) <= ID_BYTES else ""
        elif state is SlotState.FREE:
            slot.free(now_ms)
        else:
            slot.enter(state, now_ms)
        expected[slot] = SlotView(state, slot.token, queue, job_id, now_ms)
        assert {slot: slot.read() for slot in every} == expected


# --- cancel requests and deadlines ------------------------------------------------------------------------------------


def test_a_cancel_request_applies_to_one_attempt_only() -> None:
    slot = one_slot()
    slot.activate(0, "job-1", 1)
    first = slot.read().attempt
    slot.request_cancel(first, CancelReason.SOFT_LIMIT)
    assert (slot.cancel_reason, slot.read().cancel_reason, slot.read().acknowledged) == (
        CancelReason.SOFT_LIMIT,
        CancelReason.SOFT_LIMIT,
        False,
    )
    slot.acknowledge()
    assert slot.read().acknowledged
    slot.request_cancel(first, CancelReason.REVOKED)
    assert (slot.cancel_reason, slot.read().acknowledged) == (CancelReason.REVOKED, False), (
        "a new request must be acknowledged again"
    )
    slot.activate(0, "job-1", 2)  # the same job again
    assert (slot.cancel_reason, slot.read().cancel_reason, slot.read().acknowledged) == (
        CancelReason.NONE,
        CancelReason.NONE,
        False,
    )
    slot.request_cancel(first, CancelReason.HARD_LIMIT)
    assert slot.cancel_reason is CancelReason.NONE, "the request is for an earlier attempt"


def test_deadlines_apply_to_one_attempt_while_it_is_active() -> None:
    slot = one_slot()
    deadlines = Deadlines(soft_at_ms=100, hard_at_ms=200, hard_ms=150, is_async=True, will_retry=True)
    slot.activate(0, "job-1", 50)
    assert (slot.read().deadlines, slot.is_overdue(10**9)) == (Deadlines(), False)
    slot.set_deadlines(deadlines)
    assert slot.read().deadlines == deadlines
    assert [slot.is_overdue(now_ms) for now_ms in (99, 100, 200)] == [False, True, True]
    slot.enter(SlotState.FINISHING, 150)
    assert not slot.is_overdue(300), "its outcome is being written"
    slot.activate(0, "job-2", 400)
    assert (slot.read().deadlines, slot.is_overdue(10**9)) == (Deadlines(), False)


# --- torn writes ------------------------------------------------------------------------------------------------------


def test_an_unfinished_write_leaves_only_the_token() -> None:
    slot = one_slot()
    slot.activate(3, "job-1", 7)
    slot._words[0] += 1  # as if the child had been killed during a write
    assert slot.read() == SlotView(SlotState.ACTIVE, slot.token, 0, "", 0)


@pytest.mark.slow
def test_a_slot_is_never_read_as_a_mixture_of_two_writes(child_pids: list[int]) -> None:
    slot = one_slot()
    slot.activate(0, "0", 0)
    pid = os.fork()
    if pid == 0:
        try:
            for number in range(1, 10**9):
                slot.activate(number % 1_000, str(number) * (1 + number % 7), number)
                sum(range(number % 1_000))  # without pauses of 0 to 15 µs hardly any read succeeds
        finally:
            os._exit(0)
    child_pids.append(pid)
    seen: set[int] = set()
    while len(seen) < 2_000:
        view = slot.read()
        if view.job_id == "":
            continue  # read() gives up after five attempts during writes
        number = view.since_ms
        assert (view.queue_index, view.job_id) == (number % 1_000, str(number) * (1 + number % 7))
        seen.add(number)


# --- blocks -----------------------------------------------------------------------------------------------------------


def test_every_slot_of_every_child_has_a_unique_token() -> None:
    slots = new_slots(children=3, per_child=50)
    tokens = [slot.token for block in slots.children for slot in block.slots()]
    assert len(set(tokens)) == 150
    assert slots.per_child == 50


def test_a_block_of_slots_is_empty_after_a_reset() -> None:
    block = new_slots().children[0]
    slot = block.slots()[0]
    slot.activate(1, "job-1", 5)
    block.run_state = ProcessState.RUN
    block.reset()
    new = block.slots()[0]
    assert new.token != slot.token
    assert new.read() == SlotView(SlotState.FREE, new.token, 0, "", 0)
    assert block.run_state is ProcessState.INIT


def test_a_child_that_waits_for_no_job_has_no_free_slot() -> None:
    slots = new_slots(per_child=3).children[0].slots()
    assert free_slots(slots, 2) == 0
    slots[0].waiting = True
    assert free_slots(slots, 2) == 2


def test_a_block_of_slots_stores_the_state_of_its_child() -> None:
    block = new_slots().children[0]
    assert block.run_state is ProcessState.INIT
    for state in ProcessState:
        block.run_state = state
        assert block.run_state is state


def test_the_supervisor_reads_what_a_forked_child_writes_to_its_slot() -> None:
    block = new_slots().children[0]
    slot = block.slots()[0]
    pid = os.fork()
    if pid == 0:
        block.run_state = ProcessState.RUN
        slot.activate(1, "job-1", 5)
        os._exit(0)
    os.waitpid(pid, 0)
    assert block.run_state is ProcessState.RUN
    assert slot.read().job_id == "job-1"


def test_the_control_page_overlaps_no_slot_and_survives_a_reset_of_blocks() -> None:
    slots = new_slots(children=2, per_child=2)
    before = [slot.read() for block in slots.children for slot in block.slots()]
    assert not slots.control.paused
    slots.control.paused = True
    assert [slot.read() for block in slots.children for slot in block.slots()] == before
    slots.children[0].reset()
    assert slots.control.paused
    slots.control.paused = False
    assert not slots.control.paused


def test_slots_in_the_same_anonymous_file_share_memory() -> None:
    fd = anonymous_file("slots-of-a-test")
    try:
        first, second = Slots(2, 3, fd), Slots(2, 3, fd)
        block: ChildBlock = first.children[1]
        block.reset()
        block.slots()[2].activate(1, "job-1", 5)
        assert second.children[1].slots()[2].read() == block.slots()[2].read()
        assert second.children[1].slots()[2].read().job_id == "job-1"
        first.control.paused = True
        assert second.control.paused
    finally:
        os.close(fd)


def test_children_share_the_permits_for_jobs_and_return_unused_ones() -> None:
    fd = anonymous_file("permits")
    assert fd is not None
    supervisor = Slots(2, 1, fd).control
    assert not supervisor.has_permits
    assert not supervisor.exhausted
    supervisor.limit_jobs(2)
    first, second = (Slots(2, 1, fd).control for _ in range(2))
    assert first.has_permits
    assert first.take_permit()
    assert second.take_permit()
    assert not first.take_permit()
    assert second.exhausted
    second.record_permit(used=False)
    first.record_permit(used=True)
    assert not first.exhausted
    assert supervisor.permits_used == 1
    os.close(fd)


def test_the_option_max_jobs_needs_an_anonymous_file() -> None:
    with pytest.raises(ConfigError, match="--max-jobs needs memfd_create"):
        Slots(1, 1).control.limit_jobs(1)
