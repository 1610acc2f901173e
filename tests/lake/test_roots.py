"""The root of a lake is a directory or the URL of an object store; others are refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from bulltask.jobs.errors import ConfigError
from bulltask.lake.storage import Lake, arrow_schema
from bulltask.lake.tables import GAPS


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("/data/lake/", "/data/lake"),
        ("file:///data/lake", "/data/lake"),
        ("s3://bucket/lake/", "s3://bucket/lake"),
        ("s3a://bucket/lake", "s3://bucket/lake"),
        ("abfss://container@account.dfs.core.windows.net/lake", "abfss://container@account.dfs.core.windows.net/lake"),
        ("gs://bucket/lake", "gs://bucket/lake"),
    ],
)
def test_directories_and_urls_of_object_stores_are_roots(root: str, expected: str) -> None:
    assert Lake(root).root == expected


@pytest.mark.parametrize(
    "root", ["", "hdfs://node/lake", "http://bucket/lake", "s3://", "/data/50%", "/data/[lake]", "a|b"]
)
def test_other_roots_are_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="root"):
        Lake(root)


@pytest.mark.parametrize("name", ["a b", "{braces}", "é", "#1?", "a+b=c&d;e'f\"g", "dt=2026-11-22"])
def test_a_directory_may_have_unusual_characters(tmp_path: Path, name: str) -> None:
    lake = Lake(tmp_path / name)
    row = {"queue": "mail", "lost": 1, "dt": "2026-11-22"}
    for _ in range(2):
        lake.commit(GAPS, lake.write(GAPS, pa.Table.from_pylist([row], arrow_schema(GAPS)), "part"))
    assert sum(file.rows for file in Lake(tmp_path / name).create(GAPS).files()) == 2
