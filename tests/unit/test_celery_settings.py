"""Every setting of Celery 5.7 is supported, or leads to an error or a warning with the reason."""

from __future__ import annotations

import re
import ssl
import sys
import types
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from bulltask import App, ConfigError
from bulltask.config.celery_settings import CELERY_SETTINGS
from bulltask.config.config import SETTINGS
from bulltask.config.settings import Settings

NAMES = (Path(__file__).parent / "celery_settings.txt").read_text().split()


def conf(**values: object) -> Settings:
    return Settings(values, {})


def error(name: str, value: object) -> str:
    with pytest.raises(ConfigError) as caught:
        conf(**{name: value})
    return str(caught.value)


def warning(name: str, value: object) -> str:
    with pytest.warns(UserWarning, match="in bulltask: ") as caught:
        conf(**{name: value})
    return str(caught[0].message)


# --- the table --------------------------------------------------------------------------------------------------------


def test_each_of_celerys_207_settings_is_supported_or_has_a_reason() -> None:
    assert len(set(NAMES)) == 207
    both = [name for name in CELERY_SETTINGS if name in SETTINGS]
    assert both == [], (
        "bulltask has these settings now: remove them from config/celery_settings.py, run settings_table.py"
    )
    assert [name for name in NAMES if name not in SETTINGS and name not in CELERY_SETTINGS] == []
    assert set(CELERY_SETTINGS) <= set(NAMES)


def test_each_reason_says_what_to_use_or_why_nothing_is_needed() -> None:
    assert [name for name, row in CELERY_SETTINGS.items() if len(row.reason) < 15 and not row.replacement] == []
    assert {row.replacement for row in CELERY_SETTINGS.values() if row.replacement} <= set(SETTINGS)
    named = {name for row in CELERY_SETTINGS.values() for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", row.reason)}
    others = {"visibility_timeout", "ssl_cert_reqs", "ssl_ca_certs", "ignore_result"}
    others |= {"master_name", "sentinel_kwargs", "sentinel_password"}
    assert named - set(SETTINGS) == others & named, "a reason names a setting that does not exist"


def test_a_celery_setting_never_leads_to_a_misleading_suggestion() -> None:
    value = object()
    rows = [row for row in CELERY_SETTINGS.values() if not row.replacement and not row.is_redundant(value)]
    messages = {row.name: (error if row.rejected else warning)(row.name, value) for row in rows}
    assert len(messages) > 150
    assert [name for name, text in messages.items() if not text.startswith(f"Celery's setting {name} ")] == []


def test_a_password_is_never_shown() -> None:
    assert "secret" not in error("broker_password", "secret")
    assert "secret" not in warning("redis_password", "secret")
    assert error("broker_password", "secret") == (
        "Celery's setting broker_password is not available in bulltask: use broker_url, as in "
        "redis://user:password@host:6379/0"
    )


def test_a_warning_points_to_the_users_line() -> None:
    with pytest.warns(UserWarning, match="worker_lost_wait has no effect in bulltask: a job whose child") as caught:
        App("shop", worker_lost_wait=10)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task_acks_late", True),
        ("enable_utc", True),
        ("result_backend", "redis://other/1"),
        ("result_backend", "rpc://"),
        ("broker_connection_retry_on_startup", True),
        ("task_track_started", True),
        ("task_send_sent_event", True),
        ("worker_prefetch_multiplier", 1),
        ("broker_transport", "redis"),
        ("beat_scheduler", "celery.beat:PersistentScheduler"),
        ("task_store_eager_result", False),
        ("broker_read_url", None),
        ("broker_use_ssl", None),
        ("broker_transport_options", {}),
    ],
)
def test_a_value_that_describes_what_bulltask_does_is_accepted_silently(name: str, value: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert name not in dir(conf(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task_acks_late", False),
        ("result_backend", "db+postgresql://shop/jobs"),
        ("worker_prefetch_multiplier", 4),
        ("enable_utc", False),
        ("broker_transport_options", {"visibility_timeout": 3600}),
    ],
)
def test_a_value_that_bulltask_cannot_honor_causes_a_warning(name: str, value: object) -> None:
    assert warning(name, value).startswith(f"Celery's setting {name} has no effect in bulltask: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("broker_host", "redis.example"),
        ("broker_transport", "amqp"),
        ("broker_use_ssl", {"ssl_cert_reqs": ssl.CERT_REQUIRED}),
        ("security_key", "/etc/key.pem"),
        ("task_default_priority", 5),
    ],
)
def test_a_setting_that_cannot_safely_be_ignored_is_rejected(name: str, value: object) -> None:
    assert error(name, value).startswith(f"Celery's setting {name} is not available in bulltask: ")


@pytest.mark.parametrize(
    ("name", "value", "config"),
    [
        ("task_serializer", "json", "json"),
        ("result_serializer", "application/json", "json"),
        ("accept_content", ["json"], ("json",)),
        ("accept_content", {"application/json"}, ("json",)),
        ("task_compression", None, None),
        ("result_compression", "zlib", "zlib"),
    ],
)
def test_serializers_and_compressions_have_celerys_names(name: str, value: object, config: object) -> None:
    assert getattr(conf(**{name: value}).freeze(), name) == config


@pytest.mark.parametrize(("name", "value"), [("task_serializer", "pickle"), ("accept_content", ["json", "pickle"])])
def test_pickle_is_rejected_with_the_alternative(name: str, value: object) -> None:
    assert "must be json or cloudpickle, not 'pickle'; cloudpickle supports everything" in error(name, value)


def test_renamed_settings_are_supported() -> None:
    settings = conf(broker_connection_timeout=2, worker_pool_start_method="spawn", imports=["shop.a"])
    config = settings.freeze()
    assert (config.connect_timeout_ms, config.start_method, config.imports) == (2_000, "spawn", ("shop.a",))


def test_values_that_celery_accepts_have_celerys_meaning() -> None:
    assert conf(broker_connection_max_retries=0).freeze().connection_retries is None
    assert conf(timezone=None).freeze().timezone == "UTC"
    assert conf(timezone=ZoneInfo("Europe/Berlin")).freeze().timezone == "Europe/Berlin"


@pytest.mark.parametrize(
    ("name", "current"),
    [
        ("CELERYD_CONCURRENCY", "worker_concurrency"),
        ("BROKER_URL", "broker_url"),
        ("CELERY_TASK_RESULT_EXPIRES", "result_expires"),
        ("CELERYBEAT_SCHEDULE", "beat_schedule"),
        ("CELERY_ACKS_LATE", "task_acks_late"),
        ("CELERYD_TASK_TIME_LIMIT", "task_time_limit"),
    ],
)
def test_an_old_name_leads_to_the_current_name(name: str, current: str) -> None:
    assert error(name, 1) == f"unknown setting {name!r}: it is an old Celery name; use {current}"
    with pytest.raises(ConfigError, match=f"use {current}"):
        App("shop").config_from_object({name: 1})


def test_a_misspelled_celery_name_is_corrected() -> None:
    assert error("task_ack_late", 1) == "unknown setting 'task_ack_late'; did you mean 'task_acks_late'?"
    with pytest.raises(AttributeError, match="task_acks_late has no effect in bulltask"):
        _ = conf().task_acks_late


def test_a_name_that_is_not_available_is_explained_instead_of_suggested() -> None:
    assert error("broker_pasword", 1) == (
        "unknown setting 'broker_pasword'. Celery's setting broker_password is not available in bulltask: use "
        "broker_url, as in redis://user:password@host:6379/0"
    )


@pytest.mark.parametrize("name", ["my_own", "sentry_dsn", "flower_port", "email_host"])
def test_a_name_that_resembles_no_setting_leads_to_no_suggestion(name: str) -> None:
    assert error(name, 1) == f"unknown setting {name!r}"
    with pytest.raises(ConfigError, match=f"unknown setting 'CELERY_{name.upper()}'$"):
        App("shop").config_from_object({f"CELERY_{name.upper()}": 1}, namespace="CELERY")


@pytest.mark.parametrize(
    "scheduler",
    ["django_celery_beat.schedulers:DatabaseScheduler", "redbeat.RedBeatScheduler", "shop.beat.Scheduler"],
)
def test_a_custom_scheduler_is_rejected_because_its_schedules_would_stop(scheduler: str) -> None:
    message = error("beat_scheduler", scheduler)
    assert message.startswith("Celery's setting beat_scheduler is not available in bulltask: the workers run")
    assert "move them to beat_schedule, or to app.queue(…).schedulers" in message
    with pytest.raises(ConfigError, match="CELERY_BEAT_SCHEDULER is not available"):
        App("shop").config_from_object({"CELERY_BEAT_SCHEDULER": scheduler}, namespace="CELERY")


@pytest.mark.parametrize("name", ["redbeat_redis_url", "redbeat_key_prefix", "redbeat_lock_timeout"])
def test_a_setting_of_redbeat_leads_to_the_alternative(name: str) -> None:
    message = error(name, 1)
    assert message.startswith(f"unknown setting {name!r}: it belongs to RedBeat, but the workers run beat_schedule")
    assert "did you mean" not in message


# --- config_from_object -----------------------------------------------------------------------------------------------


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module that can be imported as ``celeryconfig_of_test``."""
    made = types.ModuleType("celeryconfig_of_test")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def app() -> App:
    return App("shop", set_as_current=False)


def test_settings_are_read_from_a_module_by_name_or_as_an_object(module: types.ModuleType) -> None:
    code = """
import os
from datetime import timedelta
def helper(): ...
_private = 1
BASE_DIRECTORY = "/srv"
result_expires = timedelta(hours=1)
task_default_queue = "shop"
"""
    exec(code, vars(module))
    for source in (module.__name__, module):
        read = app()
        read.config_from_object(source)
        assert (read.conf.result_expires, read.conf.task_default_queue) == (timedelta(hours=1), "shop")


def test_settings_with_a_namespace_are_read_from_an_attribute_of_a_module(module: types.ModuleType) -> None:
    module.settings = types.SimpleNamespace(  # type: ignore[attr-defined]
        DEBUG=True,
        CELERY_BROKER_URL="redis://shop/1",
        CELERY_TASK_SERIALIZER="json",
        CELERY_WORKER_CONCURRENCY=3,
        BULLTASK_MAX_CRASHES=5,
        celery_timezone="UTC",
    )
    read = app()
    read.config_from_object("celeryconfig_of_test:settings", namespace="CELERY")
    assert (read.conf.broker_url, read.conf.worker_concurrency, read.conf.max_crashes) == ("redis://shop/1", 3, 2)
    read.config_from_object(module.settings, namespace="BULLTASK")
    assert read.conf.max_crashes == 5


def test_settings_are_read_from_a_dictionary_or_a_class() -> None:
    class Production:
        lock_duration = 60

        def method(self) -> None: ...

    read = app()
    read.config_from_object({"max_crashes": 4})
    read.config_from_object(Production)
    read.config_from_object(Production())
    assert (read.conf.max_crashes, read.conf.lock_duration) == (4, 60)


def test_an_unknown_name_raises_an_error_with_its_namespace_and_source(module: types.ModuleType) -> None:
    module.CELERY_BROKER_ULR = "redis://shop/1"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as caught:
        app().config_from_object(module.__name__, namespace="CELERY")
    assert str(caught.value) == (
        "celeryconfig_of_test: unknown setting 'CELERY_BROKER_ULR'; did you mean 'CELERY_BROKER_URL'?"
    )
    with pytest.raises(ConfigError, match="did you mean 'lock_duration'"):
        app().config_from_object({"lock_durration": 3})


@pytest.mark.parametrize(
    ("name", "current"),
    [
        ("CELERYD_CONCURRENCY", "CELERY_WORKER_CONCURRENCY"),
        ("CELERYBEAT_SCHEDULE", "CELERY_BEAT_SCHEDULE"),
        ("CELERY_ACKS_LATE", "CELERY_TASK_ACKS_LATE"),
        ("CELERY_SEND_EVENTS", "CELERY_WORKER_SEND_TASK_EVENTS"),
    ],
)
def test_an_old_name_is_rejected_in_a_namespace_too(name: str, current: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.* is an old Celery name. use {current}$"):
        app().config_from_object({name: 3}, namespace="CELERY")
    app().config_from_object({"CELERYD_OPTS": "", "CELERYD_CONCURRENCY": 3}, namespace="SHOP")


def test_an_invalid_value_is_named_as_it_was_written(module: types.ModuleType) -> None:
    module.CELERY_WORKER_CONCURRENCY = "many"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^celeryconfig_of_test: CELERY_WORKER_CONCURRENCY must be an integer"):
        app().config_from_object(module.__name__, namespace="CELERY")


def test_result_expires_of_0_is_rejected_because_celery_keeps_such_results() -> None:
    with pytest.raises(ConfigError, match="CELERY_RESULT_EXPIRES is 0: Celery then keeps results forever"):
        app().config_from_object({"CELERY_RESULT_EXPIRES": 0}, namespace="CELERY")
    app().config_from_object({"CELERY_RESULT_EXPIRES": None}, namespace="CELERY")


def test_a_missing_module_or_attribute_raises_an_error_unless_it_may_be_missing(module: types.ModuleType) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        app().config_from_object("no_such_module")
    app().config_from_object("no_such_module", silent=True)
    with pytest.raises(ConfigError, match="refers to 'settings', which module celeryconfig_of_test does not have"):
        app().config_from_object("celeryconfig_of_test:settings")


def test_settings_are_read_from_the_module_in_an_environment_variable(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.max_crashes = 7  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="SHOP_CONFIG is not set"):
        app().config_from_envvar("SHOP_CONFIG")
    app().config_from_envvar("SHOP_CONFIG", silent=True)
    monkeypatch.setenv("SHOP_CONFIG", module.__name__)
    read = app()
    read.config_from_envvar("SHOP_CONFIG")
    assert read.conf.max_crashes == 7


# --- Celery's constructor ---------------------------------------------------------------------------------------------


def test_the_constructor_accepts_celerys_arguments() -> None:
    made = App(
        "shop",
        broker="redis://:secret@shop/1",
        backend="redis://shop/2",
        include=["shop.tasks"],
        changes={"timezone": "Europe/Berlin"},
        config_source={"CELERY_MAX_CRASHES": 4},
        namespace="CELERY",
        set_as_current=False,
    )
    assert (made.name, made.conf.broker_url, made.conf.include) == ("shop", "redis://:secret@shop/1", ["shop.tasks"])
    assert (made.conf["timezone"], made.conf["max_crashes"]) == ("Europe/Berlin", 4)
    assert App(broker=None).name == "app"


def test_a_celery_argument_without_a_meaning_is_rejected_with_the_reason() -> None:
    with pytest.raises(TypeError, match="App has no argument 'strict_typing', unlike Celery: arguments are always"):
        App("shop", strict_typing=False)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="App got broker_url twice"):
        App("shop", "redis://a", broker="redis://b")
    with pytest.raises(ConfigError, match="unknown setting 'brokr'"):
        App("shop", brokr="redis://a")  # type: ignore[call-arg]


def test_settings_can_be_read_and_set_like_a_dictionary() -> None:
    settings = conf()
    settings["max_crashes"] = 3
    assert settings["max_crashes"] == settings.max_crashes == 3
    assert "max_crashes" in settings
    assert "broker_password" not in settings
    assert set(settings) == set(SETTINGS)
    with pytest.raises(KeyError, match="Celery's setting broker_password"):
        settings["broker_password"]
