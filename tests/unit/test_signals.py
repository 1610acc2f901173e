"""Signals: how receivers are connected, and which of them a signal calls."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest

from bulltask import App, ConfigError
from bulltask.observe import signals
from bulltask.observe.signals import ReceiverFlag, Signal

Calls = list[tuple[str, Any]]


def test_a_receiver_is_connected_by_a_call_and_by_a_decorator_with_and_without_arguments() -> None:
    signal, calls = Signal("tested"), Calls()

    def first(sender: Any, **named: Any) -> None:
        calls.append(("first", named.pop("signal")))

    @signal.connect
    def second(number: int, **_: Any) -> None:
        calls.append(("second", number))

    @signal.connect(sender="mail.send")
    def third(sender: Any = None, **_: Any) -> None:
        calls.append(("third", sender))

    assert signal.connect(first) is first
    assert signal.connect(first, sender="another task") is first
    assert [receiver for receiver, _ in signal.send(sender="mail.send", number=3)] == [second, third, first]
    assert calls == [("second", 3), ("third", "mail.send"), ("first", signal)]


def test_a_receiver_that_is_connected_twice_is_called_once() -> None:
    signal, calls = Signal("tested"), Calls()

    def receiver(**_: Any) -> None:
        calls.append(("called", None))

    for _ in range(2):
        signal.connect(receiver)
        signal.connect(lambda **_: calls.append(("lambda", None)), weak=False, dispatch_uid="the lambda")
    signal.send(None)
    assert calls == [("called", None), ("lambda", None)]


def test_a_sender_is_a_task_or_its_name() -> None:
    signal, app = Signal("tested"), App("tested")
    add, subtract = app.task(name="add")(lambda x: x), app.task(name="subtract")(lambda x: x)
    kept = [
        signal.connect(lambda _number=number, **_: _number, sender=sender, weak=False)
        for number, sender in enumerate([add, "add", None, subtract, object()])
    ]
    assert [response for _, response in signal.send(add)] == [0, 1, 2]
    assert [response for _, response in signal.send("add")] == [0, 1, 2]
    assert signal.has_listeners(subtract)
    assert len(signal.receivers(None)) == 1
    assert len(kept) == 5


def test_a_weak_receiver_disappears_with_its_last_reference() -> None:
    flag = ReceiverFlag()
    signal = Signal("tested", flag)

    class Reporter:
        def report(self, **_: Any) -> str:
            return "method"

    def nested(**_: Any) -> str:
        return "function"

    reporter = Reporter()
    signal.connect(reporter.report)
    signal.connect(nested)
    assert flag.active
    assert [response for _, response in signal.send(None)] == ["method", "function"]
    del nested
    gc.collect()
    assert [response for _, response in signal.send(None)] == ["method"]
    del reporter
    gc.collect()
    assert signal.send(None) == []
    assert not flag.active, "nothing is called on the hot path any more"


def test_disconnect_takes_the_arguments_of_connect_and_says_whether_it_found_the_connection() -> None:
    flag = ReceiverFlag()
    signal = Signal("tested", flag)

    def receiver(**_: Any) -> None: ...

    signal.connect(receiver, sender="add")
    signal.connect(receiver, dispatch_uid="uid")
    assert not signal.disconnect(receiver)
    assert signal.disconnect(receiver, sender="add")
    assert signal.disconnect(dispatch_uid="uid")
    assert not signal.has_listeners("add")
    assert not flag.active


def test_an_exception_of_a_receiver_is_logged_and_the_next_one_is_called(caplog: pytest.LogCaptureFixture) -> None:
    signal = Signal("tested")

    def fails(**_: Any) -> None:
        raise LookupError("no database")

    signal.connect(fails)
    signal.connect(lambda **_: "next", weak=False)
    with caplog.at_level(logging.ERROR, "bulltask.hooks"):
        responses = [[response for _, response in signal.send(None)] for _ in range(9)]
    assert all(isinstance(error, LookupError) and last == "next" for error, last in responses)
    assert [vars(record)["failures"] for record in caplog.records] == [1, 2, 4, 8]
    record = vars(caplog.records[0])
    assert (caplog.records[0].getMessage(), record["on"]) == ("Hook failed", "tested")
    assert record["hook"].endswith(".fails")
    assert caplog.records[0].exc_info is not None


@pytest.mark.parametrize(
    ("receiver", "problem"),
    [
        (7, "must be a function, not 7"),
        (lambda sender: None, r"must accept any keyword arguments: add \*\*kwargs"),
    ],
)
def test_an_unsuitable_receiver_is_rejected(receiver: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        signals.task_prerun.connect(receiver)


def test_a_coroutine_function_is_rejected_as_a_receiver() -> None:
    async def receiver(**_: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"receiver, a receiver of task_prerun, must be a plain function"):
        signals.task_prerun.connect(receiver)


def test_celerys_other_signals_raise_an_error_that_says_what_to_use() -> None:
    with pytest.raises(ImportError, match=r"cannot import Celery's signal 'task_unknown' .*: use @app.on\(JobI"):
        from bulltask.signals import task_unknown  # noqa: F401, PLC0415
    with pytest.raises(AttributeError, match=r"no attribute 'task_recieved'$"):
        _ = signals.task_recieved
