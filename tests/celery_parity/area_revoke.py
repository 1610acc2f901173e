"""Revoke: tasks that wait, tasks that run, and what happens to the process."""

from __future__ import annotations

from typing import Any

from tests.celery_parity.scenario import Area, raised

AREA = Area("Revoke")
same, better, differs = AREA.same, AREA.better, AREA.differs


def delayed(p: Any) -> Any:
    """Return the result of a task that starts in two seconds, and is revoked now."""
    result = p.note.apply_async(("ran", p.key), countdown=2)
    result.revoke()
    return result


def queued(p: Any) -> Any:
    """Return the result of a task that was revoked while it waited in its queue."""
    other = p.again()
    p.hold.apply_async((other.key,), queue="single")
    other.notes()
    result = p.note.apply_async(("ran", p.key), queue="single")
    result.revoke()
    p.get(p.add.delay(1, 2))
    other.open_gate()
    return result


def running(p: Any, **options: Any) -> Any:
    """Return the result of a task that was revoked while it ran."""
    result = p.hold.delay(p.key)
    p.notes()
    result.revoke(**options)
    return result


# ---- tasks that wait -------------------------------------------------------------------------------------------------

same("`get` of a revoked task raises `TaskRevokedError`.", "TaskRevokedError", lambda p: p.get(delayed(p)))
same(
    "A task that is revoked while it waits in its queue does not run.",
    [],
    lambda p: p.fails(queued(p)) and p.notes_so_far(),
)
same(
    "A task that is revoked before its `countdown` has passed does not run.",
    [],
    lambda p: p.fails(delayed(p)) and p.notes_so_far(),
)
same("A revoked task is ready.", True, lambda p: (lambda r: p.fails(r) and r.ready())(delayed(p)))
same("A revoked task has not succeeded.", False, lambda p: (lambda r: p.fails(r) and r.successful())(delayed(p)))
same("A revoked task has not failed.", False, lambda p: (lambda r: p.fails(r) and r.failed())(delayed(p)))
differs(
    "`str(result.state)` of a revoked task is `REVOKED`.",
    ("REVOKED", "failed"),
    "the state has BullMQ's name, `failed`, with the reason `revoked`; `result.status` is `REVOKED`",
    lambda p: (lambda r: p.fails(r) and str(r.state))(delayed(p)),
)
same(
    "`result.info` of a revoked task is the error.",
    "TaskRevokedError",
    lambda p: (lambda r: p.fails(r) and type(r.info).__name__)(delayed(p)),
)
same(
    "`get(propagate=False)` of a revoked task returns the error.",
    "TaskRevokedError",
    lambda p: type(delayed(p).get(60, propagate=False)).__name__,
)
same(
    "Revoking a task twice is not an error.",
    "TaskRevokedError",
    lambda p: (lambda r: [r.revoke(), p.get(r)])(delayed(p)),
)
same("A revoked task is ready, even if no worker consumes its queue.", True, lambda p: unattended(p))
better(
    "`revoke()` returns `None`.",
    (None, "revoked"),
    "it returns `revoked`, `running`, `terminating`, `finished` or `unknown`",
    lambda p: (lambda value: None if value is None else str(value))(
        p.note.apply_async(("ran", p.key), countdown=60).revoke()
    ),
)
better(
    "An id that does not exist yet can be revoked: a task that is sent later with this id does not run.",
    (None, "unknown"),
    "`revoke()` returns `unknown`; workers need no list of revoked ids",
    lambda p: (lambda value: None if value is None else str(value))(result_of_nothing(p).revoke()),
)
same("A task that has finished keeps its result.", 3, lambda p: revoked_after_the_end(p))
same("A task that waits for its retry can be revoked.", "TaskRevokedError", lambda p: revoked_before_its_retry(p))
same("`app.control.revoke(id)` revokes a task by its id.", "TaskRevokedError", lambda p: revoked_by_id(p)[0])
same(
    "`app.control.revoke([id, id])` revokes several tasks.",
    ["TaskRevokedError"] * 2,
    lambda p: revoked_by_id(p, 2),
)
same("`app.control.inspect()` asks the workers about their tasks.", True, lambda p: p.app.control.inspect() is not None)
differs(
    "`app.control.revoke_by_stamped_headers(headers)` revokes tasks by their stamps.",
    (True, "AttributeError"),
    "workers receive no messages; revoke the ids of the jobs",
    lambda p: p.app.control.revoke_by_stamped_headers({"key": p.key}) is None,
)


def revoked_by_id(p: Any, count: int = 1) -> list[str]:
    p.get(p.add.delay(1, 2))  # Celery's workers forget messages that are sent before they run
    results = [p.add.apply_async((1, 2), countdown=2) for _ in range(count)]
    ids = [result.id for result in results]
    p.app.control.revoke(ids if count > 1 else ids[0])
    return [p.fails(result) for result in results]


def unattended(p: Any) -> bool:
    result = p.note.apply_async(("ran", p.key), queue="nobody")
    result.revoke()
    return p.wait_for(result.ready) is True


def result_of_nothing(p: Any) -> Any:
    return p.app.AsyncResult(p.key) if p.is_celery else p.app.result(p.key)


def revoked_after_the_end(p: Any) -> object:
    result = p.add.delay(1, 2)
    p.get(result)
    result.revoke(terminate=True)
    return p.get(result)


def revoked_before_its_retry(p: Any) -> object:
    result = p.retries_later.delay(p.key, error=False)
    p.wait_for(lambda: result.state in {"RETRY", "delayed"})
    result.revoke()
    return p.get(result)


# ---- tasks that run --------------------------------------------------------------------------------------------------

same("A task that is revoked while it runs continues.", ["held", "released"], lambda p: continues(p))
better(
    "`get` of a task that is revoked while it runs raises `TaskRevokedError`, if there are several workers.",
    ("TaskRevokedError", "held"),
    "`get` waits for the result",
    lambda p: result_of_continuing(p),
)
same("`revoke(terminate=True)` ends a running task.", "TaskRevokedError", lambda p: p.get(running(p, terminate=True)))
same("A terminated task does not run again.", ["held"], lambda p: runs_of_terminated(p))
same(
    "The worker runs other tasks after it has terminated one.",
    3,
    lambda p: p.fails(running(p, terminate=True)) and p.get(p.add.delay(1, 2)),
)
same("A terminated task runs its `finally` blocks.", ["cleaned up"], lambda p: cleans_up(p))
differs(
    "`revoke(terminate=True, signal=…)` sends another signal.",
    ("TaskRevokedError", "TypeError"),
    "no signal is sent; the task is cancelled, and its process killed after 5 s if it does not end",
    lambda p: terminated_with_signal(p),
)
differs(
    "`revoke(wait=True)` waits for the workers' replies.",
    (True, "TypeError"),
    "the call returns when Redis has stored the revocation",
    lambda p: waits_for_replies(p),
)


def continues(p: Any) -> list[str]:
    running(p)
    p.open_gate()
    return ["held", *p.notes()]


def result_of_continuing(p: Any) -> object:
    result = running(p)
    p.get(p.add.delay(1, 2))
    if p.is_celery:
        p.wait_for(result.ready)
    error = raised(lambda: result.get(timeout=1)) if p.is_celery else ""
    p.open_gate()
    return error or p.get(result)


def runs_of_terminated(p: Any) -> list[str]:
    p.fails(running(p, terminate=True))
    p.get(p.add.delay(1, 2))
    return ["held", *p.notes_so_far()]


def cleans_up(p: Any) -> object:
    result = p.hold_and_clean_up.delay(p.key)
    p.notes()
    result.revoke(terminate=True)
    p.fails(result)
    return p.notes()


def terminated_with_signal(p: Any) -> object:
    result = p.hold.delay(p.key)
    p.notes()
    error = raised(lambda: result.revoke(terminate=True, signal="SIGKILL"))
    p.open_gate()
    return error or p.get(result)


def waits_for_replies(p: Any) -> bool:
    result = p.note.apply_async(("ran", p.key), countdown=60)
    result.revoke(wait=True, timeout=1)
    return True


# ---- workflows -------------------------------------------------------------------------------------------------------


def revoked_group(p: Any) -> Any:
    """Return the result of a group that was revoked before it started."""
    result = p.group(p.note.si("ran", p.key), p.note.si("ran", p.key)).apply_async(countdown=2)
    result.revoke()
    return result


same("`revoke()` of a group revokes its members.", [], lambda p: p.fails(revoked_group(p)) and p.notes_so_far())
same("`get` of a revoked group raises `TaskRevokedError`.", "TaskRevokedError", lambda p: p.get(revoked_group(p)))
same("The steps after a revoked step do not run.", [], lambda p: notes_of_revoked_chain(p))
same("A member that is revoked fails its chord: the body does not run.", [], lambda p: notes_of_revoked_chord(p))


def notes_of_revoked_chain(p: Any) -> list[str]:
    result = (p.add.si(1, 2).set(countdown=2) | p.note.si("ran", p.key)).delay()
    result.parent.revoke()
    p.fails(result.parent)
    p.get(p.add.delay(1, 2))
    return list(p.notes_so_far())


def notes_of_revoked_chord(p: Any) -> list[str]:
    result = p.chord([p.add.s(1, 1), p.add.s(2, 2).set(countdown=2)], p.note.s(p.key)).delay()
    result.parent.revoke()
    p.fails(result.parent)
    p.get(p.add.delay(1, 2))
    return list(p.notes_so_far())
