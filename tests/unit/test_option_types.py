"""The types of options are those of the dataclasses that check them."""

from __future__ import annotations

import types
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from bulltask.jobs.job import STORED
from bulltask.queue import AddOptions
from bulltask.registry import canvas
from bulltask.registry.options import (
    IGNORED_CALL_OPTIONS,
    IGNORED_TASK_OPTIONS,
    BatchTaskKeywords,
    CallKeywords,
    CallOptions,
    TaskKeywords,
    TaskOptions,
    translate_task_options,
)

RESOLVED = {"unlimited_retries"}
"""Fields that another keyword sets."""
TRANSLATED = {BatchTaskKeywords: {"retry_kwargs"}, CallKeywords: {"task_id", "link", "link_error", "stamped_headers"}}
"""Keywords that set other fields, or are attributes of a signature."""
IGNORED = {BatchTaskKeywords: IGNORED_TASK_OPTIONS.keys(), CallKeywords: IGNORED_CALL_OPTIONS.keys()}
"""Keywords of Celery without effect."""
LISTS = {"autoretry_for", "dont_autoretry_for", "throws"}
"""Keywords that may be lists; the fields are tuples."""


def hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, localns={"Canvas": canvas.Canvas, "Signature": canvas.Signature})


def members(hint: Any) -> set[Any]:
    union = get_origin(hint) in (Union, types.UnionType)
    return {part for member in get_args(hint) for part in members(member)} if union else {hint}


@pytest.mark.parametrize(("keywords", "options"), [(BatchTaskKeywords, TaskOptions), (CallKeywords, CallOptions)])
def test_each_option_has_the_same_name_and_type_as_a_keyword(keywords: type, options: Any) -> None:
    typed = hints(keywords)
    checked = {field.name: get_type_hints(options)[field.name] for field in fields(options)}
    assert typed.keys() - checked.keys() - IGNORED[keywords] == TRANSLATED[keywords]
    assert checked.keys() - typed.keys() == (RESOLVED if keywords is BatchTaskKeywords else set())
    for name in (checked.keys() & typed.keys()) - LISTS - {"batch"}:  # None: not a batch task
        assert members(typed[name]) == members(checked[name]), name


def test_each_option_that_a_job_stores_is_one_of_queues_calls_and_tasks() -> None:
    calls, tasks = ({field.name for field in fields(kind)} for kind in (CallOptions, TaskOptions))
    of_one_job = {"backoff", "deduplication", "omit_context", "telemetry_metadata", "timestamp"}
    assert STORED.keys() - AddOptions.__annotations__.keys() == set()
    assert STORED.keys() - calls == set()
    assert STORED.keys() - tasks == of_one_job
    of_calls = {"compression", "countdown", "eta", "ignore_result", "max_retries", "queue", "serializer"}
    assert calls - AddOptions.__annotations__.keys() == of_calls
    assert AddOptions.__annotations__.keys() - calls == {"attempts", "delay"}


def test_options_that_may_be_lists_become_tuples() -> None:
    for name in LISTS:
        assert members(hints(TaskKeywords)[name]) == {tuple[type[BaseException], ...], list[type[BaseException]]}
        assert translate_task_options({name: [KeyError]}) == {name: (KeyError,)}


def test_each_of_celerys_options_without_effect_is_a_keyword() -> None:
    assert IGNORED_TASK_OPTIONS.keys() <= hints(TaskKeywords).keys()
    # throw is a parameter of apply(), which takes CallKeywords, too.
    assert IGNORED_CALL_OPTIONS.keys() - hints(CallKeywords).keys() == {"throw"}
