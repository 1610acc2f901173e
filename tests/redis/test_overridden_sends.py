"""Every send passes through an ``apply_async`` or ``send_task`` that a subclass or a patch has replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest

from bulltask import App, AsyncResult, Celery, Context, Task, chain, chord, group
from bulltask.errors import ConfigError
from bulltask.testing import InlineWorker, use_server

pytestmark = pytest.mark.redis

Send = Callable[[Any], Any]


class Tagged(Task):
    """Adds a header to each call, with Celery's signature of ``apply_async``."""

    def apply_async(  # noqa: PLR0917 - as in Celery
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: Any = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: Any = None,
        **options: Any,
    ) -> Any:
        options["headers"] = {**(options.get("headers") or {}), "tag": self.name}
        return super().apply_async(
            args, kwargs, task_id=task_id, producer=producer, link=link, link_error=link_error, shadow=shadow, **options
        )


class TaggedApp(App):
    """Adds a header to each call that it sends."""

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        options["headers"] = {**(options.get("headers") or {}), "tag": name}
        return super().send_task(name, args, kwargs, **options)


@pytest.fixture(params=["apply_async", "send_task", "both"])
def app(request: pytest.FixtureRequest, broker_url: str) -> Iterator[App]:
    kind = App if request.param == "apply_async" else TaggedApp
    app = kind("sends", "redis://unreachable.invalid:1", task_cls=Task if request.param == "send_task" else Tagged)
    with use_server(app, broker_url):
        yield app


@pytest.fixture
def tags(app: App) -> list[Any]:
    """The headers of the jobs that have run."""
    return []


@pytest.fixture
def note(app: App, tags: list[Any]) -> Any:
    @app.task(name="note", bind=True)
    def note(self: Any, *values: Any) -> list[Any]:
        tags.append(self.request.headers.get("tag"))
        return list(values)

    @app.task(name="replaces", bind=True)
    def replaces(self: Any, *values: Any) -> None:
        tags.append(self.request.headers.get("tag"))
        self.replace(note.si(*values))

    @app.task(name="fails", bind=True)
    def fails(self: Any, *values: Any) -> None:
        tags.append(self.request.headers.get("tag"))
        raise KeyError(values)

    return note


SENDS: dict[str, tuple[Send, int]] = {
    "delay": (lambda t: t.delay(1), 1),
    "apply_async": (lambda t: t.apply_async((1,), countdown=0), 1),
    "send_many": (lambda t: t.app.send_many([t.s(1)])[0], 1),
    "delay_many": (lambda t: t.delay_many([(1,), (2,)])[1], 2),
    "signature": (lambda t: t.s(1).delay(), 1),
    "signature with options": (lambda t: t.s(1).set(headers={"a": 1}).apply_async(), 1),
    "chain": (lambda t: chain(t.s(1), t.s(2), t.s(3)).delay(), 3),
    "group": (lambda t: group(t.s(1), t.s(2))(), 2),
    "chord": (lambda t: chord([t.s(1), t.s(2)])(t.s()), 3),
    "link": (lambda t: t.apply_async((1,), link=t.s()), 2),
    "link of a signature": (lambda t: t.s(1).set(link=[t.s(), t.s()]).delay(), 3),
    "errback": (lambda t: t.app.tasks["fails"].apply_async((1,), link_error=t.si("error")), 2),
    "errback of a chain": (lambda t: (t.s(1) | t.app.tasks["fails"].s()).on_error(t.si()).delay(), 3),
    "replace": (lambda t: t.app.tasks["replaces"].delay(1), 2),
    "name": (lambda t: t.app.signature("note", (1,)).delay(), 1),
}


@pytest.mark.parametrize("way", SENDS)
def test_every_send_passes_an_overridden_method(
    app: App, worker: InlineWorker, note: Any, tags: list[Any], way: str
) -> None:
    send, runs = SENDS[way]
    result = send(note)
    worker.run_jobs(propagate=False)
    assert len(tags) == runs
    assert None not in tags
    assert isinstance(result, AsyncResult) == (way != "group")
    assert result.ready()


@pytest.mark.parametrize("way", ["adelay", "aapply_async", "signature", "chain", "asend_many", "asend_task", "link"])
async def test_sends_of_asyncio_pass_it_too(
    app: App, worker: InlineWorker, note: Any, tags: list[Any], way: str
) -> None:
    match way:
        case "adelay":
            result = await note.adelay(1)
        case "aapply_async":
            result = await note.aapply_async((1,))
        case "link":
            result = await note.aapply_async((1,), link=note.si(2))
        case "signature":
            result = await note.s(1).adelay()
        case "chain":
            result = await (note.s(1) | note.s(2)).adelay()
        case "asend_many":
            (result,) = await app.asend_many([note.s(1)])
        case _:
            result = await app.asend_task("note", (1,))
    await worker.arun_jobs()
    assert result.ready()
    sent_by_name = way == "asend_task" and type(app) is App  # as in Celery, send_task does not call apply_async
    assert set(tags) == ({None} if sent_by_name else {"note"})


def test_the_handle_in_an_overridden_method_is_the_jobs(app: App, worker: InlineWorker, note: Any) -> None:
    seen: list[AsyncResult[Any]] = []

    class Seen(Tagged):
        def apply_async(self, *args: Any, **options: Any) -> Any:
            seen.append(super().apply_async(*args, **options))
            return seen[-1]

    task: Any = app.task(name="seen", base=Seen)(lambda *values: list(values))
    results = [task.delay(1), task.s(2).delay(), (task.s(3) | task.s(4)).delay(), group(task.s(5)).delay()[0]]
    worker.run_jobs()
    assert [one.get() for one in seen[:3]] == [[1], [2], [3]]
    assert seen[3] == results[2]
    assert seen[4] == results[3]


@pytest.fixture
def plain(broker_url: str) -> Iterator[Any]:
    """A task of an app without overrides."""
    app = App("plain", "redis://unreachable.invalid:1")
    with use_server(app, broker_url), InlineWorker(app) as worker:
        task = app.task(name="plain")(lambda *values: len(values))
        yield task
        assert worker.run_jobs() == []  # nothing was sent


@pytest.mark.parametrize("patched", ["Task.apply_async", "task.apply_async", "Celery.send_task", "app.send_task"])
@pytest.mark.parametrize(
    "way", [way for way in SENDS if way not in {"errback", "errback of a chain", "replace", "name"}]
)
def test_a_test_can_patch_all_sends(plain: Any, patched: str, way: str) -> None:
    kind, name = patched.split(".")
    target = {"Task": Task, "task": plain, "Celery": Celery, "app": plain.app}[kind]
    with patch.object(target, name) as mock:
        SENDS[way][0](plain)
    assert mock.call_count == (1 if way.startswith(("link", "errback")) else SENDS[way][1])


@pytest.mark.parametrize("target", ["task", "app"])
async def test_a_test_can_patch_the_sends_of_asyncio(plain: Any, target: str) -> None:
    name = "apply_async" if target == "task" else "send_task"
    with patch.object(plain if target == "task" else plain.app, name) as mock:
        assert await plain.adelay(1) is mock.return_value
        await (plain.s(1) | plain.s(2)).adelay()
        await plain.s(1).adelay()
    assert mock.call_count == 4
    with patch.object(type(plain), "aapply_async") as mock:
        await plain.adelay(1)
        await plain.s(1).adelay()
    assert mock.call_count == 2


def test_a_patched_apply_async_receives_celerys_arguments(plain: Any) -> None:
    with patch.object(plain, "apply_async") as mock:
        assert plain.delay(1, 2) is mock.return_value
        plain.s(1).apply_async((3,), countdown=5)
    assert [tuple(call) for call in mock.call_args_list] == [(((1, 2), {}), {}), (((3, 1), {}), {"countdown": 5})]


def test_a_task_cannot_replace_itself_with_a_call_that_is_not_sent(broker_url: str) -> None:
    app = App("replaces", "redis://unreachable.invalid:1")

    @app.task(name="never")
    def never() -> None:
        pass

    @app.task(name="replaces", bind=True)
    def replaces(self: Context) -> None:
        with patch.object(never, "apply_async", Mock()):
            self.replace(never.s())

    with use_server(app, broker_url), InlineWorker(app), pytest.raises(ConfigError, match="did not call super"):
        replaces.delay().get(timeout=5)
