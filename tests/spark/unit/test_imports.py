"""Spark is imported where it is used, and only there; without it, one error says what to install."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bulltask.spark
from tests.support.programs import ROOT

pytestmark = pytest.mark.slow  # a process each

NEEDED = ("pyspark", "py4j", "pyarrow")
HEAVY = (*NEEDED, "numpy")
LATE = "current_session"
"""It looks for Spark when it is called."""

WITHOUT_SPARK = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Nothing())
"""

TOLD_OF_EACH = """
import bulltask.spark

for name in {names}:
    try:
        print(name, getattr(bulltask.spark, name))
    except ImportError as exc:
        print(type(exc).__name__, exc)
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
        "from bulltask.spark import current_session",  # by tasks: a worker forks, and NumPy starts threads
        "from bulltask.spark.source import offsets, options, planning, queues, ranges, status",
    ],
)
def test_what_needs_no_spark_imports_none(program: str) -> None:
    assert output(f"{program}; import sys; print([name for name in {HEAVY} if name in sys.modules])") == "[]"


@pytest.mark.parametrize("missing", HEAVY)
def test_without_the_extra_every_name_says_what_to_install(missing: str) -> None:
    """One process looks up all names: a failed look-up has no effect on the next one."""
    names = ["Pipeline"] if missing == "numpy" else [name for name in bulltask.spark.__all__ if name != LATE]
    program = WITHOUT_SPARK.format(heavy={missing}) + TOLD_OF_EACH.format(names=names)
    assert output(program).splitlines() == [
        f"MissingExtraError bulltask.spark.{name} needs {missing}, which is not installed:"
        " pip install 'bulltask[spark]'"
        for name in names
    ]


@pytest.mark.parametrize("missing", NEEDED)
def test_without_the_extra_a_task_that_asks_for_its_session_is_told_what_to_install(missing: str) -> None:
    program = WITHOUT_SPARK.format(heavy={missing}) + (
        "import bulltask.spark\ntry:\n    bulltask.spark.current_session()\nexcept ImportError as exc:\n    print(exc)"
    )
    said = f"bulltask.spark.session needs {missing}, which is not installed: pip install 'bulltask[spark]'"
    assert output(program) == said


def test_without_the_packages_of_spark_connect_one_line_says_what_to_install(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # a file, because Spark takes `python -c` for tests of its own
    program.write_text(
        WITHOUT_SPARK.format(heavy={"pandas"}) + "from bulltask.cli.main import main\n"
        "main('-b redis://127.0.0.1:1 pipeline snapshot --root /nowhere --master sc://127.0.0.1:1'.split())\n"
    )
    environ = {"PATH": "/nowhere", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False, timeout=50, env=environ
    )
    assert ran.returncode == 1
    said = r"Error: Spark Connect: pip install 'pyspark\[connect\]' 'pandas<3' \(.*Pandas.*\)\n"
    assert re.fullmatch(said, ran.stderr)


def test_nodes_need_only_the_packages_that_the_docs_list() -> None:
    docs = (ROOT / "docs" / "how-to" / "spark.md").read_text()
    (said,) = re.findall(r"the nodes\s+need\s+`pip install ([^`]*)`", docs)
    needed = {re.split(r"\W", word.strip('"').replace("-", "_"))[0] for word in said.split()}
    assert needed == {"cloudpickle", "msgpack", "pyarrow", "redis", "uuid_utils"}
    program = WITHOUT_SPARK.format(heavy={"click", "prometheus_client", "structlog", "tzdata"}) + (
        "before = set(sys.modules)\n"
        "import bulltask.spark.connector.data_source, bulltask.spark.connector.enqueue_stream\n"
        "import bulltask.spark.sink.mapping, bulltask.spark.sink.results\n"
        "import bulltask.spark.tables.batches, bulltask.transport.broker\n"
        "print(*(name for name in set(sys.modules) - before))"
    )
    assert needed <= set(output(program).split())


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        bulltask.spark.nothing  # noqa: B018


def test_every_public_name_is_listed_and_documented() -> None:
    assert set(bulltask.spark.__all__) <= set(dir(bulltask.spark))
    for name in bulltask.spark.__all__:
        assert getattr(bulltask.spark, name).__doc__
