"""One-line idioms of Celery work in bulltask, except for a list with a reason for each."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import pytest

from bulltask.registry.tasks import SHARED
from bulltask.testing import InlineWorker, use_server
from tests.celery_parity.idioms import MISSING, for_bulltask, lines, outcomes


def test_most_one_line_idioms_of_celery_work(
    broker_url: str, record_property: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    monkeypatch.setattr(SHARED, "_tasks", dict(SHARED))  # other tests in this process must not find these tasks
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # options without effect

        def prepare(app: Any) -> None:
            stack.enter_context(use_server(app, broker_url))
            stack.enter_context(InlineWorker(app))

        found = outcomes(broker_url, for_bulltask, prepare)
    failed = {line: text for line, text in found.items() if text}
    record_property("idioms", f"{len(found) - len(failed)} of {len(found)}")
    assert {line: text for line, text in failed.items() if line not in MISSING} == {}
    assert len(found) >= 156
    assert len(found) - len(failed) >= 225  # 91%


def test_each_missing_idiom_is_in_the_list_and_has_a_reason() -> None:
    assert set(MISSING) <= set(lines())
    assert all(MISSING.values())
