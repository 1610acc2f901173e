"""Which jobs a child starts after an async one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bulltask.worker.attempt import Attempt
from bulltask.worker.sync_loop import AsyncBulkFetcher


def job(name: str) -> Any:
    return SimpleNamespace(
        slot=None, queue_index=0, max_concurrent=0, keys=None, job=SimpleNamespace(name=name, id=name)
    )


def test_a_delayed_job_of_another_task_that_has_just_become_due_is_released() -> None:
    started: list[str] = []
    released: list[str] = []
    names = iter(["fetch", "resize"])

    attempt = Attempt(*[None] * 4)  # type: ignore[arg-type]
    fetcher: Any = SimpleNamespace(
        may_collect=True,
        acquire_many=lambda _i, _count, _task: [job(next(names))],
        pool=SimpleNamespace(give_back=lambda *_: None),
        release_unstarted=lambda jobs: released.extend(each.job.name for each in jobs),
    )
    starter: Any = SimpleNamespace(begin=lambda _: attempt)
    loop: Any = SimpleNamespace(
        room=1,
        start=lambda acquired, _: started.append(acquired.job.name),
        keeps_up=lambda **_: True,
    )
    next_jobs: Any = SimpleNamespace(may_follow=lambda _: True)
    further = AsyncBulkFetcher(fetcher, starter, SimpleNamespace(), loop, next_jobs)  # type: ignore[arg-type]
    further.start(job("fetch"))
    further.start(job("fetch"))
    assert (started, released) == (["fetch"], ["resize"])
