"""Results: waiting, states, what a handle knows, and progress."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.celery_parity.scenario import Area, raised

AREA = Area("Results")
same, better, differs = AREA.same, AREA.better, AREA.differs


def finished(p: Any) -> Any:
    """Return the result of a task that has finished."""
    result = p.add.delay(2, 3)
    p.get(result)
    return result


def failed(p: Any) -> Any:
    """Return the result of a task that has failed."""
    result = p.boom.delay()
    p.fails(result)
    return result


def held(p: Any) -> Any:
    """Return the result of a task that is running."""
    result = p.hold.delay(p.key)
    p.notes()
    return result


def while_held(use: Any) -> Any:
    """Return code that uses the result of a running task, which then ends."""

    def run(p: Any) -> object:
        result = held(p)
        try:
            return use(result)
        finally:
            p.open_gate()
            p.get(result)

    return run


def handle(p: Any, result: Any) -> Any:
    """Return another handle of the same task."""
    return p.app.AsyncResult(result.id) if p.is_celery else p.app.result(result.id)


# ---- waiting ---------------------------------------------------------------------------------------------------------

same("`get` waits for the task.", "held", lambda p: waited(p))
same("`get` returns the same value each time.", [5, 5], lambda p: [finished(p).get() for _ in range(2)])
same("`get(propagate=False)` returns the exception.", "boom", lambda p: str(p.boom.delay().get(60, propagate=False)))
same(
    "`result.wait` is an alias of `result.get`.",
    5,
    lambda p: p.add.delay(2, 3).wait(timeout=60),
)
differs(
    "`get(timeout=…)` raises `TimeoutError`.",
    ("TimeoutError", "ResultTimeoutError"),
    "the error is `ResultTimeoutError`, a subclass of Python's `TimeoutError`",
    while_held(lambda result: result.get(timeout=0.1)),
)
better(
    "`except TimeoutError` does not catch the error of `get(timeout=…)`, unless it is imported from Celery.",
    ("missed", "caught"),
    "`except TimeoutError` catches it: `ResultTimeoutError` is a subclass of Python's `TimeoutError`",
    while_held(lambda result: catches_timeout(result)),
)
same("The task continues after `get(timeout=…)` has timed out.", "held", lambda p: goes_on(p))
better(
    "`get` of an id that does not exist waits forever.",
    ("TimeoutError", "JobNotFoundError"),
    "bulltask raises an error immediately",
    lambda p: handle_of_nothing(p).get(timeout=1),
)
differs(
    "`get(callback=…)` calls a function with the id and the result.",
    (5, "TypeError"),
    "`get` returns the result, and the caller has the id",
    lambda p: p.add.delay(2, 3).get(timeout=60, callback=lambda _, value: value) or 5,
)
same(
    "`get(interval=…)` returns the result.",
    5,
    lambda p: p.add.delay(2, 3).get(timeout=60, interval=0.1),
)
same(
    "`get(no_ack=…, follow_parents=…)` returns the result.",
    5,
    lambda p: p.add.delay(2, 3).get(timeout=60, no_ack=False, follow_parents=False),
)
differs(
    "`get(on_message=…)` calls a function for each change of the task's state.",
    (True, False),
    "results are not messages; use `result.progress` or the queue's events",
    lambda p: on_message(p),
)
differs(
    "`result.then(callback)` calls a function when the result arrives.",
    (True, False),
    "use `link`, or `await result`",
    lambda p: hasattr(finished(p), "then"),
)
same(
    "`result.collect()` iterates over the results of a task and of the steps after it.",
    [3, 13],
    lambda p: collected(p),
)


def on_message(p: Any) -> object:
    messages: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert p.add.delay(2, 3).get(timeout=60, on_message=messages.append) == 5
    return bool(messages)


def collected(p: Any) -> object:
    return [value for _, value in finished_chain(p).parent.collect()]


def finished_chain(p: Any) -> Any:
    result = (p.add.s(1, 2) | p.add.s(10)).delay()
    p.get(result)
    return result


def waited(p: Any) -> object:
    result = held(p)
    p.open_gate()
    return p.get(result)


def goes_on(p: Any) -> object:
    result = held(p)
    try:
        result.get(timeout=0.1)
    except Exception:  # noqa: BLE001 - the two libraries raise different ones
        p.open_gate()
    return p.get(result)


def catches_timeout(result: Any) -> str:
    try:
        result.get(timeout=0.1)
    except TimeoutError:
        return "caught"
    except Exception:  # noqa: BLE001 - Celery's is not a subclass
        return "missed"
    return "returned"


def handle_of_nothing(p: Any) -> Any:
    return p.app.AsyncResult(p.key) if p.is_celery else p.app.result(p.key)


# ---- states ----------------------------------------------------------------------------------------------------------

same("`ready()` is false while a task runs.", False, while_held(lambda result: result.ready()))
same("`ready()` is true after a success.", True, lambda p: finished(p).ready())
same("`ready()` is true after a failure.", True, lambda p: failed(p).ready())
same("`successful()` is true after a success.", True, lambda p: finished(p).successful())
same("`successful()` is false after a failure.", False, lambda p: failed(p).successful())
same("`failed()` is true after a failure.", True, lambda p: failed(p).failed())
same("`failed()` is false after a success.", False, lambda p: finished(p).failed())
differs(
    "`str(result.state)` of a success is `SUCCESS`.",
    ("SUCCESS", "completed"),
    'the state has BullMQ\'s name, `completed`; `result.state == "SUCCESS"` is true, and `result.status` is `SUCCESS`',
    lambda p: str(finished(p).state),
)
differs(
    "`str(result.state)` of a failure is `FAILURE`.",
    ("FAILURE", "failed"),
    'the state has BullMQ\'s name, `failed`; `result.state == "FAILURE"` is true, and `result.status` is `FAILURE`',
    lambda p: str(failed(p).state),
)
better(
    "The state of a running task is `PENDING`, unless `track_started` is set.",
    ("PENDING", "active"),
    "its state is always `active`, and its status `STARTED`",
    while_held(lambda result: str(result.state)),
)
better(
    "The state of a waiting task is `PENDING`.",
    ("PENDING", "delayed"),
    "its state is `waiting`, `prioritized`, `delayed` or `waiting-children`",
    lambda p: str(p.add.apply_async((2, 3), countdown=1).state),
)
better(
    "The state of an id that does not exist is `PENDING`.",
    ("PENDING", "unknown"),
    "its state is `unknown`",
    lambda p: str(handle_of_nothing(p).state),
)
same(
    "`result.status` of a success is `SUCCESS`, and of a failure `FAILURE`.",
    ["SUCCESS", "FAILURE"],
    lambda p: [finished(p).status, failed(p).status],
)
same(
    "`result.state` of a finished task equals `result.status`.",
    True,
    lambda p: (lambda r: r.state == r.status)(finished(p)),
)
same("A handle for the same id sees the same state.", True, lambda p: handle(p, finished(p)).successful())
same("A handle for the same id returns the same value.", 5, lambda p: handle(p, finished(p)).get(timeout=60))
same("`app.AsyncResult(id)` is a handle for any task.", 5, lambda p: p.get(p.app.AsyncResult(finished(p).id)))

# ---- what a handle knows ---------------------------------------------------------------------------------------------

same("`result.info` of a success is the return value.", 5, lambda p: finished(p).info)
same("`result.info` of a failure is the exception.", "ValueError", lambda p: type(failed(p).info).__name__)
same("`result.traceback` of a successful task is `None`.", None, lambda p: finished(p).traceback)
same("`result.parent` of a single task is `None`.", None, lambda p: finished(p).parent)
same("Two handles for the same task are equal.", True, lambda p: equal(p))
same("A handle equals its id.", True, lambda p: (lambda result: result == result.id)(p.add.delay(1, 2)))
same("Handles can be members of a set.", 1, lambda p: len(set(both_handles(p))))
differs(
    "`str(result)` is the id.",
    (True, False),
    "the string also contains the queue",
    lambda p: (lambda result: str(result) == result.id)(finished(p)),
)
same("`result.result` is the return value.", 5, lambda p: finished(p).result)
same(
    "`result.children` has the handles of the callbacks of a task.",
    [20],
    lambda p: linked(p),
)
same("`result.children` has the handles of the steps after a task.", [13], lambda p: children(p))
same(
    "`result.date_done` is when the task finished, in UTC.",
    True,
    lambda p: abs(datetime.now(UTC) - finished(p).date_done) < timedelta(minutes=1),
)
better(
    "`result.name` and `result.kwargs` are `None`, unless `result_extended` is set.",
    ([False, None], [True, {"x": 2, "y": 3}]),
    "a job contains its call: `kwargs` has the arguments by name, and `args` is usually empty",
    lambda p: [finished(p).name == p.add.name, finished(p).kwargs],
)
same(
    "After `result.forget()`, the status is `PENDING`, as for an id that does not exist.",
    "PENDING",
    lambda p: forgotten(p),
)
same(
    "`result.as_tuple()` returns a serializable form.",
    True,
    lambda p: hasattr(finished(p), "as_tuple"),
)
same("`ResultSet` waits for results that belong to no group.", [5, 9], lambda p: result_set(p).get(timeout=60))
same("A `ResultSet` counts the tasks that have succeeded.", 2, lambda p: counted(result_set(p)))
same(
    "`ResultSet.add` and `update` add only results that are not members; `remove` removes one.",
    [2, 1, "KeyError"],
    lambda p: changed(result_set(p)),
)
same("`self.update_state(state, meta)` reports progress.", {"done": 5}, lambda p: reports(p))
better(
    "A result cannot be awaited.",
    (False, True),
    "`await result` works in `async def`",
    lambda p: hasattr(finished(p), "__await__"),
)


def result_set(p: Any) -> Any:
    module = __import__("celery.result", fromlist=["ResultSet"]) if p.is_celery else p.library
    return module.ResultSet([p.add.delay(2, 3), p.add.delay(4, 5)])


def counted(results: Any) -> object:
    results.get(timeout=60)
    return results.completed_count()


def changed(results: Any) -> list[object]:
    first, second = results.results
    results.add(first)
    results.update([first, second])
    sizes = [len(results.results)]
    results.remove(first)
    results.discard(first)
    sizes.append(len(results.results))
    return [*sizes, raised(lambda: results.remove(first))]


def both_handles(p: Any) -> list[Any]:
    result = finished(p)
    return [result, handle(p, result)]


def children(p: Any) -> object:
    return [p.get(child) for child in finished_chain(p).parent.children]


def forgotten(p: Any) -> str:
    result = finished(p)
    result.forget()
    return str(handle(p, result).status)


def equal(p: Any) -> bool:
    first, second = both_handles(p)
    return bool(first == second)


def reports(p: Any) -> object:
    result = p.progress.delay(p.key)
    p.wait_for(lambda: p.notes_so_far() or result.ready())
    progress = result.info
    p.open_gate()
    p.get(result)
    return progress


def linked(p: Any) -> object:
    result = p.add.apply_async((2, 2), link=p.add.s(16))
    p.get(result)
    return [p.get(child) for child in result.children]
