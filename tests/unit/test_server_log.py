from __future__ import annotations

from pathlib import Path

import pytest

from bulltask.embedded.server import ServerLog
from bulltask.errors import BrokerUnavailableError


@pytest.mark.parametrize("target", ["server.log", "no/such/file"])
def test_a_log_that_is_a_broken_link_is_an_error_that_names_it(tmp_path: Path, target: str) -> None:
    (tmp_path / "server.log").symlink_to(tmp_path / target)
    with pytest.raises(BrokerUnavailableError, match=r"server\.log is a symbolic link that cannot be followed"):
        ServerLog(tmp_path)


def test_a_log_begins_where_the_previous_one_ends(tmp_path: Path) -> None:
    assert ServerLog(tmp_path).text() == ""
    (tmp_path / "server.log").write_text("old")
    log = ServerLog(tmp_path)
    with (tmp_path / "server.log").open("a") as file:
        file.write("new")
    assert log.text() == "new"
