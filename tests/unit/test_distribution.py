"""The distribution of test files over pytest-xdist's workers."""

from __future__ import annotations

from pathlib import Path

from tests.support.distribution import FIRST, UNITS, sort_longest_first, unit

ROOT = Path(__file__).parents[2]


def test_files_that_need_java_are_in_three_units() -> None:
    # More JVMs at a time would need too much memory.
    files = [path for path in sorted((ROOT / "tests" / "spark").rglob("test_*.py")) if "mark.spark" in path.read_text()]
    units = {str(path.relative_to(ROOT)): unit(f"{path.relative_to(ROOT)}::test_it") for path in files}
    assert set(units.values()) == set(FIRST[:3]), units
    with_session = {path for path in units if "spark: SparkSession" in (ROOT / path).read_text()}
    assert {units[path] for path in with_session} == {FIRST[0]}, "a second worker would start another session"


def test_files_and_directories_of_units_exist() -> None:
    prefixes = [prefix for prefix, _ in UNITS] + [name for name in FIRST if "/" in name]
    assert [prefix for prefix in prefixes if not (ROOT / prefix).exists()] == []


def test_the_longest_units_start_first_and_others_keep_their_order() -> None:
    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid = nodeid

    paths = ["tests/unit/test_b.py", "tests/redis/test_a.py", "tests/process/test_c.py", "tests/spark/local/test_d.py"]
    items = [Item(f"{path}::test_{number}") for path in paths for number in range(2)]
    sort_longest_first(items)  # type: ignore[arg-type]
    assert [item.nodeid.partition("::")[0] for item in items[::2]] == [paths[3], paths[2], paths[0], paths[1]]
    assert [item.nodeid[-1] for item in items] == ["0", "1"] * 4
