"""Stamps: which part of a canvas receives which, and what reaches tasks and signals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from bulltask import App, Context, Signature, StampingVisitor, Task, chain, chord, group
from bulltask.errors import EncodeError, PermanentError
from bulltask.observe import signals
from bulltask.registry.canvas import Canvas


@pytest.fixture
def app() -> App:
    app = App("stamped", "redis://nowhere.invalid:1", task_always_eager=True)

    @app.task(name="add")
    def add(*numbers: Any) -> int:
        return len(numbers)

    return app


def call(app: App, *args: Any) -> Signature[Any, Any]:
    return app.tasks["add"].s(*args)


class Recorder(StampingVisitor):
    """Records the calls of its methods, and stamps each call with its number."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_signature(self, sig: Any, **headers: Any) -> Mapping[str, Any]:
        self.seen.append(f"signature {sig.args[0]}")
        return {"number": sig.args[0]}

    def on_group_start(self, group: Any, **headers: Any) -> Mapping[str, Any]:
        self.seen.append(f"group of {len(group.tasks)}")
        return {"level": headers.get("level", 0) + 1, "stamped_headers": []}

    def on_group_end(self, group: Any, **headers: Any) -> None:
        self.seen.append(f"end of group, level {headers['level']}")

    def on_chain_start(self, chain: Any, **headers: Any) -> Mapping[str, Any] | None:
        self.seen.append(f"chain of {len(chain.tasks)}")
        return None

    def on_chain_end(self, chain: Any, **headers: Any) -> None:
        self.seen.append("end of chain")

    def on_chord_body(self, sig: Any, **headers: Any) -> Mapping[str, Any]:
        self.seen.append(f"body {sig.body.args[0]}")
        return {"body": True}

    def on_callback(self, callback: Any, **headers: Any) -> Mapping[str, Any]:
        self.seen.append(f"callback {callback.args[0]}")
        return {"callback": True}

    def on_errback(self, errback: Any, **headers: Any) -> Mapping[str, Any]:
        self.seen.append(f"errback {errback.args[0]}")
        return {"errback": True}


def stamps(canvas: Canvas[Any, Any]) -> list[Mapping[str, Any]]:
    return [one.stamps for one in canvas.calls()]


def test_a_visitor_sees_all_parts_in_order_and_its_headers_apply_to_the_parts_inside(app: App) -> None:
    body = call(app, 4)
    body.link(call(app, 5))
    body.link_error(call(app, 6))
    canvas = chain(call(app, 1), chord([call(app, 2), group(call(app, 3), call(app, 7)) | call(app, 8)], body))
    visitor = Recorder()
    assert canvas.stamp(visitor) is canvas
    assert visitor.seen == [
        "chain of 3", "signature 1", "group of 2", "signature 2", "group of 2", "signature 3", "signature 7",
        "end of group, level 2", "body 8", "signature 8", "end of group, level 1", "callback 5", "signature 5",
        "errback 6", "signature 6", "signature 4", "end of chain",
    ]  # fmt: skip
    # `level` is passed on, but it is not among the stamped headers.
    assert stamps(canvas) == [
        {"number": 1}, {"number": 2}, {"number": 3}, {"number": 7}, {"body": True, "number": 8}, {"number": 4},
    ]  # fmt: skip
    assert (stamps(body.links[0]), stamps(body.errbacks[0])) == (
        [{"callback": True, "number": 5}],
        [{"errback": True, "number": 6}],
    )


def test_headers_are_stamps_of_all_calls_and_a_new_value_replaces_the_old_one_or_is_appended(app: App) -> None:
    canvas = group(call(app, 1), call(app, 2)).stamp(team="a", region="eu")
    assert stamps(canvas) == [{"team": "a", "region": "eu"}] * 2
    assert stamps(canvas.stamp(team="b")) == [{"team": "b", "region": "eu"}] * 2
    assert stamps(canvas.stamp(append_stamps=True, team=["c", "d"])) == [{"team": ["b", "c", "d"], "region": "eu"}] * 2


def test_only_callbacks_are_stamped_by_stamp_links(app: App) -> None:
    one = call(app, 1)
    one.link(call(app, 2))
    one.stamp_links(None, team="a")
    assert (stamps(one), stamps(one.links[0])) == ([{}], [{"team": "a"}])


def test_stamps_are_kept_by_copies_other_options_and_celerys_dictionary(app: App) -> None:
    one = call(app, 1).set(headers={"tenant": "x"}).stamp(queue="not an option").set(headers={"tenant": "y"})
    stored = {"tenant": "y", "stamps": {"queue": "not an option"}, "stamped_headers": ["queue"]}
    assert (one.options.headers, one.clone().options.headers, one.options.queue) == (stored, stored, None)
    assert call(app, 1).stamp(team="a").to_dict()["options"] == {"team": "a", "stamped_headers": ["team"]}
    copy = Signature.from_dict(call(app, 1).stamp(team="a").to_dict(), app)
    assert stamps(copy) == [{"team": "a"}]
    assert stamps(app.tasks["add"].signature((1,), stamped_headers=["team"], team="a")) == [{"team": "a"}]


def test_a_stamp_must_be_json(app: App) -> None:
    with pytest.raises(EncodeError):
        call(app, 1).stamp(team=object()).apply_async()


# ---- what tasks and signals receive ----------------------------------------------------------------------------------


class Replaced(Task[..., Any]):
    """A task class that stamps what replaces it."""

    def on_replace(self, sig: Any) -> Any:
        return super().on_replace(sig.stamp(by="on_replace", team="other"))


@pytest.fixture
def seen(app: App) -> list[tuple[str, Mapping[str, Any], list[str]]]:
    """Tasks that record their stamps."""
    seen: list[tuple[str, Mapping[str, Any], list[str]]] = []

    def note(request: Any) -> None:
        seen.append((request.task, dict(request.stamps), list(request.stamped_headers)))

    @app.task(name="note", bind=True)
    def note_it(self: Context, *_: Any) -> None:
        note(self.request)

    @app.task(name="twice", bind=True, max_retries=1)
    def twice(self: Context) -> None:
        note(self.request)
        if not self.request.retries:
            self.retry(countdown=0)

    @app.task(name="fails", bind=True)
    def fails(self: Context) -> None:
        note(self.request)
        raise PermanentError("no")

    @app.task(name="replaced", bind=True)
    def replaced(self: Context) -> None:
        self.replace(app.signature("note") | app.signature("note").stamp(team="own"))

    @app.task(name="class", bind=True, base=Replaced)
    def by_class(self: Any) -> None:
        self.replace(app.signature("note"))

    return seen


def test_stamps_reach_all_attempts_of_a_task_and_its_error_callback(app: App, seen: list[Any]) -> None:
    app.signature("twice").stamp(team="a").apply_async()
    failing = app.signature("fails")
    failing.link_error(app.signature("note"))
    failing.stamp(region="eu").apply(throw=False)
    assert seen == [
        *[("twice", {"team": "a"}, ["team"])] * 2,
        ("fails", {"region": "eu"}, ["region"]),
        ("note", {"region": "eu"}, ["region"]),
    ]


def test_a_task_without_stamps_has_none_even_if_another_client_has_sent_something_else(app: App, seen: Any) -> None:
    app.signature("note").apply_async()
    app.signature("note").apply_async(headers={"stamps": 7, "stamped_headers": "x"})
    assert seen == [("note", {}, [])] * 2


def test_a_task_that_replaces_itself_passes_its_stamps_on(app: App, seen: list[Any]) -> None:
    app.signature("replaced").stamp(team="a", region="eu").apply_async()
    assert [stamps for _, stamps, _ in seen] == [{"team": "a", "region": "eu"}, {"team": "own", "region": "eu"}]


def test_a_task_class_can_stamp_what_replaces_its_task(app: App, seen: list[Any]) -> None:
    app.signature("class").stamp(team="a", region="eu").apply_async()
    assert [stamps for _, stamps, _ in seen] == [{"team": "other", "region": "eu", "by": "on_replace"}]


@pytest.fixture
def received() -> Iterator[list[Any]]:
    """The requests that ``task_received`` and ``task_prerun`` have brought, with the signal's name."""
    received: list[Any] = []

    def on_received(request: Any, sender: Any, **_: Any) -> None:
        received.append(("task_received", sender.name, request.task_name, dict(request.stamps)))

    def on_prerun(sender: Any, **_: Any) -> None:
        received.append(("task_prerun", sender.name))

    signals.task_received.connect(on_received)
    signals.task_prerun.connect(on_prerun)
    yield received
    signals.task_received.disconnect(on_received)
    signals.task_prerun.disconnect(on_prerun)


def test_task_received_is_sent_before_each_task_prerun_with_the_request(
    app: App, seen: list[Any], received: list[Any]
) -> None:
    app.signature("twice").stamp(team="a").apply_async()
    attempt = [("task_received", "twice", "twice", {"team": "a"}), ("task_prerun", "twice")]
    assert received == attempt * 2
    assert len(seen) == 2
