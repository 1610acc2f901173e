"""The factories of an app pass their arguments to classes with ``**settings``, where mypy does not notice a mistake."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from bulltask import App, ConfigError
from bulltask.queue import AsyncFlowProducer, AsyncQueue, AsyncQueueEvents, FlowProducer, Queue, QueueEvents
from bulltask.queue.context import QueueContext

URL: Final = "redis://localhost:1/0"  # nothing in this module connects
OPTIONS: Final = {"default_job_options": {"attempts": 5}}
FACTORIES: Final[dict[str, dict[str, Any]]] = {
    "queue": {"name": "mail", **OPTIONS},
    "aqueue": {"name": "mail", **OPTIONS},
    "flows": {},
    "aflows": {},
    "events": {"queue": "mail", "start": "5-0"},
    "aevents": {"queue": "mail", "start": "5-0"},
}


@pytest.fixture
def app() -> Iterator[App]:
    app = App("shop", URL, prefix="shop")
    yield app
    app.close()


def build(factory: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a factory inside an event loop, which readers of events need, and close its result."""

    async def call() -> Any:
        built = factory(**arguments)
        closed = built.close()
        if inspect.isawaitable(closed):
            await closed
        return built

    return asyncio.run(call())


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_accepts_all_its_arguments(app: App, name: str) -> None:
    factory, arguments = getattr(app, name), FACTORIES[name]
    assert set(inspect.signature(factory).parameters) == set(arguments)
    built = build(factory, arguments)
    context: QueueContext = built._context
    assert context.broker is app._broker
    assert context.broker.config.prefix == "shop"
    assert context.defaults == arguments.get("default_job_options", {})
    if "start" in arguments:
        assert (built.queue, built.position) == ("mail", "5-0")
    if "name" in arguments:
        assert (built.name, built.qualified_name) == ("mail", "shop:{mail}")


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        *[(kind, FACTORIES["queue"]) for kind in (Queue, AsyncQueue)],
        *[(kind, {}) for kind in (FlowProducer, AsyncFlowProducer)],
        *[(kind, FACTORIES["events"]) for kind in (QueueEvents, AsyncQueueEvents)],
    ],
)
def test_a_class_without_an_app_accepts_settings_and_rejects_unknown_ones(
    kind: type[Any], arguments: dict[str, Any]
) -> None:
    built = build(kind, {**arguments, "broker_url": URL, "prefix": "shop", "queue_hash_tag": False})
    config = built._context.broker.config
    assert (config.prefix, config.queue_hash_tag) == ("shop", False)
    with pytest.raises(ConfigError, match="unknown setting 'prefx'; did you mean 'prefix'"):
        build(kind, {**arguments, "broker_url": URL, "prefx": "shop"})
