"""The pages about Spark match the code. These tests need no JVM."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

from bulltask.spark.acl import READER, WRITER

DOCS = Path(__file__).parents[2] / "docs"


def test_the_tables_of_options_and_of_the_lake_are_up_to_date() -> None:
    for page, text in runpy.run_path(str(DOCS / "spark_tables.py"))["pages"]().items():
        assert page.read_text() == text, "run: .venv/bin/python docs/spark_tables.py"


def test_the_documented_command_prints_the_permissions_of_both_users() -> None:
    [command] = re.findall(r"^(python -c .*spark\.acl.*)$", (DOCS / "how-to/spark.md").read_text(), re.MULTILINE)
    _, option, program = shlex.split(command)
    printed = subprocess.run([sys.executable, option, program], capture_output=True, text=True, check=True).stdout
    assert [line.split() for line in printed.splitlines()] == [READER.rules(), WRITER.rules()]
