"""``bulltask/queue/sync`` is up to date with the code that ``make sync`` generates from ``bulltask/queue/aio``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.generate_sync import TARGET, generate

GENERATED = generate()


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_a_generated_file_is_up_to_date(path: Path) -> None:
    assert path.read_text() == GENERATED[path], "bulltask/queue/aio has changed: run `make sync`"


def test_the_folder_contains_only_generated_files() -> None:
    assert set(TARGET.glob("*.py")) == GENERATED.keys()


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_generated_files_do_not_mention_asyncio(path: Path) -> None:
    lines = GENERATED[path].splitlines()[2 if path.name == "__init__.py" else 1 :]
    assert [
        line for line in lines if re.search(r"async(?!result)|await|coroutine|event loop", line, re.IGNORECASE)
    ] == []
