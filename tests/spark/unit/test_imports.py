"""Spark is imported where it is used, and only there; without it, one error says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bulltask.spark

HEAVY = ("pyspark", "py4j", "pyarrow")

WITHOUT_SPARK = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nothing())
"""


def output(program: str) -> str:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    "program",
    [
        "import bulltask",
        "import bulltask.cli.main",
        "import bulltask.cli.pipeline, click, importlib; "
        "[importlib.import_module(one) for one in bulltask.cli.pipeline.COMMANDS.values()]",
        "import bulltask.spark",
        "from bulltask.spark.source import options, positions, planning, queues, rings, spans",
    ],
)
def test_what_needs_no_spark_imports_none(program: str) -> None:
    assert output(f"{program}; import sys; print([name for name in {HEAVY} if name in sys.modules])") == "[]"


@pytest.mark.parametrize("name", bulltask.spark.__all__)
@pytest.mark.parametrize("missing", HEAVY)
def test_without_the_extra_every_name_says_what_to_install(name: str, missing: str) -> None:
    program = WITHOUT_SPARK.format(heavy={missing}) + (
        f"try:\n    from bulltask.spark import {name}\nexcept ImportError as exc:\n    print(type(exc).__name__, exc)"
    )
    assert output(program) == (
        f"MissingExtra bulltask.spark.{name} needs {missing}, which is not installed: pip install 'bulltask[spark]'"
    )


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        bulltask.spark.nothing  # noqa: B018


def test_every_public_name_is_listed_and_documented() -> None:
    assert set(bulltask.spark.__all__) <= set(dir(bulltask.spark))
    for name in bulltask.spark.__all__:
        assert getattr(bulltask.spark, name).__doc__
