"""pyarrow is imported only when the history is used. Without pyarrow, the error names the package to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bulltask.lake

WITHOUT_PYARROW = """
import sys

class BlockPyarrow:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, BlockPyarrow())
"""

IMPORT = """
try:
    from bulltask.lake import History
except ImportError as exc:
    print(repr(exc))
"""


def output(program: str) -> str:
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("program", ["import bulltask.lake", "import bulltask.lake.tables, bulltask.lake.records"])
def test_modules_that_do_not_need_arrow_do_not_import_pyarrow(program: str) -> None:
    assert output(f"{program}; import sys; print('pyarrow' in sys.modules)") == "False"


@pytest.mark.slow
def test_the_history_does_not_need_spark() -> None:
    program = (
        "import sys; from bulltask.lake import History; print([n for n in ('pyspark', 'py4j') if n in sys.modules])"
    )
    assert output(program) == "[]"


def test_the_error_without_pyarrow_names_the_extra() -> None:
    text = output(WITHOUT_PYARROW + IMPORT)
    assert "MissingExtraError" in text
    assert "bulltask.lake.History needs pyarrow, which is not installed: pip install 'bulltask[history]'" in text


@pytest.mark.parametrize("name", bulltask.lake.__all__)
def test_every_public_name_is_available(name: str) -> None:
    assert getattr(bulltask.lake, name).__name__ == name
    assert name in dir(bulltask.lake)


def test_an_unknown_name_raises_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = bulltask.lake.nothing
