"""Which directories are one project, and so share the server of ``embedded://``."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path
from unittest.mock import Mock

import pytest

import bulltask
from bulltask import App, ConfigError
from bulltask.embedded import import_directory
from bulltask.embedded.server import open_lock
from bulltask.embedded.shared import DataDirectory, find_project, server_name
from bulltask.errors import BrokerUnavailableError


@pytest.mark.parametrize(
    ("markers", "start", "project"),
    [
        ([], "work/shop/src", "work/shop/src"),
        (["work/shop/pyproject.toml"], "work/shop/src", "work/shop"),
        (["work/shop/.git/HEAD"], "work/shop/src/deep", "work/shop"),
        (["work/shop/manage.py", "work/.git/HEAD"], "work/shop", "work/shop"),
        (["work/.git/HEAD"], "work/shop", "work"),
        (["home/.git/HEAD", "setup.cfg"], "home/shop", "home/shop"),  # the user's settings are not a project
        (["home/pyproject.toml"], "home", "home"),
        (["home/shop/setup.py"], "home/shop/a/b", "home/shop"),
    ],
)
def test_a_project_is_the_nearest_directory_with_a_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, markers: list[str], start: str, project: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / start).mkdir(parents=True)
    for marker in markers:
        (tmp_path / marker).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / marker).touch()
    assert find_project(tmp_path / start) == tmp_path / project
    monkeypatch.chdir(tmp_path / start)
    assert find_project() == tmp_path / project


@pytest.mark.parametrize("home", [None, "/proc/nobody"])
def test_a_user_without_a_home_directory_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    if home is None:
        monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    else:
        monkeypatch.setenv("HOME", home)
    with pytest.raises((ConfigError, BrokerUnavailableError), match=r"set XDG_DATA_HOME to .*redis://localhost:6379/0"):
        open_lock(DataDirectory.named("shop").lock_file)


def test_a_link_to_a_project_is_the_same_project(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "shop")
    assert find_project(tmp_path / "link") == find_project(tmp_path / "shop")


def test_a_removed_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"which has been removed.*embedded://shop"):
        find_project()


@pytest.mark.parametrize("name", ["shop", "Läden & Söhne", "-", ".hidden", "x" * 200, "a\udc80b", "a.b"])
def test_every_directory_has_a_valid_server_name_of_its_own(name: str) -> None:
    names = {server_name(Path("/", parent, name)) for parent in ("one", "two")}
    assert len(names) == 2
    for one in names:
        assert DataDirectory.named(one).name == one


@pytest.mark.parametrize(
    ("file", "package", "directory"),
    [
        ("tasks.py", "", ""),  # imported, or a script
        ("tasks.py", None, ""),
        ("shop/tasks.py", "shop", ""),
        ("shop/__init__.py", "shop", ""),
        ("src/shop/jobs/mail.py", "shop.jobs", "src"),
        ("missing.py", "", None),
        ("lib/python3/dist-packages/shop/tasks.py", "shop", None),
        (".local/bin/bulltask", "", None),
    ],
)
def test_the_directory_of_a_module_is_that_from_which_it_is_imported(
    tmp_path: Path, file: str, package: str | None, directory: str | None
) -> None:
    if file != "missing.py":
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    found = import_directory({"__file__": str(tmp_path / file), "__package__": package})
    assert found == (None if directory is None else tmp_path / directory)


def test_modules_without_a_file_and_of_libraries_belong_to_no_project() -> None:
    script = Path(sysconfig.get_path("scripts"), Path(sys.executable).name)
    for module in ({}, vars(json), vars(pytest), vars(bulltask.app), {"__file__": str(script)}):
        assert import_directory(module) is None


def test_an_app_belongs_to_the_module_that_creates_it_even_through_a_function_of_a_library() -> None:
    root = Path(__file__).parents[2]
    assert App("here", set_as_current=False)._directory == root
    namespace = {"App": App, "__name__": "library", "__file__": json.__file__, "__package__": "json"}
    exec("def make(): return App('there', set_as_current=False)", namespace)
    assert namespace["make"]()._directory == root  # type: ignore[operator]
