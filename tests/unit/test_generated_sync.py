"""``bulltask/queue/sync`` is up to date with the code that ``make sync`` generates from ``bulltask/queue/aio``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.generate_sync import TARGET, generate


@pytest.fixture(scope="module")
def generated() -> dict[Path, str]:
    """The generated text of each file."""
    return generate()


def test_the_generated_files_are_up_to_date(generated: dict[Path, str]) -> None:
    changed = [path.name for path, text in generated.items() if path.read_text() != text]
    assert changed == [], "bulltask/queue/aio has changed: run `make sync`"


def test_the_folder_contains_only_generated_files(generated: dict[Path, str]) -> None:
    assert set(TARGET.glob("*.py")) == generated.keys()


def test_generated_files_do_not_mention_asyncio(generated: dict[Path, str]) -> None:
    wrong = []
    for path, text in generated.items():
        lines = text.splitlines()[2 if path.name == "__init__.py" else 1 :]
        asynchronous = re.compile(r"async(?!result)|await|coroutine|event loop", re.IGNORECASE)
        wrong += [(path.name, line) for line in lines if asynchronous.search(line)]
    assert wrong == []
