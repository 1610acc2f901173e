"""Arrow is imported when the history is used; without it, one error says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bulltask.lake

WITHOUT = """
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
"""


def output(program: str) -> str:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("program", ["import bulltask.lake", "import bulltask.lake.layout, bulltask.lake.records"])
def test_modules_that_need_no_arrow_do_not_import_it(program: str) -> None:
    assert output(f"{program}; import sys; print('pyarrow' in sys.modules)") == "False"


def test_the_history_needs_no_spark() -> None:
    program = (
        "import sys; from bulltask.lake import History; print([n for n in ('pyspark', 'py4j') if n in sys.modules])"
    )
    assert output(program) == "[]"


def test_without_the_extra_the_error_names_it() -> None:
    said = output(
        WITHOUT + "try:\n    from bulltask.lake import History\nexcept ImportError as exc:\n    print(repr(exc))"
    )
    assert "MissingExtraError" in said
    assert "bulltask.lake.History needs pyarrow, which is not installed: pip install 'bulltask[history]'" in said


@pytest.mark.parametrize("name", bulltask.lake.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(bulltask.lake, name).__name__ == name
    assert name in dir(bulltask.lake)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = bulltask.lake.nothing
