"""Spark is imported only by code that uses it; if it is missing, the error names the package to install."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bulltask.spark
from tests.support.programs import ROOT

pytestmark = pytest.mark.slow  # each test starts a process

NEEDED = ("pyspark", "py4j", "pyarrow")
HEAVY = (*NEEDED, "numpy")
LAZY = "current_session"
"""The only public name that imports Spark when it is called."""

WITHOUT_SPARK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""

PRINT_EACH = """
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
        "import bulltask.cli.pipeline.queues, bulltask.cli.pipeline.tables",
        "import bulltask.spark",
        "from bulltask.spark import current_session",  # tasks do this: a worker forks, and NumPy starts threads
        "from bulltask.spark.source import connection, offsets, options, planning, streams",
    ],
)
def test_modules_that_do_not_need_spark_do_not_import_it(program: str) -> None:
    assert output(f"{program}; import sys; print([name for name in {HEAVY} if name in sys.modules])") == "[]"


@pytest.mark.parametrize("missing", HEAVY)
def test_every_public_name_reports_the_extra_to_install(missing: str) -> None:
    """One process looks up all names: a failed lookup does not affect the next."""
    names = ["Pipeline"] if missing == "numpy" else [name for name in bulltask.spark.__all__ if name != LAZY]
    program = WITHOUT_SPARK.format(heavy={missing}) + PRINT_EACH.format(names=names)
    assert output(program).splitlines() == [
        f"MissingExtraError bulltask.spark.{name} needs {missing}, which is not installed:"
        " pip install 'bulltask[spark]'"
        for name in names
    ]


@pytest.mark.parametrize("missing", NEEDED)
def test_current_session_reports_the_extra_to_install(missing: str) -> None:
    program = WITHOUT_SPARK.format(heavy={missing}) + (
        "import bulltask.spark\ntry:\n    bulltask.spark.current_session()\nexcept ImportError as exc:\n    print(exc)"
    )
    message = f"bulltask.spark.session needs {missing}, which is not installed: pip install 'bulltask[spark]'"
    assert output(program) == message


def test_missing_packages_of_spark_connect_are_reported_in_one_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"  # a file, because Spark mistakes `python -c` for its own tests
    program.write_text(
        WITHOUT_SPARK.format(heavy={"pandas"}) + "from bulltask.cli.main import main\n"
        "main('-b redis://127.0.0.1:1 pipeline snapshot --lake /nowhere --master sc://127.0.0.1:1'.split())\n"
    )
    environ = {"PATH": "/nowhere", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False, timeout=50, env=environ
    )
    assert ran.returncode == 1
    expected = r"Error: Spark Connect: pip install 'pyspark\[connect\]' 'pandas<3' \(.*Pandas.*\)\n"
    assert re.fullmatch(expected, ran.stderr)


def test_cluster_nodes_need_only_the_packages_listed_in_the_docs() -> None:
    docs = (ROOT / "docs" / "how-to" / "spark.md").read_text()
    (packages,) = re.findall(r"the nodes\s+need\s+`pip install ([^`]*)`", docs)
    needed = {re.split(r"\W", word.strip('"').replace("-", "_"))[0] for word in packages.split()}
    assert needed == {"cloudpickle", "msgpack", "pyarrow", "redis", "uuid_utils"}
    program = WITHOUT_SPARK.format(heavy={"click", "prometheus_client", "structlog", "tzdata"}) + (
        "before = set(sys.modules)\n"
        "import bulltask.spark.connector\n"
        "import bulltask.spark.mapping, bulltask.spark.results\n"
        "import bulltask.spark.batches, bulltask.transport.broker\n"
        "print(*(name for name in set(sys.modules) - before))"
    )
    assert needed <= set(output(program).split())


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        bulltask.spark.nothing  # noqa: B018


def test_every_public_name_is_listed_and_documented() -> None:
    assert set(bulltask.spark.__all__) <= set(dir(bulltask.spark))
    for name in bulltask.spark.__all__:
        assert getattr(bulltask.spark, name).__doc__
