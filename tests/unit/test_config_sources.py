"""Settings from pyproject.toml, --config and the environment, and which of them takes precedence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bulltask import App, ConfigError
from bulltask.cli.main import main
from bulltask.config.settings import CONFIG_VARIABLE, Settings


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory that is the working directory and on ``sys.path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# --- pyproject.toml ---------------------------------------------------------------------------------------------------


def test_settings_are_read_from_the_nearest_pyproject(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project / "pyproject.toml", '[tool.bulltask]\nbroker_url = "redis://shop/3"\nlock_duration = 60\n')
    inner = project / "src" / "shop"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    assert (App("shop").conf.broker_url, App("shop")._config.lock_ms) == ("redis://shop/3", 60_000)


def test_a_pyproject_of_another_project_is_not_parsed(project: Path) -> None:
    write(project / "pyproject.toml", "this is not TOML")
    assert Settings({}, {}).lock_duration == 30
    write(project / "pyproject.toml", '[project]\nname = "tool.bulltask"\n')
    assert Settings({}, {}).lock_duration == 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.bulltask]\nlock_durration = 3", "unknown setting 'lock_durration'; did you mean 'lock_duration'"),
        (
            "[tool.bulltask]\nlock_duration = 'long'",
            "lock_duration must be a number of seconds or a timedelta, not 'long'",
        ),
        ("[tool.bulltask]\nbroker_password = 'x'", "Celery's setting broker_password is not available"),
        ("[tool.bulltask]\nlock_duration = ", "cannot read the settings in .*Invalid value"),
        ("[tool]\nbulltask = 3 # tool.bulltask", r"\[tool.bulltask\] in .* must be a table, not 3"),
    ],
)
def test_an_error_in_pyproject_names_the_file(project: Path, text: str, message: str) -> None:
    write(project / "pyproject.toml", text)
    with pytest.raises(ConfigError, match=message) as caught:
        App("shop")
    assert str(project / "pyproject.toml") in str(caught.value)


# --- --config ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["max_crashes = 7", "[tool.bulltask]\nmax_crashes = 7"])
def test_a_toml_file_overrides_the_app(project: Path, text: str) -> None:
    path = write(project / "production.toml", text)
    assert Settings({"max_crashes": 3}, {CONFIG_VARIABLE: path}).max_crashes == 7


def test_a_module_overrides_the_app(project: Path) -> None:
    write(project / "production_settings.py", "max_crashes = 7")
    settings = Settings({"max_crashes": 3}, {CONFIG_VARIABLE: "production_settings"})
    assert settings.max_crashes == 7
    settings.max_crashes = 4
    assert settings.max_crashes == 7


def test_a_file_or_module_that_does_not_exist_raises_an_error(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings in .*none.toml: .*No such file"):
        Settings({}, {CONFIG_VARIABLE: str(project / "none.toml")})
    with pytest.raises(ConfigError, match=r"cannot import 'no_such' \(a file's name must end in .toml\)"):
        Settings({}, {CONFIG_VARIABLE: "no_such"})
    write(project / "broken_settings.py", "import no_such_library")
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        Settings({}, {CONFIG_VARIABLE: "broken_settings"})


def test_the_command_line_overrides_the_environment_the_file_the_app_and_pyproject(project: Path) -> None:
    write(project / "pyproject.toml", "[tool.bulltask]\nmax_crashes = 3\nmax_logs = 3\nmax_events = 300\nprefix = 'p'")
    path = write(project / "production.toml", "max_crashes = 5\nmax_logs = 5")
    settings = Settings(
        {"max_crashes": 4, "max_logs": 4, "max_events": 400},
        {
            CONFIG_VARIABLE: path,
            "BULLTASK_MAX_CRASHES": "6",
        },
    )
    found: tuple[Any, ...] = (settings.max_crashes, settings.max_logs, settings.max_events, settings.prefix)
    assert found == ("6", 5, 400, "p")
    settings.override("max_crashes", 7)
    assert settings.freeze().max_crashes == 7


@pytest.mark.parametrize("before", [True, False])
def test_the_option_may_precede_the_command_and_its_path_is_relative_to_the_users_directory(
    project: Path, *, before: bool
) -> None:
    (project / "inside").mkdir()
    write(project / "inside" / "shop_of_config_test.py", "from bulltask import App\napp = App('shop')\nprint(app.conf)")
    write(project / "production.toml", "prefix = 'production'")
    option = ["--config", "production.toml"]
    args = ["--workdir", "inside", *option, "revoke"] if before else ["--workdir", "inside", "revoke", *option]
    result = CliRunner().invoke(main, [*args, "1", "-A", "shop_of_config_test", "-b", "redis://127.0.0.1:1"])
    assert "'prefix': 'production'" in result.output


# --- the environment --------------------------------------------------------------------------------------------------


def test_celerys_variable_is_used_if_nothing_else_sets_the_url() -> None:
    environ = {"CELERY_BROKER_URL": "redis://:secret@celery/1"}
    settings = Settings({}, environ)
    assert settings.broker_url == "redis://:secret@celery/1"
    assert settings.freeze().broker_url == "redis://:secret@celery/1"
    assert settings.is_url_from_celery
    assert "secret" not in repr(vars(settings))
    for others in (
        Settings({"broker_url": "redis://app/2"}, environ),
        Settings({}, {**environ, "BULLTASK_BROKER_URL": "redis://app/2"}),
    ):
        assert others.freeze().broker_url == "redis://app/2"
        assert not others.is_url_from_celery


def test_celerys_variable_with_another_broker_is_an_error_only_if_it_is_used() -> None:
    environ = {"CELERY_BROKER_URL": "amqp://celery"}
    settings = Settings({}, environ)
    settings.broker_url = "redis://app/2"
    assert settings.freeze().broker_url == "redis://app/2"
    with pytest.raises(ConfigError, match="CELERY_BROKER_URL must start with redis://"):
        Settings({}, environ).freeze()
