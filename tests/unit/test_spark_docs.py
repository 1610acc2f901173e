"""The pages about Spark match the code. These tests need no JVM."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from bulltask.spark.acl import READER, WRITER, Grants

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_of_options_and_of_the_lake_are_up_to_date() -> None:
    for page, text in runpy.run_path(str(DOCS / "spark_tables.py"))["pages"]().items():
        assert page.read_text() == text, "run: .venv/bin/python docs/spark_tables.py"


@pytest.mark.parametrize(("user", "grants"), [("spark-reader", READER), ("spark-writer", WRITER)])
def test_the_documented_acl_grants_match_the_code(user: str, grants: Grants) -> None:
    match = re.search(rf"^ACL SETUSER {user} on >password (.*)$", (DOCS / "how-to/spark.md").read_text(), re.MULTILINE)
    assert match is not None
    assert match[1].split() == grants.rules()
