"""The keys of mutants, by which ``tests/mutants/equivalent.txt`` names them."""

from __future__ import annotations

from tests.mutants.mutations import find_mutants

SOURCE = """
class Page:
    SIZE = 10

class Batch:
    SIZE: int = 10

LIMIT = 10
"""


def test_mutants_outside_functions_have_keys_of_their_own_that_other_variables_do_not_change() -> None:
    keys = [mutant.key for mutant in find_mutants("a/job.py", SOURCE)]
    others = {mutant.key for mutant in find_mutants("b/job.py", SOURCE)}
    assert len({*keys, *others}) == 2 * len(keys) == 12
    later = [mutant.key for mutant in find_mutants("a/job.py", f"FIRST = 10\n{SOURCE}")]
    assert later[2:] == keys
