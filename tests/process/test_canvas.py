"""Chains, groups and chords, run by workers."""

from __future__ import annotations

import ast
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bulltask import App, GroupResult, TaskError, TaskRevokedError, chain, chord, group
from bulltask.registry.canvas import Canvas, Group
from tests.support.programs import ROOT
from tests.support.worker_harness import WorkerHarness

TASKS = """
    import ctypes
    import os

    from bulltask import Signature, group, signature

    @app.task(name="add")
    def add(x, y):
        return x + y

    @app.task(name="aadd")
    async def aadd(x, y):
        return x + y

    @app.task(name="total")
    def total(numbers):
        return sum(numbers)

    @app.task(name="collect")
    def collect(*values):
        return list(values)

    @app.task(name="boom")
    def boom(*values):
        raise ValueError("boom")

    @app.task(bind=True, name="double_later")
    def double_later(self, number, times=1):
        if times == 0:
            return number
        again = double_later.si(number * 2, times - 1)
        self.replace(group(again, add.s(0, 0)) | total.s())

    @app.task(bind=True, name="adouble_later")
    async def adouble_later(self, number):
        await self.areplace(group(add.s(number, number), add.s(0, 0)))

    @app.task(bind=True, name="fail_sooner")
    def fail_sooner(self):
        try:
            self.replace(boom.s())
        except BaseException:
            wait_at("failed")  # the canvas has failed before the job can wait for it
            raise

    @app.task(bind=True, name="fail_later")
    def fail_later(self):
        self.replace(add.s(1, 1) | boom.s())

    @app.task(bind=True, name="become")
    def become(self, *given, call):
        record("become", job=self.request.id)
        self.replace(signature(call))

    @app.task(name="send")
    def send(call: Signature, calls):
        return [one.delay().id for one in (call, *map(signature, calls))]

    @app.task(name="dies")
    def dies():
        os.kill(os.getpid(), 9)

    @app.task(name="stuck")
    def stuck():
        ctypes.PyDLL(None).sleep(60)  # holds the GIL, so the child is killed

    @app.task(name="note_id")
    def note_id(job_id):
        record("id", job=job_id)

    @app.task(bind=True, name="note")
    def note(self, *values):
        record("note", values=repr(values))
"""


class Calls:
    """Signatures of the worker's tasks."""

    def __init__(self, app: App) -> None:
        @app.task(name="add")
        def add(x: int, y: int) -> int:
            return x + y

        @app.task(name="aadd")
        def aadd(x: int, y: int) -> int:
            return x + y

        @app.task(name="total")
        def total(numbers: list[int]) -> int:
            return sum(numbers)

        @app.task(name="collect")
        def collect(*values: Any) -> list[Any]:
            return list(values)

        @app.task(name="boom", max_retries=0)
        def boom(*values: Any) -> None:
            raise ValueError("boom")

        @app.task(name="note")
        def note(*values: Any) -> None: ...

        @app.task(name="note_id")
        def note_id(job_id: str) -> None: ...

        self.note_id = note_id
        self.become = app.task(name="become")(_become)
        self.add, self.aadd, self.total, self.collect, self.boom, self.note = add, aadd, total, collect, boom, note

    def replaced_by(self, canvas: Canvas[Any, Any]) -> Any:
        """A call that replaces itself with a canvas."""
        return self.become.s(call=canvas.to_dict())


def _become(*given: Any, call: dict[str, Any]) -> Any: ...


@pytest.fixture
def calls(harness: WorkerHarness) -> Calls:
    harness.worker(TASKS, children=2)
    return Calls(harness.app)


@pytest.mark.every_topology
def test_results_flow_through_chains_groups_and_chords(calls: Calls) -> None:
    add, aadd, total, collect = calls.add, calls.aadd, calls.total, calls.collect
    tasks: list[Any] = [total, collect]
    leading: list[Any] = [group(), add.s(1, 2)]
    middle: list[Any] = [add.s(1, 2), group(), collect.s()]
    starmap: Any = add.starmap([(1, 2)])
    cases: list[tuple[Canvas[Any, Any], Any]] = [
        (add.s(1, 2), 3),
        (add.s(1, 2) | add.s(10), 13),
        (chain(add.s(1, 2), aadd.s(10), add.s(100), aadd.s(1000)), 1113),
        (add.s(1, 2) | add.si(5, 6), 11),
        (group(add.s(i, i) for i in range(4)), [0, 2, 4, 6]),
        (group(), []),
        (group([add.s(1, 1)]), [2]),
        (group(add.s(1, 1), group(add.s(2, 2), add.s(3, 3))), [2, 4, 6]),
        (group(add.s(i, i) for i in range(12)) | total.s(), 132),
        (group([add.s(1, 1)]) | collect.s(), [[2]]),
        (group() | collect.s(), [[]]),
        (group() | collect.s("x"), [[], "x"]),
        (add.s(1, 2) | group(add.s(10), add.s(20)), [13, 23]),
        (add.s(1, 2) | group(add.s(10), add.s(20)) | total.s(), 36),
        (add.s(1, 2) | group(add.s(10), add.s(20)) | total.s() | add.s(1000), 1036),
        (group(add.s(1, 1), add.s(2, 2)) | group(total.s(), collect.s()), [6, [[2, 4]]]),
        (add.s(1, 2) | group() | collect.s(), [[]]),
        (chain(middle), [3]),
        (chain(leading), 3),
        (chain([group()]), []),
        (chain([group(add.s(1, 1)), group(), group()]), [2]),
        (group() | collect.s() | collect.s(), [[[]]]),
        (add.s(1, 2) | chord([], collect.s()) | collect.s(), [[[]]]),
        (chain(chain(), add.s(1, 2), chain()), 3),
        (group(chain(), add.s(1, 2), chain()), [3]),
        (chord([chain()], collect.s()), [[]]),
        (chord(add.s(1, 2), collect.s()), [[3]]),
        (chord(add.s(1, 2), total.s() | add.s(1)), 4),
        (group(add.s(1, 2), add.s(3, 4)) | group(tasks), [10, [[3, 7]]]),
        (add.s(1, 2) | starmap, [3]),
        (group(add.s(1, 2) | add.s(3), add.s(4, 5)) | collect.s(), [[6, 9]]),
        (group(add.s(1, 2) | group(add.s(3), add.s(4)), add.s(5, 6)) | collect.s(), [[[6, 7], 11]]),
        (group(chord([add.s(1, 1), add.s(2, 2)], total.s()), add.s(3, 3)) | total.s(), 12),
        (chord([chord([add.s(1, 1)], total.s()), chord([add.s(2, 2)], total.s())], chord([total.s()], total.s())), 6),
        (chord([add.s(1, 1), add.s(2, 2)], total.s() | add.s(100)), 106),
        (group(add.s(1, 2) | group(add.s(3), add.s(4)), add.s(5, 6)), [[6, 7], 11]),
        (add.starmap([(1, 2), (3, 4)]), [3, 7]),
        (total.map([[1, 2], [3, 4]]), [3, 7]),
        (aadd.starmap([(1, 2)]) | total.s(), 3),
        (add.chunks([(i, i) for i in range(5)], 2), [[0, 2], [4, 6], [8]]),
    ]
    results = [(canvas, canvas.delay(), expected) for canvas, expected in cases]
    for canvas, result, expected in results:
        assert result.get(timeout=60) == expected, canvas


def test_a_task_can_send_the_canvases_among_its_arguments(harness: WorkerHarness, calls: Calls) -> None:
    add, total = calls.add, calls.total
    canvases = [add.s(1, 2) | add.s(3), chord([add.s(1, 2), add.s(3, 4)], total.s()), add.starmap([(1, 2)])]
    sent = harness.app.send_task("send", (add.s(1, 2), canvases)).get(timeout=60)
    assert [harness.app.result(job_id).get(timeout=60) for job_id in sent] == [3, 6, 10, [3]]


def test_a_failed_step_fails_all_steps_after_it_once_with_its_own_error(harness: WorkerHarness, calls: Calls) -> None:
    add, boom, collect, note = calls.add, calls.boom, calls.collect, calls.note
    failing: list[Canvas[Any, Any]] = [
        boom.s(),
        boom.s() | note.s(),
        boom.s() | note.si(),
        add.s(1, 1) | boom.s() | note.s() | note.s(),
        chord([add.s(1, 1), boom.s(), boom.s()], note.s()),
        boom.s() | group(note.s(), note.s()),
        boom.s() | group(note.s(), note.s()) | note.s(),
        chord([add.s(1, 1), boom.s()], group(note.s(), note.s())),
        group(add.s(1, 1), chord([boom.s()], note.s())),
    ]
    for result in [canvas.delay() for canvas in failing]:
        with pytest.raises(ValueError, match=r"^boom$") as caught:
            result.get(timeout=60)
        assert "raise ValueError" in str(caught.value.__cause__)
    assert collect.delay("last").get(timeout=60) == ["last"]
    assert harness.journal.all(what="note") == [], "no step after a failed one runs"


def test_both_linked_callbacks_and_the_next_step_receive_the_result(harness: WorkerHarness, calls: Calls) -> None:
    add, note, total = calls.add, calls.note, calls.total
    single = add.s(1, 2)
    single.link(note.s("single"))
    double = add.s(3, 4)
    double.link(note.s("first") | note.s())
    double.link(note.s("second"))
    member = add.s(10, 10)
    member.link(note.s("member"))
    assert single.delay().get(timeout=60) == 3
    assert double.delay().get(timeout=60) == 7
    assert (group(member, add.s(1, 1)) | total.s()).delay().get(timeout=60) == 22
    assert (member | add.s(5)).delay().get(timeout=60) == 25
    assert calls.add.apply_async((1, 1), link=note.s("option")).get(timeout=60) == 2
    notes = sorted(entry["values"] for entry in harness.journal.wait_for(7, what="note"))
    assert notes == sorted(
        [
            "(3, 'single')",
            "(7, 'first')",
            "(None,)",
            "(7, 'second')",
            "(20, 'member')",
            "(20, 'member')",
            "(2, 'option')",
        ]
    )


def test_the_callback_of_a_group_receives_the_list_of_all_results(harness: WorkerHarness, calls: Calls) -> None:
    add, note, total = calls.add, calls.note, calls.total

    def linked(*names: str) -> Any:
        canvas: Any = group(add.s(1, 1), calls.replaced_by(add.s(2, 2)))
        for name in names:
            canvas.link(note.s(name))
        return canvas

    empty: Group[Any, Any] = group()
    empty.link(note.s("empty"))
    results = [
        linked("alone").delay(),
        linked("first", "second").delay(),
        (linked("header") | total.s()).delay(),
        group(linked("member") | total.s(), add.s(0, 0)).delay(),
        empty.delay(),
    ]
    expected: list[Any] = [[2, 4], [2, 4], 6, [6, 0], []]
    assert [result.get(timeout=60) for result in results] == expected
    notes = [ast.literal_eval(entry["values"]) for entry in harness.journal.wait_for(6, what="note")]
    assert sorted(notes, key=str) == sorted(
        [([2, 4], name) for name in ("alone", "first", "second", "header", "member")] + [([], "empty")], key=str
    )


def test_options_and_arguments_of_a_send_apply_to_the_first_steps(calls: Calls) -> None:
    add, total = calls.add, calls.total
    assert (add.s(1) | add.s(100)).delay(10).get(timeout=60) == 111
    assert (group(add.s(1), add.s(2)) | total.s()).apply_async((10,), countdown=0.2).get(timeout=60) == 23
    delayed = add.s(1, 1) | add.s(1).set(countdown=0.3) | group(add.s(1).set(countdown=0.2), add.s(2).set(priority=3))
    assert delayed.delay().get(timeout=60) == [4, 5]
    with pytest.raises(TypeError, match=r"add\(\) missing a required argument: 'y'"):
        (add.s(1, 2) | add.si(1)).delay()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="too many positional arguments"):
        (add.s(1, 2) | add.s(1, 2)).delay()  # type: ignore[operator]


def test_a_group_result_reports_its_members(harness: WorkerHarness, calls: Calls) -> None:
    add, boom = calls.add, calls.boom
    held = harness.app.signature("hold", kwargs={"gate": "gate"})
    result = group(add.s(1, 1), held, add.s(2, 2)).delay()
    assert result[0].get(timeout=60) == 2
    assert result[2].get(timeout=60) == 4
    assert (result.ready(), result.completed_count(), result.waiting(), len(result)) == (False, 2, True, 3)
    values = result.iterate(timeout=60)
    assert {next(values), next(values)} == {2, 4}
    harness.open_gate()
    assert list(values) == ["gate"]
    assert result.join(timeout=60) == [2, "gate", 4]
    assert (result.ready(), result.successful(), result.failed()) == (True, True, False)

    failed = group(add.s(1, 1), boom.s()).delay()
    outcomes = failed.get(timeout=60, propagate=False)
    assert (outcomes[0], repr(outcomes[1])) == (2, "ValueError('boom')")
    assert (failed.successful(), failed.failed(), failed.completed_count()) == (False, True, 1)

    nested = group(add.s(1, 1) | group(add.s(1), add.s(2)), add.s(2, 2)).delay()
    nested.save()
    other = harness.sender()
    restored = GroupResult.restore(nested.id, other)
    assert restored == nested
    assert restored.get(timeout=60) == [[3, 4], 4]
    assert GroupResult.restore("unknown", other) is None


async def test_a_canvas_is_sent_and_awaited_with_asyncio(calls: Calls) -> None:
    add, total = calls.add, calls.total
    members = await group(add.s(i, 1) for i in range(5)).adelay()
    assert await members == [1, 2, 3, 4, 5]
    assert sorted([value async for value in members]) == [1, 2, 3, 4, 5]
    chained = await (group(add.s(1, 1), add.s(2, 2)) | total.s()).aapply_async()
    assert await chained.aget(timeout=60) == 6
    assert await chained.parent == [2, 4]


@pytest.mark.every_topology
def test_an_error_callback_runs_once_with_the_job_that_failed_first_or_the_body_of_its_chord(
    harness: WorkerHarness, calls: Calls
) -> None:
    add, boom, note = calls.add, calls.boom, calls.note
    ids = calls.note_id
    single = boom.s()
    single.link_error(note.s("single"))
    failing: list[Canvas[Any, Any]] = [
        single,
        (add.s(1, 1) | boom.s() | note.s() | note.s()).on_error(note.s("chain")),
        chord([add.s(1, 1), boom.s()], note.s()).on_error(note.s("chord")),
        group(boom.s(), add.s(1, 1)).on_error(note.s("group")),
        boom.s() | group(note.s(), note.s()) | note.s().on_error(note.s("body")),
        chord([add.s(1, 1), boom.s()], group(note.s().on_error(note.s("member")), note.s())),
        boom.s().on_error(ids.s()) | note.s().on_error(note.s("not called")),
    ]
    results = [canvas.delay() for canvas in failing]
    results.append(boom.apply_async(link_error=[note.s("option")]))
    for result in results:
        with pytest.raises(ValueError, match=r"^boom$"):
            result.get(timeout=60)
    assert calls.collect.delay("last").get(timeout=60) == ["last"]
    entries = [entry["values"] for entry in harness.journal.wait_for(7, what="note")]
    assert sorted(entry.split("', '")[-1].rstrip("')") for entry in entries) == [
        "body",
        "chain",
        "chord",
        "group",
        "member",
        "option",
        "single",
    ]
    for entry in entries:
        request, reason, trace, own = ast.literal_eval(entry)
        described = "note" if own in {"chord", "body", "member"} else "boom"
        assert (request["task"], request["queue"], reason) == (described, "default", "boom")
        assert "ValueError: boom" in trace
    assert len(harness.journal.wait_for(1, what="id")) == 1


def test_a_revoked_canvas_fails_and_what_runs_before_it_continues(harness: WorkerHarness, calls: Calls) -> None:
    held = harness.app.signature("hold", kwargs={"gate": "gate"})
    result = (held | group(calls.note.s(), calls.note.s()) | calls.total.s()).delay()
    chord_header: GroupResult[Any] = result.parent
    harness.wait_for_start(chord_header.parent)
    assert chord_header.revoke() == ["revoked", "revoked"]
    with pytest.raises(TaskRevokedError):
        result.get(timeout=60)
    harness.open_gate()
    assert chord_header.parent.get(timeout=60) == "gate"
    assert calls.collect.delay("last").get(timeout=60) == ["last"]
    assert harness.journal.all(what="note") == []


@pytest.mark.parametrize("moment", ["before", "while", "malformed"])
def test_the_steps_after_a_revoked_fan_out_job_fail(harness: WorkerHarness, calls: Calls, moment: str) -> None:
    held = harness.app.signature("hold", kwargs={"gate": "gate"})
    result = (held | group(calls.note.s(), calls.note.s()) | calls.total.s()).delay()
    header: GroupResult[Any] = result.parent
    harness.wait_for_start(header.parent)
    dependencies: Any = harness.redis.smembers(harness.keys.dependencies(header[0].id))
    (fan_out,) = dependencies
    if moment == "malformed":
        harness.redis.hset(fan_out, "atm", "many")
    if moment == "while":
        harness.app.queue("default").pause()
        harness.open_gate()
        header.parent.get(timeout=60)
    assert harness.app.queue("default").revoke(fan_out.rpartition(":")[2]) == "revoked"
    harness.app.queue("default").resume()
    for waiting in (result, header):
        with pytest.raises(TaskError, match="malformed job" if moment == "malformed" else "revoked"):
            waiting.get(timeout=30)
    harness.open_gate()
    assert calls.collect.delay("last").get(timeout=60) == ["last"]
    assert harness.journal.all(what="note") == []


def test_a_task_replaced_by_a_canvas_returns_its_result_to_the_next_step(harness: WorkerHarness, calls: Calls) -> None:
    sign = harness.app.signature
    double = sign("double_later", kwargs={"number": 5, "times": 3})
    assert double.delay().get(timeout=60) == 40
    assert (group(double, calls.add.s(1, 1)) | calls.total.s()).delay().get(timeout=60) == 42
    assert sign("adouble_later", kwargs={"number": 4}).delay().get(timeout=60) == [8, 0]
    with pytest.raises(ValueError, match=r"^boom$"):
        (sign("fail_later") | calls.note.s()).delay().get(timeout=60)

    result = (sign("fail_sooner") | calls.note.s()).delay()
    harness.events.wait_for(4, event="failed")  # after the three jobs above
    harness.open_gate("failed")
    with pytest.raises(ValueError, match=r"^boom$"):
        result.get(timeout=60)


def test_a_task_replaced_by_a_canvas_without_calls_runs_once(harness: WorkerHarness, calls: Calls) -> None:
    become = calls.replaced_by
    empty: list[Canvas[Any, Any]] = [group(), group(group(), group()), calls.add.chunks([], 10)]
    canvases: list[tuple[Canvas[Any, Any], Any]] = [(become(canvas), []) for canvas in empty]
    canvases += [
        (become(group()) | calls.collect.s(), [[]]),
        (group(become(group()), calls.add.s(1, 1)) | calls.collect.s(), [[[], 2]]),
        (chord([calls.add.s(1, 1)], become(group())), []),
        (become(become(group())), []),
    ]
    for result, expected in [(canvas.delay(), expected) for canvas, expected in canvases]:
        assert result.get(timeout=60) == expected
    starts = [entry["job"] for entry in harness.journal.all(what="become")]
    assert len(starts) == len(set(starts)) == len(canvases) + 1


@pytest.mark.every_topology
def test_a_task_calls_its_error_callback_if_the_canvas_that_replaces_it_fails(
    harness: WorkerHarness, calls: Calls
) -> None:
    add, total = calls.add, calls.total
    boom: Any = calls.boom
    replacements: dict[str, Canvas[Any, Any]] = {
        "task": boom.s(),
        "chain": add.s(1, 1) | boom.s() | add.s(1),
        "chord": chord([add.s(1, 1), boom.s()], total.s()),
        "body": chord([add.s(1, 1)], boom.s()),
        "group": group(add.s(1, 1), boom.s(), boom.s()),
        "itself": calls.replaced_by(boom.s()),
    }
    results, expected = [], set()
    for name, canvas in replacements.items():

        def become(place: str, name: str = name, canvas: Canvas[Any, Any] = canvas) -> Any:
            expected.add(f"{name} {place}")
            return calls.replaced_by(canvas).on_error(calls.note.s(f"{name} {place}"))

        results += [
            become("alone").delay(),
            (add.s(1, 1) | become("step") | add.s(1)).delay(),
            (add.s(1, 1) | become("end")).delay(),
            chord([become("header"), add.s(1, 1)], total.s()).delay(),
            chord([add.s(1, 1)], become("after")).delay(),
        ]
    for result in results:
        with pytest.raises(ValueError, match=r"^boom$"):
            result.get(timeout=60)
    entries = harness.journal.wait_for(len(expected), what="note")
    assert calls.collect.delay("last").get(timeout=60) == ["last"]
    assert len(harness.journal.all(what="note")) == len(expected), "each is called once"
    called = [ast.literal_eval(entry["values"]) for entry in entries]
    assert {own for _, _, _, own in called} == expected
    assert {(failed["task"], reason) for failed, reason, _, _ in called} == {("boom", "boom")}


def test_an_error_callback_is_called_if_the_child_of_its_call_dies(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1, settings={"max_crashes": 1})
    calls = Calls(harness.app)
    dies = harness.app.signature("dies").on_error(calls.note.s("dies"))
    stuck = harness.app.signature("stuck", time_limit=0.5).on_error(calls.note.s("stuck"))
    for call in (dies, stuck):
        with pytest.raises(Exception, match=r"this running job died|the child process|time limit"):
            call.delay().get(timeout=60)
    values = [ast.literal_eval(entry["values"]) for entry in harness.journal.wait_for(2, what="note")]
    assert [(failed["task"], own) for failed, _, _, own in values] == [("dies", "dies"), ("stuck", "stuck")]


def test_callbacks_keep_the_options_of_their_tasks(harness: WorkerHarness) -> None:
    """``Calls`` of a sender whose tasks have options, and whose worker is paused after the failure."""
    harness.worker(TASKS, children=1)
    app = harness.sender(task_annotations={"note": {"priority": 5, "expires": 60}}, task_routes={"note": "callbacks"})
    calls, boom = Calls(app), app.signature("boom", max_retries=0)
    later = calls.note.s("later").set(countdown=30)
    eta = calls.note.s("eta").set(eta=datetime.now(UTC) + timedelta(hours=1))
    for callback in (calls.note.s("prioritized"), later, eta):
        with pytest.raises(ValueError, match="boom"):
            boom.clone().on_error(callback).delay().get(timeout=60)
    assert calls.add.apply_async((1, 1), link=calls.note.s("linked")).get(timeout=60) == 2
    queue = app.queue("callbacks")
    assert {job.data["values"][-1] for job in queue.get_jobs("prioritized")} == {"prioritized", "linked"}
    delayed = {job.data["values"][-1]: job for job in queue.get_jobs("delayed")}
    assert 28_000 < delayed["later"].opts["delay"] <= 30_000
    assert 3_590_000 < delayed["eta"].opts["delay"] <= 3_600_000
    for job in [*queue.get_jobs("prioritized"), *delayed.values()]:
        assert job.priority == 5
    harness.worker(TASKS, children=1, options=["-Q", "callbacks"])
    assert {ast.literal_eval(entry["values"])[-1] for entry in harness.journal.wait_for(2, what="note")} == {
        "prioritized",
        "linked",
    }


def test_the_programs_of_the_page_print_the_documented_output(
    harness: WorkerHarness, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "how-to" / "canvas.md").read_text()
    source = "".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    harness.worker(source)
    names: dict[str, Any] = {"app": harness.app, "__name__": "tested"}
    exec(compile(source, "canvas.md", "exec", dont_inherit=True), names)
    for name in ("show", "show_nightly", "show_group", "show_guarded", "show_replaced"):
        names[name]()
    printed = capsys.readouterr().out.splitlines()
    values = sorted(printed.pop(4) for _ in range(3))
    assert values == ["0", "2", "4"]
    assert printed == re.findall(r"print\(.*\)\s+# (.*)$", page, re.MULTILINE)
