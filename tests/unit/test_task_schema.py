"""``bulltask tasks schema`` and ``bulltask gen-ts``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bulltask import App, ConfigError
from bulltask.cli.main import main
from bulltask.cli.tasks import TypeWriter, client_source, doc_comment
from tests.support.payloads import ENCRYPTION_KEY, PICKLES

APP = """
from bulltask import App

app = App("shop", queue_hash_tag=False, prefix="shop", include=["shop_tasks"])
"""
TASKS = """
from datetime import date
from shop_app import app

@app.task(name="due", queue="mail", expires=5)
def due(day: date, *more: date, **notes: str) -> list[date]:
    '''Return the days.'''

@app.task(name="any")
def anything(value, count=1): ...
"""

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a command in a directory with an app."""
    (tmp_path / "shop_app.py").write_text(APP)
    (tmp_path / "shop_tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda *args: CliRunner().invoke(main, [*args, "-A", "shop_app"])
    for name in ("shop_app", "shop_tasks"):
        sys.modules.pop(name, None)


def test_the_schema_of_all_tasks_or_of_some_is_printed(run: Run) -> None:
    document = json.loads(run("tasks", "schema").stdout)
    assert document["tasks"] == {
        "any": {
            "queue": "default",
            "data": {
                "type": "object",
                "properties": {"value": {}, "count": {"default": 1}},
                "required": ["value"],
                "additionalProperties": False,
            },
            "returnvalue": {},
        },
        "due": {
            "description": "Return the days.",
            "queue": "mail",
            "data": {
                "type": "object",
                "properties": {
                    "day": {"type": "string", "format": "date"},
                    "more": {"type": "array", "items": {"type": "string", "format": "date"}},
                    "notes": {"type": "object", "additionalProperties": {"type": "string"}},
                },
                "required": ["day"],
            },
            "returnvalue": {"type": "array", "items": {"type": "string", "format": "date"}},
        },
    }
    assert json.loads(run("tasks", "schema", "due").stdout)["tasks"].keys() == {"due"}


def test_an_unknown_task_is_reported_in_one_line(run: Run) -> None:
    failed = run("tasks", "schema", "duo")
    assert (failed.exit_code, failed.output) == (1, "Error: task 'duo' is not registered; did you mean 'due'?\n")


def test_the_client_contains_the_queues_and_options_of_the_tasks(run: Run, tmp_path: Path) -> None:
    assert run("gen-ts", "-o", "client.ts").exit_code == 0
    source = (tmp_path / "client.ts").read_text()
    assert source == run("gen-ts", "-o", "-").stdout
    assert "gen-ts -A shop_app`" in source
    assert 'const PREFIX = "shop";' in source
    assert '  "due": "mail",\n' in source
    assert '"bulltask": {"v": 1}, "expiresIn": 5000}' in source
    assert "  /** Return the days. */\n" in source


@pytest.mark.parametrize(
    ("settings", "options", "found"),
    [
        ({"task_routes": {"pay*": "payments"}}, {}, '"pay": "payments",'),
        ({}, {"ignore_result": True}, "result: null;"),
        ({}, {"ignore_result": True, "serializer": "cloudpickle"}, "result: null;"),
        ({}, {"serializer": "cloudpickle"}, "result: never;"),
        ({"result_compression": "zlib"}, {}, 'result: Tasks["pay"]["result"] | Envelope };'),
        ({"payload_encryption_keys": {"money": ENCRYPTION_KEY}}, {"queue": "money"}, 'EncryptedQueue = "money";'),
        ({"payload_encryption_keys": {"*": ENCRYPTION_KEY, "default": []}}, {}, "EncryptedQueue = never;"),
    ],
)
def test_the_client_follows_the_settings_that_change_how_jobs_are_stored(
    settings: dict[str, Any], options: Any, found: str
) -> None:
    app = App("shop", "redis://127.0.0.1:1", queue_hash_tag=False, **PICKLES, **settings)

    @app.task(name="pay", **options)
    def pay() -> int:
        return 1

    source = client_source(app, "shop")
    assert found in source
    assert ENCRYPTION_KEY.partition(":")[2] not in source


def test_a_function_in_task_routes_that_needs_arguments_is_reported() -> None:
    app = App("shop", "redis://127.0.0.1:1", task_routes=lambda name, args, kwargs, options, **_: kwargs["country"])

    @app.task(name="pay")
    def pay(country: str) -> None: ...

    with pytest.raises(ConfigError, match=r"task_routes failed for task 'pay' without arguments \(KeyError"):
        client_source(app, "shop")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({}, "unknown"),
        (True, "unknown"),
        (False, "never"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"const": "a"}, '"a"'),
        ({"enum": [1, None, "b"]}, '1 | null | "b"'),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, "number"),
        ({"anyOf": [{"type": "integer"}, {}]}, "unknown"),
        ({"oneOf": [{"$ref": "#/$defs/Page[int]"}, {"$ref": "#/$defs/Map"}]}, "Page_int_ | Map_"),
        ({"$ref": "#/$defs/missing"}, "unknown"),
        (
            {"allOf": [{"$ref": "#/$defs/Map"}, {"anyOf": [{"type": "null"}, {"type": "string"}]}]},
            "Map_ & (null | string)",
        ),
        ({"type": "array"}, "unknown[]"),
        ({"type": "array", "items": {"enum": [1, 2]}}, "(1 | 2)[]"),
        (
            {"type": "array", "prefixItems": [{"type": "string"}, {"enum": [1, 2]}], "minItems": 1},
            "[string, (1 | 2)?]",
        ),
        ({"type": "object"}, "Record<string, unknown>"),
        ({"type": "object", "properties": {}}, "Record<string, never>"),
        (
            {"type": "object", "additionalProperties": {"type": "null"}, "propertyNames": {"enum": ["a"]}},
            'Partial<Record<"a", null>>',
        ),
        (
            {"type": "object", "properties": {"a-b": {"type": "string"}, "c": {}}, "required": ["c"]},
            '{\n  "a-b"?: string;\n  c: unknown;\n}',
        ),
        ({"type": "date"}, "unknown"),
    ],
)
def test_a_schema_becomes_a_type(schema: Any, text: str) -> None:
    assert TypeWriter({"Page[int]": {}, "Map": {}}).type_of(schema) == text


def test_named_types_are_declared_with_unused_names() -> None:
    writer = TypeWriter(
        {
            "A b": {"type": "object", "properties": {"next": {"$ref": "#/$defs/A b"}}, "description": "A list. */"},
            "A_b": {"type": "string", "format": "date"},
            "1": {"enum": ["x"]},
        }
    )
    assert writer.declarations() == (
        "/** A list. * / */\nexport interface A_b {\n  next?: A_b;\n}\n\n"
        "/** @format date */\nexport type A_b_ = string;\n\n"
        'export type _1 = "x";\n\n'
    )


def test_a_comment_is_one_line() -> None:
    assert doc_comment("One\n  two.", "  ") == "  /** One two. */\n"
    assert doc_comment("") == ""
