"""The project's app, and ``manage.py bulltask``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import pytest
from django.core.checks import registry as checks
from django.core.management import call_command
from django.test import override_settings

from bulltask import App, AsyncResult, ConfigError, crontab
from bulltask.cli import main as cli
from bulltask.contrib import django as package
from bulltask.contrib.django import project
from bulltask.contrib.django.project import check_schedule, project_app
from bulltask.errors import AppNotFoundError
from bulltask.registry import request as current
from bulltask.registry.tasks import find_app

elsewhere = App("elsewhere", set_as_current=False)


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch) -> Callable[..., App]:
    """A function that returns the app of a project with the given settings."""
    monkeypatch.setattr(current, "_current_app", None)

    def create(**given: Any) -> App:
        with override_settings(**given):
            app: App = project_app.__wrapped__()
            return app

    return create


def test_the_app_has_the_settings_of_bulltask_and_celery(new: Any) -> None:
    app = new(
        TIME_ZONE="America/New_York",
        CELERY_TASK_DEFAULT_QUEUE="celery",
        CELERY_TASK_SOFT_TIME_LIMIT=60,
        BULLTASK={"broker_url": "redis://example:1/0", "task_default_queue": "orders"},
    )
    config = app._config
    assert (config.timezone, config.default_queue, config.soft_time_limit_ms) == ("America/New_York", "orders", 60_000)
    assert config.broker_url.get_secret_value() == "redis://example:1/0"


@pytest.mark.parametrize("given", [{"broker": "redis://x", "no_such_setting": 1}, ["a list"]])
def test_invalid_settings_raise(new: Any, given: Any) -> None:
    with pytest.raises(ConfigError):
        new(BULLTASK=given)


def test_the_system_checks_report_a_wrong_schedule(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [check for check in checks.registry.get_checks() if check is check_schedule] == [check_schedule]
    entries: dict[str, Any] = {
        "good": {"task": "half", "schedule": crontab(minute=0, hour=3), "args": (4,)},
        "misspelt": {"task": "half", "shedule": 30},  # codespell:ignore shedule
        "interval": {"task": "half", "schedule": "every day", "args": (4,)},
        "arguments": {"task": "half", "schedule": 30, "args": (1, 2)},
        "option": {"task": "half", "schedule": 30, "args": (4,), "options": {"prio": 1}},
        "unknown": {"task": "haIf", "schedule": 30},
        "text": "half",
    }
    app = new(BULLTASK={"beat_schedule": entries})
    app.task(name="half")(lambda x: x / 2)
    monkeypatch.setattr(project, "project_app", lambda: app)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
    found = [(message.id, message.msg.partition(": ")[0], message.msg) for message in check_schedule()]
    assert [(kind, entry) for kind, entry, _ in found] == [
        *(
            ("bulltask.E002", f"beat_schedule[{name!r}]")
            for name in ("misspelt", "interval", "arguments", "option", "text")
        ),
        ("bulltask.W001", "beat_schedule['unknown']"),
    ]
    assert "unknown key 'shedule'; did you mean 'schedule'?" in found[0][2]  # codespell:ignore shedule
    app.conf.task_max_retries = 4  # the check has not frozen the settings


def test_the_system_checks_report_modules_with_tasks_that_cannot_be_imported(
    new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"task": "half", "schedule": 30}
    app = new(BULLTASK={"beat_schedule": {"a": entry}, "include": ["no_such_module_xyz"]})
    monkeypatch.setattr(project, "project_app", lambda: app)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
    assert [(message.id, "no_such_module_xyz" in message.msg) for message in check_schedule()] == [
        ("bulltask.E003", True)
    ]


def test_bulltask_app_names_the_app(new: Any) -> None:
    assert new(BULLTASK_APP=f"{__name__}:elsewhere") is elsewhere
    with pytest.raises(AppNotFoundError):
        new(BULLTASK_APP="no.such.module:app")


def test_an_app_that_the_project_has_created_is_used(new: Any) -> None:
    existing = App("existing")
    assert new(BULLTASK={}) is existing


def test_the_package_has_the_app_and_the_command_line_finds_it() -> None:
    assert package.app is project_app() is find_app("bulltask.contrib.django", App)
    with pytest.raises(AttributeError, match="has no attribute 'ap'"):
        _ = package.ap  # type: ignore[attr-defined]


def test_results_can_be_read_without_a_queue(project: App) -> None:
    sent = project.send_task("any.task")
    assert AsyncResult(sent.id, "default", project._results).state == "PENDING"


def test_the_command_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    seen: list[Any] = []

    @click.command("probe")
    @click.option("-n", type=int)
    @click.pass_context
    def probe(ctx: click.Context, n: int) -> None:
        seen.append((ctx.obj["app"], n))
        ctx.exit(n)

    get_command = cli.main.get_command
    monkeypatch.setattr(cli.main, "get_command", lambda ctx, name: probe if name == "probe" else get_command(ctx, name))
    call_command("bulltask", "probe", "-n", "0")
    with pytest.raises(SystemExit) as exit_:
        call_command("bulltask", "probe", "-n", "3")
    assert (seen, exit_.value.code) == ([("bulltask.contrib.django", 0), ("bulltask.contrib.django", 3)], 3)
    call_command("bulltask")
    assert "Usage: manage.py bulltask" in capsys.readouterr().out
