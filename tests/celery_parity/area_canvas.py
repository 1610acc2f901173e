"""Canvas: signatures, chains, groups, chords, callbacks, map, starmap, chunks, and the results of groups."""

from __future__ import annotations

from typing import Any

from tests.celery_parity.scenario import Area

AREA = Area("Canvas")
same, better, differs = AREA.same, AREA.better, AREA.differs

# ---- signatures ------------------------------------------------------------------------------------------------------

same("`task.s(…)` describes a call, and `delay()` sends it.", 5, lambda p: p.get(p.add.s(2, 3)))
same(
    "`task.signature(args, kwargs, **options)` describes a call with options.",
    5,
    lambda p: p.get(p.add.signature((2,), {"y": 3})),
)
same(
    "`task.subtask` is an alias of `task.signature`.",
    5,
    lambda p: p.get(p.add.subtask((2, 3))),
)
same("`signature(…)()` calls the function in this process.", 5, lambda p: p.add.s(2, 3)())
same("`~signature` sends the call and waits for its result.", 5, lambda p: ~p.add.s(2, 3))
same("`delay(…)` completes a partial signature.", 5, lambda p: p.get(p.add.s(3).delay(2)))
same(
    "Arguments of `delay` come before those of the signature.",
    ["new", "old"],
    lambda p: p.get(p.collect.s("old").delay("new")),
)
same(
    "New keyword arguments replace those of the signature.",
    "hi Ada!",
    lambda p: p.get(p.greet.s("Ada", greeting="hello").delay(greeting="hi")),
)
same("`si(…)` ignores new arguments.", 5, lambda p: p.get(p.add.si(2, 3).delay(100)))
same("`clone` returns a copy with more arguments.", 5, lambda p: p.get(p.add.s(3).clone((2,))))
same("`clone` does not change the original.", [[2, 3], [3]], lambda p: clones(p))
same(
    "`set` changes the signature and returns it.",
    True,
    lambda p: (lambda call: call.set(countdown=0) is call)(p.add.s(1, 2)),
)
same("`set(countdown=…)` delays the call.", 5, lambda p: p.get(p.add.s(2, 3).set(countdown=0.1)))
same(
    "`set(immutable=True)` makes a signature immutable.", 5, lambda p: p.get(p.add.s(2, 3).set(immutable=True).delay(9))
)
same(
    "`apply_async(countdown=…)` sets the call's options.", 5, lambda p: p.get(p.add.s(2, 3).apply_async(countdown=0.1))
)
better(
    "A signature with too many arguments raises an error when it is sent.",
    ("sent", "TypeError"),
    "the error is raised when the signature is created",
    lambda p: p.add.s(1, 2, 3) and "sent",
)
differs(
    "A signature is a dictionary.",
    ("dict", "object"),
    'it is an object; `dict(call)`, `call.to_dict()` and `call["task"]` work, `json.dumps(call)` does not',
    lambda p: "dict" if isinstance(p.add.s(1, 2), dict) else "object",
)
same(
    "A signature can be an argument of a task. The task receives a dictionary, and `signature(…)` turns it back "
    "into a signature.",
    5,
    lambda p: p.get(p.signature(p.get(p.collect.delay(p.add.s(2, 3)))[0], app=p.app)),
)
same(
    "A chain, a group or a chord can be an argument of a task.",
    [13, [3], 3],
    lambda p: [p.get(p.signature(one, app=p.app)) for one in p.get(p.collect.delay(*canvases(p)))],
)
same("`add.s(2) == add.s(2)` is true.", True, lambda p: p.add.s(2) == p.add.s(2))
same(
    "Chains, groups and chords are instances of `Signature`; a group is one of `group`, and a chord one of `chord`.",
    [True, True, True, True],
    lambda p: [
        isinstance(p.group([]), p.Signature),
        isinstance(p.add.s(1, 2) | p.add.s(3), p.Signature),
        isinstance(p.group([p.add.s(1, 2)]), p.group),
        isinstance(p.chord([p.add.s(1, 2)], p.total.s()), p.chord),
    ],
)
same(
    "`freeze` chooses the id of a call before it is sent.",
    True,
    lambda p: (lambda call: call.freeze().id == call.delay().id)(p.add.s(1, 2)),
)
same(
    "`chain(…, task_id=…)` is the id of the last step.",
    "last-of-chain",
    lambda p: p.chain([p.add.s(1, 2), p.add.s(3)], task_id="last-of-chain").delay().id,
)


def clones(p: Any) -> object:
    original = p.add.s(3)
    return [list(original.clone((2,)).args), list(original.args)]


def canvases(p: Any) -> list[Any]:
    return [
        p.chain(p.add.s(1, 2), p.add.s(10)),
        p.group([p.add.s(1, 2)]),
        p.chord([p.add.s(1, 2)], p.total.s()),
    ]


# ---- chains ----------------------------------------------------------------------------------------------------------

same("A chain runs its steps one after the other.", 13, lambda p: p.get(p.chain(p.add.s(1, 2), p.add.s(10))))
same("`a | b` is a chain.", 13, lambda p: p.get(p.add.s(1, 2) | p.add.s(10)))
same("`chain([a, b])` takes a list.", 13, lambda p: p.get(p.chain([p.add.s(1, 2), p.add.s(10)])))
same("`chain(a, b)()` sends the chain.", 13, lambda p: p.get(p.chain(p.add.s(1, 2), p.add.s(10))()))
same(
    "The result of a step is the first argument of the next.",
    [[1], 2],
    lambda p: p.get(p.collect.s(1) | p.collect.s(2)),
)
same("An immutable step ignores the result of the step before.", 11, lambda p: p.get(p.add.s(1, 2) | p.add.si(5, 6)))
same("Chains can be joined.", 1113, lambda p: p.get((p.add.s(1, 2) | p.add.s(10)) | (p.add.s(100) | p.add.s(1000))))
same("`chain.delay(…)` passes arguments to the first step.", 16, lambda p: p.get((p.add.s(5) | p.add.s(10)).delay(1)))
same("A chain of twenty steps runs.", 21, lambda p: p.get(p.chain(p.add.s(1, 1), *[p.add.s(1) for _ in range(19)])))
same(
    "The `parent` of a chain's result is the result of the step before.",
    3,
    lambda p: parent_of_chain(p).get(timeout=60),
)
same("The parent of the first step is `None`.", None, lambda p: parent_of_chain(p).parent)
same("A failed step fails the chain with its exception.", "ValueError", lambda p: p.get(p.boom.si() | p.add.s(1)))
same(
    "The steps after a failed one do not run.",
    [],
    lambda p: notes_after_failure(p, p.boom.si() | p.note.si("ran", p.key)),
)
same("A failed step fails immutable steps, too.", "ValueError", lambda p: p.get(p.boom.si() | p.add.si(1, 2)))
same("The result of a chain in which a step fails is in the state `FAILURE`.", True, lambda p: failed_chain(p).failed())
same(
    "A failed step fails the chord after it.",
    "ValueError",
    lambda p: p.get(p.boom.si() | p.group(p.add.s(1), p.add.s(2)) | p.total.s()),
)
same(
    "`chain` with an argument that is not a signature raises `TypeError`.", "TypeError", lambda p: p.get(p.chain(1, 2))
)
same("A step can be retried.", 11, lambda p: p.get(p.retries.s(p.key, 1) | p.add.s(10)))


def parent_of_chain(p: Any) -> Any:
    result = (p.add.s(1, 2) | p.add.s(10)).delay()
    p.get(result)
    return result.parent


def notes_after_failure(p: Any, canvas: Any) -> object:
    result = canvas.delay()
    while result.parent is not None:
        result = result.parent
    p.fails(result)
    p.get(p.add.delay(1, 2))
    return p.notes_so_far()


def failed_chain(p: Any) -> Any:
    result = (p.boom.si() | p.add.si(1, 2) | p.add.si(3, 4)).delay()
    p.fails(result)
    p.wait_for(result.ready)
    return result


# ---- groups ----------------------------------------------------------------------------------------------------------

same(
    "A group returns the list of its members' results.", [2, 4], lambda p: p.get(p.group(p.add.s(1, 1), p.add.s(2, 2)))
)
same(
    "The results of a group are in the order of its members.",
    list(range(20)),
    lambda p: p.get(p.group(p.plain.s(n) for n in range(20))),
)
same("`group([…])` takes a list.", [2, 4], lambda p: p.get(p.group([p.add.s(1, 1), p.add.s(2, 2)])))
same("`group(…)()` sends the group.", [2], lambda p: p.get(p.group(p.add.s(1, 1))()))
same("An empty group returns an empty list.", [], lambda p: p.group([]).delay().get(timeout=60))
same(
    "`group.delay(…)` passes arguments to each member.",
    [11, 12],
    lambda p: p.get(p.group(p.add.s(1), p.add.s(2)).delay(10)),
)
same("A group in a group is flattened.", [2, 4, 6], lambda p: p.get(nested_group(p)))
same("A chain can be a member.", [13, 4], lambda p: p.get(p.group(p.add.s(1, 2) | p.add.s(10), p.add.s(2, 2))))
same("A failed member fails the group.", "ValueError", lambda p: p.get(p.group(p.add.s(1, 1), p.boom.s())))
same("If a member fails, the other members still run.", 2, lambda p: failing_group(p).results[0].get(timeout=60))
same(
    "`group.tasks` are the members.",
    2,
    lambda p: len(p.group(p.add.s(1, 1), p.add.s(2, 2)).tasks),
)
same(
    "Each member of a group after a step receives the step's result.",
    [13, 23],
    lambda p: p.get(p.add.s(1, 2) | p.group(p.add.s(10), p.add.s(20))),
)


def nested_group(p: Any) -> Any:
    return p.group(p.add.s(1, 1), p.group(p.add.s(2, 2), p.add.s(3, 3)))


def failing_group(p: Any) -> Any:
    result = p.group(p.add.s(1, 1), p.boom.s()).delay()
    p.fails(result)
    return result


# ---- results of groups -----------------------------------------------------------------------------------------------


def done(p: Any) -> Any:
    """Return the result of a group that has finished."""
    result = p.group(p.add.s(n, n) for n in range(3)).delay()
    p.get(result)
    return result


same("`result.join()` is `get()`.", [0, 2, 4], lambda p: done(p).join(timeout=60))
same("`get(propagate=False)` returns the exceptions in the list.", [2, "boom"], lambda p: unpropagated(p))
same("`result.completed_count()` counts the members that have succeeded.", 3, lambda p: done(p).completed_count())
same("`result.completed_count()` does not count failed members.", 1, lambda p: failing_group(p).completed_count())
same("`result.successful()` is true if all members have succeeded.", True, lambda p: done(p).successful())
same("`result.failed()` is true if a member has failed.", True, lambda p: failing_group(p).failed())
same("`result.ready()` is true when all members have finished.", True, lambda p: done(p).ready())
same("`result.waiting()` is true while a member has not finished.", [True, False], lambda p: waiting(p))
same(
    "`result[0]` and `len(result)` refer to the members.",
    [2, 3],
    lambda p: (lambda r: [r[1].get(timeout=60), len(r)])(done(p)),
)
same(
    "`result.results` is the list of the members' results.",
    [0, 2, 4],
    lambda p: [r.get(timeout=60) for r in done(p).results],
)
same(
    "Iterating over the result yields the members' results.",
    [0, 2, 4],
    lambda p: [r.get(timeout=60) for r in done(p)],
)
differs(
    "The result of a group no longer has `iterate()`.",
    ("AttributeError", [0, 2, 4]),
    "bulltask has `iterate()`, which returns the values in the order in which the members finish",
    lambda p: sorted(done(p).iterate()),
)
same("`result.join_native()` waits for all members.", [0, 2, 4], lambda p: done(p).join_native(timeout=60))
same(
    "`result.save()` stores the members of a group, and `GroupResult.restore(id)` finds them.",
    [0, 2, 4],
    lambda p: restored(p),
)
same("`result.delete()` removes a group that was saved.", None, lambda p: deleted(p))
same("The `parent` of the result of a group after a step is the result of that step.", 3, lambda p: parent_of_group(p))
better(
    "The result of a group cannot be awaited.",
    (False, True),
    "`await result` and `async for value in result` work",
    lambda p: hasattr(done(p), "__await__") and hasattr(done(p), "__aiter__"),
)


def restored(p: Any) -> object:
    result = done(p)
    result.save()
    return type(result).restore(result.id, app=p.app).get(timeout=60)


def deleted(p: Any) -> object:
    result = done(p)
    result.save()
    result.delete()
    return type(result).restore(result.id, app=p.app)


def unpropagated(p: Any) -> object:
    values = p.group(p.add.s(1, 1), p.boom.s()).delay().get(timeout=60, propagate=False)
    return [str(value) if isinstance(value, Exception) else value for value in values]


def waiting(p: Any) -> object:
    result = p.group(p.hold.s(p.key), p.add.s(1, 1)).delay()
    p.notes()
    before = result.waiting()
    p.open_gate()
    p.get(result)
    return [before, result.waiting()]


def parent_of_group(p: Any) -> object:
    result = (p.add.s(1, 2) | p.group(p.add.s(10), p.add.s(20))).delay()
    p.get(result)
    return result.parent.get(timeout=60)


# ---- chords ----------------------------------------------------------------------------------------------------------

same(
    "A chord's body receives the list of the header's results.",
    6,
    lambda p: p.get(p.chord([p.add.s(1, 1), p.add.s(2, 2)], p.total.s())),
)
same("`chord(header)(body)` sends the chord.", 6, lambda p: p.get(p.chord([p.add.s(1, 1), p.add.s(2, 2)])(p.total.s())))
same("`group(…) | task` is a chord.", 6, lambda p: p.get(p.group(p.add.s(1, 1), p.add.s(2, 2)) | p.total.s()))
same(
    "An immutable body receives no result.",
    3,
    lambda p: p.get(p.chord([p.add.s(1, 1), p.add.s(2, 2)], p.add.si(1, 2))),
)
same(
    "The body can have its own arguments.",
    [[2, 4], "x"],
    lambda p: p.get(p.chord([p.add.s(1, 1), p.add.s(2, 2)], p.collect.s("x"))),
)
same(
    "With a header of one member, the body receives a list.",
    [[2]],
    lambda p: p.get(p.chord([p.add.s(1, 1)], p.collect.s())),
)
same("A chord with an empty header runs its body.", [[]], lambda p: p.get(p.chord([], p.collect.s())))
same(
    "The body can be a chain.",
    106,
    lambda p: p.get(p.chord([p.add.s(1, 1), p.add.s(2, 2)], p.total.s() | p.add.s(100))),
)
same(
    "The body can be a group.",
    [6, [[2, 4]]],
    lambda p: p.get(p.chord([p.add.s(1, 1), p.add.s(2, 2)], p.group(p.total.s(), p.collect.s()))),
)
same(
    "A step can follow a chord.",
    16,
    lambda p: p.get(p.chord([p.add.s(1, 1), p.add.s(2, 2)], p.total.s()) | p.add.s(10)),
)
same("A chord can follow a step.", 36, lambda p: p.get(p.add.s(1, 2) | p.group(p.add.s(10), p.add.s(20)) | p.total.s()))
same(
    "A header can contain chains.",
    [[13, 4]],
    lambda p: p.get(p.chord([p.add.s(1, 2) | p.add.s(10), p.add.s(2, 2)], p.collect.s())),
)
same("A header can contain chords.", [[6, 6]], lambda p: p.get(p.chord([inner(p), inner(p)], p.collect.s())))
same(
    "If a chain in the header ends with a group, its result is a list.",
    [[[6, 7], 11]],
    lambda p: p.get(p.group(p.add.s(1, 2) | p.group(p.add.s(3), p.add.s(4)), p.add.s(5, 6)) | p.collect.s()),
)
same(
    "A group can follow a group.",
    [6, 6],
    lambda p: p.get(p.group(p.add.s(1, 1), p.add.s(2, 2)) | p.group(p.total.s(), p.total.s())),
)
same("A chord with 100 members runs.", 9900, lambda p: p.get(p.chord([p.add.s(n, n) for n in range(100)], p.total.s())))
same(
    "A member of the header can be retried.",
    [[1, 4]],
    lambda p: p.get(p.chord([p.retries.s(p.key, 1), p.add.s(2, 2)], p.collect.s())),
)
same("The body runs once.", ["[[2, 4]]"], lambda p: body_runs(p))
differs(
    "In a chain, a group with one member becomes that member; the next step receives a value.",
    ([2], [[2]]),
    "the step after a group always receives a list",
    lambda p: p.get(p.add.s(1, 1) | p.group([p.add.s(0)]) | p.collect.s()),
)
same("`get` of a chord raises the exception of a failed member.", "ValueError", lambda p: p.get(failing_chord(p)))
better(
    "If a member fails, the error of the body's result is a `ChordError` with the message of the member's exception.",
    ("ChordError", "ValueError"),
    "`get` raises the member's exception, so `except ValueError` catches it",
    lambda p: error_of_body(p),
)
same("The body does not run if a member fails.", [], lambda p: body_after_failure(p))
same("The body fails once if several members fail.", [], lambda p: body_after_failure(p, 3))


def failing_chord(p: Any) -> Any:
    return p.chord([p.add.s(1, 1), p.boom.s()], p.total.s())


def error_of_body(p: Any) -> str:
    result = failing_chord(p).delay()
    p.wait_for(result.ready)
    return type(result.info).__name__


def inner(p: Any) -> Any:
    return p.chord([p.add.s(1, 1), p.add.s(2, 2)], p.total.s())


def body_runs(p: Any) -> object:
    p.get(p.chord([p.add.s(1, 1), p.add.s(2, 2)], p.note.s(p.key)))
    p.get(p.add.delay(1, 2))
    return p.notes_so_far()


def body_after_failure(p: Any, failures: int = 1) -> object:
    p.fails(p.chord([p.add.s(1, 1), *[p.boom.s()] * failures], p.note.s(p.key)))
    p.get(p.add.delay(1, 2))
    return p.notes_so_far()


# ---- callbacks -------------------------------------------------------------------------------------------------------

same("`link` calls a task with the result.", "[3]", lambda p: linked(p, p.add.s(1, 2)))
same(
    "`apply_async(link=…)` also calls a task with the result.",
    "[3]",
    lambda p: p.get(p.add.apply_async((1, 2), link=p.note.s(p.key))) and p.notes()[0],
)
same(
    "`send_task(link=…)` also calls a task with the result.",
    "[3]",
    lambda p: p.get(p.app.send_task(p.add.name, (1, 2), link=p.note.s(p.key))) and p.notes()[0],
)
same("`apply_async(link=[…])` takes a list.", ["['a']", "['b']"], lambda p: linked_list(p))
same(
    "An immutable callback does not receive the result.",
    "['called']",
    lambda p: p.get(p.add.apply_async((1, 2), link=p.note.si("called", p.key))) and p.notes()[0],
)
same(
    "`link` of a chain is called with the result of its last step.",
    "[13]",
    lambda p: linked(p, p.add.s(1, 2) | p.add.s(10)),
)
same(
    "A callback is not called if the task fails.",
    [],
    lambda p: p.fails(p.boom.apply_async(link=p.note.s(p.key))) and p.notes_so_far(),
)
same("A callback is called once if the task is retried.", ["[2]"], lambda p: linked_to_retried(p))
better(
    "`link` of a group calls the task after the first member has completed, without that member's result.",
    ("[]", "[[2, 4]]"),
    "bulltask calls it with the list of all results",
    lambda p: linked(p, p.group(p.add.s(1, 1), p.add.s(2, 2))),
)
same("`link_error` calls a task with the id of the task that failed.", True, lambda p: notes_failed_id(p))
differs(
    "An error callback with several parameters receives the request, the exception and the traceback.",
    ("['Context', 'ValueError', 'str']", "['FailedRequest', 'str', 'str']"),
    "the callback is a separate job, whose arguments are JSON",
    lambda p: describes_failure(p),
)
same("An immutable error callback receives no additional arguments.", "['failed']", lambda p: on_error(p, p.boom.s()))
same(
    "An error callback is not called if the task succeeds.",
    [],
    lambda p: p.get(p.add.apply_async((1, 2), link_error=p.note.si("failed", p.key))) and p.notes_so_far(),
)
same("An error callback is called after the last retry.", ["['failed']"], lambda p: errbacks_after_retries(p))
same("`on_error` of a chain is called if a step fails.", "['failed']", lambda p: on_error(p, p.boom.si() | p.add.s(1)))
same(
    "`on_error` of a chain is called for a later step.",
    "['failed']",
    lambda p: on_error(p, p.add.si(1, 2) | p.boom.s()),
)
same(
    "`apply_async(link_error=…)` of a chain is called if a later step fails.",
    "['failed']",
    lambda p: on_error_of_later_step(p),
)
same(
    "`apply_async(link=…)` of a chain is called with the result of the last step.",
    "[13]",
    lambda p: linked_chain(p),
)
same(
    "`on_error` of a chord is called if a member fails.",
    "['failed']",
    lambda p: on_error(p, p.chord([p.add.s(1, 1), p.boom.s()], p.total.s())),
)


same(
    "`link_error` of a chord is called with the id of the body if a member fails.",
    True,
    lambda p: notes_id_of_body(p),
)


def notes_id_of_body(p: Any) -> bool:
    chord = p.chord([p.add.s(1, 1), p.boom.s()], p.total.s())
    chord.link_error(p.note_failed_id.s(p.key))
    result = chord.delay()
    p.fails(result)
    return bool(p.notes() == [result.id])


def linked(p: Any, canvas: Any) -> object:
    canvas.link(p.note.s(p.key))
    p.get(canvas)
    return p.notes()[0]


def linked_chain(p: Any) -> object:
    (p.add.s(1, 2) | p.add.s(10)).apply_async(link=p.note.s(p.key))
    return p.notes()[0]


def on_error_of_later_step(p: Any) -> object:
    (p.add.si(1, 2) | p.boom.s()).apply_async(link_error=p.note.si("failed", p.key))
    return p.notes()[0]


def linked_list(p: Any) -> object:
    p.get(p.add.apply_async((1, 2), link=[p.note.si("a", p.key), p.note.si("b", p.key)]))
    return sorted(p.notes(2))


def linked_to_retried(p: Any) -> object:
    other = p.again()
    p.get(p.retries.apply_async((other.key, 2), link=p.note.s(p.key)))
    first = p.notes()
    p.get(p.add.delay(1, 2))
    return first + p.notes_so_far()


def notes_failed_id(p: Any) -> bool:
    result = p.boom.apply_async(link_error=p.note_failed_id.s(p.key))
    p.fails(result)
    return bool(p.notes() == [result.id])


def describes_failure(p: Any) -> object:
    p.fails(p.boom.apply_async(link_error=p.describe_failure.s(p.key)))
    return p.notes()[0]


def errbacks_after_retries(p: Any) -> object:
    other = p.again()
    p.fails(p.autoretries.apply_async((other.key, 9), link_error=p.note.si("failed", p.key)))
    first = p.notes()
    p.get(p.add.delay(1, 2))
    return first + p.notes_so_far()


def on_error(p: Any, canvas: Any) -> str:
    p.fails(canvas.on_error(p.note.si("failed", p.key)))
    return str(p.notes()[0])


# ---- many calls in few tasks -----------------------------------------------------------------------------------------

same("`map` calls a task for each item, in one task.", [3, 7], lambda p: p.get(p.total.map([[1, 2], [3, 4]])))
same(
    "`starmap` calls a task with several arguments for each item.",
    [3, 7],
    lambda p: p.get(p.add.starmap([(1, 2), (3, 4)])),
)
same(
    "`chunks` makes a group of `starmap` tasks.",
    [[0, 2], [4, 6], [8]],
    lambda p: p.get(p.add.chunks([(n, n) for n in range(5)], 2)()),
)
same("A failed call of `map` fails the whole task.", "ValueError", lambda p: p.get(p.boom.map([1, 2])))
same("`map` over an empty list returns an empty list.", [], lambda p: p.get(p.total.map([])))
same("A step can follow `starmap`.", 10, lambda p: p.get(p.add.starmap([(1, 2), (3, 4)]) | p.total.s()))

# ---- in tasks --------------------------------------------------------------------------------------------------------

same("A task can send a canvas.", "['inside']", lambda p: p.get(p.sends_a_chain.delay(p.key)) and p.notes()[0])
same("`self.replace(signature)` lets another task produce the result.", 3, lambda p: p.get(p.replaces_itself.delay()))
same(
    "A step after a task that replaces itself receives the result of the replacement.",
    13,
    lambda p: p.get(p.replaces_itself.s() | p.add.s(10)),
)
differs(
    "`self.add_to_chord(signature)` adds a member to the chord of a running member; elsewhere, it raises an error.",
    ("ValueError", "TypeError"),
    "a chord has a fixed number of members, so it always raises an error; `self.replace(group(…))` in the member has "
    "the same effect",
    lambda p: p.fails(p.adds_to_chord.delay()),
)
same(
    "`app.signature(dict(call))` restores a call that was stored.",
    5,
    lambda p: p.get(p.app.signature(dict(p.add.s(2, 3)))),
)
same(
    "`chain` leaves out empty groups; in `a | group() | b`, `b` receives an empty list.",
    [6, [[]]],
    lambda p: [
        p.get(p.chain([p.add.s(1, 2), p.group([]), p.add.s(3)])),
        p.get(p.add.s(1, 2) | p.group([]) | p.collect.s()),
    ],
)
same("An empty chain in a group is left out.", [3], lambda p: p.get(p.group([p.chain(), p.add.s(1, 2)])))
same("`chord` takes a single call as its header.", 3, lambda p: p.get(p.chord(p.add.s(1, 2), p.total.s())))
same(
    "`chord.tasks` are the members of its header, and `chord.body` is the call that follows.",
    [1, "total"],
    lambda p: [len(canvases(p)[2].tasks), canvases(p)[2].body.name.rpartition(".")[2]],
)
same("`stamp` adds stamps to each task of a workflow.", [[{"team": "a"}]] * 2, lambda p: stamped(p))


def stamped(p: Any) -> object:
    canvas = p.group(p.request.s(["stamps"]), p.chain(p.add.si(1, 2), p.request.si(["stamps"])))
    canvas.stamp(team="a")
    return p.get(canvas)
