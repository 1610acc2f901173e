from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask import App
from bulltask.config.config import SETTINGS, Config
from bulltask.config.process import usable_cores
from bulltask.config.settings import Settings
from bulltask.errors import ConfigError
from tools import generate_setting_types

DURATIONS = [name for name, declared in SETTINGS.items() if declared.field.endswith("_ms")]
COUNTS = [
    "broker_publish_retries",
    "max_payload",
    "max_events",
    "max_logs",
    "task_max_retries",
    "worker_concurrency",
    "worker_async_concurrency",
    "worker_max_tasks_per_child",
    "max_stalled_count",
    "max_crashes",
    "max_releases",
    "max_started_attempts",
    "metrics_max_data_points",
    "metrics_port",
]


def conf(**values: Any) -> Settings:
    return Settings(values, {})


def config(**values: Any) -> Config:
    return conf(**values).freeze()


LONG = "x" * 5_000
WRONG: list[Any] = [LONG, LONG.encode(), [LONG], [{"a": LONG}], {LONG: LONG}, {"a": LONG}, {"a": {LONG: 1}}, 10**600]
TEXTS = [LONG, f"redis://{LONG}", f"redis://h:{LONG}", f"redis://h/{LONG}", f"redis://h?{LONG}=1", f"a:{LONG}",
         "9" * 5_000, "ab," * 2_000, json.dumps({LONG: 1}), json.dumps([LONG])]  # fmt: skip


def test_no_error_repeats_a_long_value() -> None:
    wrong: dict[str, str] = {}
    for name in SETTINGS:
        variable = f"BULLTASK_{name.upper()}"
        for given_values in [*(({name: value}, {}) for value in WRONG), *(({}, {variable: text}) for text in TEXTS)]:
            try:
                Settings(*given_values).freeze()
            except ConfigError as exc:
                wrong[str(exc)] = name
    assert len(wrong) > 300
    assert {name for message, name in wrong.items() if len(message) > 600} == set()


def rejection(name: str, value: object) -> str:
    """Return the message with which a setting rejects a value, ``""`` if it accepts the value."""
    try:
        conf(**{name: value})
    except ConfigError as exc:
        return str(exc)
    return ""


def wrong_messages(names: Iterable[str], values: Sequence[object], pattern: str) -> list[tuple[str, object, str]]:
    """Return setting, value and message of each value that is not rejected with a message like ``pattern``."""
    messages = [(name, value, rejection(name, value)) for name in names for value in values]
    return [(name, value, text) for name, value, text in messages if not re.search(pattern.format(name), text)]


# --- the table --------------------------------------------------------------------------------------------------------


def test_settings_have_the_documented_defaults() -> None:
    assert dataclasses.asdict(config(worker_concurrency=2)) == {
        "broker_url": "redis://localhost:6379/0",
        "credentials": None,
        "prefix": "bull",
        "queue_hash_tag": True,
        "connect_timeout_ms": 5_000,
        "command_timeout_ms": 10_000,
        "publish_retries": 3,
        "publish_timeout_ms": 10_000,
        "publish_replicas": 0,
        "reconnect_delay_ms": 100,
        "reconnect_delay_max_ms": 3_000,
        "connection_retries": None,
        "max_payload": 10_000_000,
        "max_events": 10_000,
        "max_logs": 1_000,
        "default_queue": "default",
        "canvas_queue": None,
        "queues": (),
        "routes": None,
        "annotations": None,
        "max_retries": 2,
        "max_explicit_retries": None,
        "retry_backoff_ms": 1_000,
        "retry_backoff_max_ms": 3_600_000,
        "retry_jitter": 0.2,
        "backoff_strategies": (),
        "soft_time_limit_ms": None,
        "time_limit_ms": None,
        "default_rate": None,
        "typed": None,
        "convert_untyped": False,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ("json",),
        "result_accept_content": None,
        "task_compression": None,
        "result_compression": None,
        "compression_threshold": 4_096,
        "max_decompressed": 100_000_000,
        "max_decompressed_tokens": 5_000_000,
        "signing_keys": (),
        "encryption_keys": {},
        "always_eager": False,
        "eager_propagates": False,
        "errbacks_in_chord_headers": False,
        "sender": "",
        "incompatible_timeout_ms": 86_400_000,
        "imports": (),
        "include": (),
        "result_expires_ms": 86_400_000,
        "failure_expires_ms": None,
        "concurrency": 2,
        "start_method": "auto",
        "prefetch": 32,
        "async_concurrency": 100,
        "pool": "prefork",
        "autoscale": None,
        "autoscale_keepalive_ms": 30_000,
        "max_tasks_per_child": None,
        "max_memory_kib": None,
        "hard_memory_kib": None,
        "lock_ms": 30_000,
        "lock_renew_ms": None,
        "stalled_interval_ms": 30_000,
        "max_stalled_count": 1,
        "skip_stalled_check": False,
        "outbox_relay": True,
        "max_crashes": 2,
        "max_releases": 1_000,
        "max_started_attempts": None,
        "drain_delay_ms": 5_000,
        "run_retry_delay_ms": 3_000,
        "disable_rate_limits": False,
        "paused": False,
        "shutdown_timeout_ms": 30_000,
        "shutdown_notice_ms": 5_000,
        "worker_name": "",
        "limits": None,
        "keep_completed": None,
        "keep_failed": {"age": 604_800, "count": 100_000},
        "metrics_max_data_points": None,
        "metrics_port": None,
        "metrics_host": "127.0.0.1",
        "metrics_buckets": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
        "log_level": "info",
        "log_format": "auto",
        "redirect_stdouts": False,
        "redirect_stdouts_level": "warning",
        "timezone": "UTC",
        "spark_master": None,
        "spark_conf": None,
        "beat_schedule": None,
    }


def test_the_default_concurrency_is_one_child_per_usable_core() -> None:
    assert config().concurrency == usable_cores()
    assert config(worker_concurrency="auto").concurrency == usable_cores()
    assert config(worker_concurrency=None).concurrency == usable_cores()
    assert config(worker_concurrency="7").concurrency == 7


def test_the_default_lock_renew_time_is_half_the_lock_duration() -> None:
    assert config(lock_duration=20).renew_ms == 10_000
    assert config(lock_duration=20, lock_renew_time=3).renew_ms == 3_000


def test_every_setting_has_a_help_text_and_a_valid_default() -> None:
    assert [name for name, row in SETTINGS.items() if not row.doc] == []
    defaults = {name: row.default for name, row in SETTINGS.items()}
    assert {name: getattr(conf(**{name: default}), name) for name, default in defaults.items()} == defaults


def test_every_setting_rejects_invalid_values_with_its_name() -> None:
    assert wrong_messages(SETTINGS, [object(), "\x00", -1, [object()]], "{}") == []


# --- durations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [7, 7.0, "7", "7.0", timedelta(seconds=7)])
def test_a_duration_may_be_seconds_a_string_or_a_timedelta(value: object) -> None:
    others = {"broker_reconnect_delay_max": 60}
    stored = {name: getattr(config(**{**others, name: value}), SETTINGS[name].field) for name in DURATIONS}
    assert stored == dict.fromkeys(DURATIONS, 7_000)


def test_a_duration_must_be_finite_and_not_negative() -> None:
    invalid = [-1, "-1", float("nan"), "nan", float("inf"), True, timedelta(-1), "soon", 2**60]
    assert wrong_messages(DURATIONS, invalid, "^{} must be ") == []


@pytest.mark.parametrize(
    ("name", "value", "minimum"),
    [("lock_duration", 0.999, "1 s"), ("drain_delay", 0.05, r"0\.1 s"), ("stalled_interval", 0, "1 s")],
)
def test_a_duration_below_its_minimum_is_rejected(name: str, value: object, minimum: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least {minimum}, not {value}"):
        conf(**{name: value})


@pytest.mark.parametrize(
    "name", ["result_expires", "result_failure_expires", "lock_renew_time", "metrics_port", "metrics_max_data_points"]
)
@pytest.mark.parametrize("value", [None, "", "none", "None"])
def test_none_is_valid_for_optional_settings(name: str, value: object) -> None:
    assert getattr(config(**{name: value}), SETTINGS[name].field) is None


def test_lock_renew_time_must_be_shorter_than_lock_duration() -> None:
    with pytest.raises(
        ConfigError, match=r"lock_renew_time \(5000 ms\) must be shorter than lock_duration \(5000 ms\)"
    ):
        config(lock_duration=5, lock_renew_time=5)


@pytest.mark.parametrize("first", ["broker_reconnect_delay", "task_retry_backoff"])
def test_a_maximum_delay_must_not_be_shorter_than_the_first_delay(first: str) -> None:
    with pytest.raises(ConfigError, match=f"{first}_max must not be shorter than {first}"):
        config(**{first: 2, f"{first}_max": 1})


# --- other kinds of values --------------------------------------------------------------------------------------------


def test_a_count_must_be_an_integer_within_its_bounds() -> None:
    assert wrong_messages(COUNTS, ["5.5", 5.5, True, "many", -5], "^{} must be an integer (from|of) ") == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", True), ("TRUE", True), ("yes", True), ("on", True), ("0", False), ("false", False), (False, False)],
)
def test_a_flag_may_be_a_boolean_or_a_common_word(value: object, expected: bool) -> None:
    assert config(queue_hash_tag=value).queue_hash_tag is expected


@pytest.mark.parametrize(
    ("value", "jitter"), [(True, 0.2), (False, 0.0), (0, 0.0), (0.5, 0.5), ("0.3", 0.3), ("true", 0.2), ("False", 0.0)]
)
def test_jitter_may_be_a_flag_or_a_fraction(value: object, jitter: float) -> None:
    assert config(task_retry_jitter=value).retry_jitter == jitter


@pytest.mark.parametrize("value", [1.1, -0.1, "half", None, float("nan")])
def test_jitter_must_be_between_0_and_1(value: object) -> None:
    with pytest.raises(ConfigError, match="task_retry_jitter must be true, false or a number from 0 to 1"):
        conf(task_retry_jitter=value)


@pytest.mark.parametrize("value", ["shop.tasks, mail", ["shop.tasks", "mail"], ("shop.tasks", "mail")])
def test_names_may_be_a_list_or_a_comma_separated_string(value: object) -> None:
    assert config(include=value).include == ("shop.tasks", "mail")


def test_an_empty_string_contains_no_names() -> None:
    assert config(include="").include == ()
    assert config(include="shop.tasks,,").include == ("shop.tasks",)


def test_the_bounds_of_a_count_are_inclusive() -> None:
    assert config(max_crashes=1_000).max_crashes == 1_000
    with pytest.raises(ConfigError, match="max_crashes must be an integer from 1 to 1000, not 1001"):
        conf(max_crashes=1_001)
    assert config(max_payload=10**12).max_payload == 10**12


def test_a_misspelled_choice_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"loglevel must be one of debug, .*, not 'warn'; did you mean 'warning'\?"):
        conf(loglevel="warn")
    assert config(loglevel="WARNING").log_level == "warning"


def test_the_types_of_all_settings_are_up_to_date() -> None:
    assert generate_setting_types.FILE.read_text() == generate_setting_types.text(), generate_setting_types.__doc__


def test_a_shell_completes_the_settings_and_nothing_else() -> None:
    assert sorted(dir(App("shop").conf)) == sorted(["update", *SETTINGS])


def test_a_worker_name_must_be_a_valid_connection_name() -> None:
    assert config(worker_name="mail-1").worker_name == "mail-1"
    assert config(worker_name=None).worker_name == ""
    assert config(worker_name=255 * "x").worker_name == 255 * "x"
    with pytest.raises(ConfigError, match="worker_name must have at most 255 characters, not 256"):
        conf(worker_name=256 * "x")
    with pytest.raises(ConfigError, match=r"worker_name 'w.*rker' has characters that Python could not decode"):
        conf(worker_name="w\udcc3\udcb6rker")  # "wörker" in a C locale
    with pytest.raises(ConfigError, match="worker_name must not contain spaces"):
        conf(worker_name="mail 1")


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "rediss://:pw@h:1/2",
        "unix:///tmp/r.sock",
        "embedded://",
        "redis+cluster://h",
        "redis+cluster://me:pw@h:1,[::1]:2,h3/0",
        "rediss+cluster://h:1,h:2?ssl_ca_certs=a.pem",
        "redis+sentinel://h/mymaster",
        "redis+sentinel://:pw@h:1,h2/my-master.1?db=2&sentinel_username=me&sentinel_password=pw",
        "redis+sentinel://h/mymaster/2",
        "rediss+sentinel://h/mymaster?ssl_ca_certs=a.pem&sentinel_ssl=false",
    ],
)
def test_a_broker_url_may_have_one_of_these_forms(url: str) -> None:
    assert config(broker_url=url).broker_url == url


def test_a_broker_url_may_contain_tls_options() -> None:
    url = "rediss://h/0?ssl_ca_certs=a.pem&ssl_certfile=b.pem&ssl_keyfile=b.key&ssl_check_hostname=false"
    assert config(broker_url=url).broker_url == url


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis://h?ssl_ca_certs=a.pem", "must start with rediss:// to use the TLS option ssl_ca_certs"),
        ("rediss://h?ssl_ca_cert=a.pem", "unknown option ssl_ca_cert; did you mean 'ssl_ca_certs'"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs in broker_url must be one of required, optional, none"),
        ("rediss://h?ssl_check_hostname=off", "ssl_check_hostname in broker_url must be one of true, false"),
        ("rediss://h?ssl_keyfile=b.key", "has ssl_keyfile without ssl_certfile"),
        ("redis+cluster://h?ssl_ca_certs=a.pem", r"must start with rediss\+cluster:// to use .* ssl_ca_certs"),
        ("redis+sentinel://h/m?sentinel_ssl=true", r"must start with rediss\+sentinel:// to use .* sentinel_ssl"),
        ("rediss+sentinel://h/m?sentinel_ssl=maybe", "sentinel_ssl in broker_url must be one of true, false"),
        ("redis+sentinel://h/m?sentinel_pasword=pw", "unknown option sentinel_pasword; did you mean 'sentinel_pass"),
        ("redis+sentinel://h/m?sentinel_username=me", "has sentinel_username without sentinel_password"),
        ("redis+cluster://h?sentinel_password=pw", "unknown option sentinel_password"),
        ("rediss://h?ssl_cert_reqs=none&ssl_check_hostname=true", "nothing is checked, and ssl_check_hostname"),
        ("rediss+cluster://h?ssl_check_hostname=1&ssl_cert_reqs=none", "nothing is checked, and ssl_check_hostname"),
        ("rediss://h?ssl_cert_reqs=none&ssl_cert_reqs=required", "has the option ssl_cert_reqs twice"),
    ],
)
def test_a_tls_option_without_effect_is_rejected(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(broker_url=url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "redis://:pw@h/shop",
            r"the database in .* must be a number, as in redis://.*, not redis://\*\*\*@h/shop",
        ),
        ("redis://h/x", "must be a number, as in"),
        ("rediss://h/-1", "must be a number, as in"),
        ("redis://h/0/1", "must be a number, as in"),
        ("redis://h/ 1", "must be a number, as in"),
        ("redis://h/²", "must be a number, as in"),
        ("redis://h?db=shop", "must be a database number"),
        ("unix:///tmp/r.sock?db=shop", "must be a database number"),
        ("redis://h:port/0", "must have a host, and a port from 1 to 65535"),
        ("redis://h:99999/0", "must have a host, and a port from 1 to 65535"),
        ("redis://[::1/0", "must have a host, and a port from 1 to 65535"),
        ("", "must start with redis://.*, not empty"),
        ("redis+cluster://h:1,h:2/1", "must have no database: bulltask uses database 0 of a cluster"),
        ("redis+cluster://h?db=1", "must have no database: bulltask uses database 0 of a cluster"),
        ("redis+cluster://", r"must list hosts separated by commas, as in redis\+cluster://host1:6379,host2,"),
        ("redis+cluster://h:1,", "'' is not a host and a port from 1 to 65535"),
        ("redis+cluster://h:1,h:0", "'h:0' is not a host and a port from 1 to 65535"),
        ("redis+cluster://h:1;h:2", "'h:1;h:2' is not a host and a port"),
        ("redis+cluster://me:pw@h:1,me:pw@h:2", r"it has a second user .*write @ as %40"),
        ("redis+sentinel://h:port/m", r"as in redis\+sentinel://host1:26379,host2, .*'h:port' is not a host"),
        ("redis+sentinel://h:1,h2", r"name of the primary .*, as in redis\+sentinel://h:1/mymaster\?db=0, not"),
        ("redis+sentinel://h/", "must contain the name of the primary that the sentinels monitor"),
        ("redis+sentinel://h/m/shop", "must contain the name of the primary that the sentinels monitor"),
        ("redis+sentinel://h/m?db=shop", "must be a database number"),
        (
            "sentinel://h1:26379/0;sentinel://h2:26379/0",
            r"has Celery's form; write redis\+sentinel://h1:26379,h2:26379/MASTER\?db=0, where MASTER is the",
        ),
        (
            "sentinel://:p;w@h:1;sentinel://:p;w@h:2",
            r"write redis\+sentinel://user:password@host1:26379,host2:26379/MAS",
        ),
    ],
)
def test_a_broker_url_with_an_invalid_database_or_port_is_rejected(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        conf(broker_url=url)


@pytest.mark.parametrize("url", ["redis://h/0", "redis://h/15/", "redis://h:1/", "redis://[::1]:2/3", "redis://h?db=2"])
def test_a_broker_url_may_contain_a_database_number(url: str) -> None:
    assert config(broker_url=url).broker_url == url


@pytest.mark.parametrize(
    "settings", [{"task_default_queue": "a:b"}, {"limiter": {"a:b": "1/s"}}, {"limiter": "a:b=1/s"}]
)
def test_settings_reject_a_queue_name_with_a_colon(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"queue name 'a:b' contains a ':'"):
        conf(**settings)


def test_an_invalid_broker_url_is_shown_without_its_password() -> None:
    with pytest.raises(ConfigError) as caught:
        conf(broker_url="amqp://guest:secret@host//")
    assert "redis://" in str(caught.value)
    assert "host" in str(caught.value)
    assert "secret" not in str(caught.value)


# --- precedence -------------------------------------------------------------------------------------------------------


def test_the_command_line_overrides_the_environment_which_overrides_code() -> None:
    settings = Settings({"lock_duration": 50}, {"BULLTASK_LOCK_DURATION": "40"})
    assert settings.lock_duration == "40"
    settings.update(lock_duration=60)
    assert settings.lock_duration == "40"
    settings.override("lock_duration", 70)
    assert settings.freeze().lock_ms == 70_000


def test_settings_are_read_from_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULLTASK_MAX_CRASHES", "9")
    monkeypatch.setenv("BULLTASK_APP", "not a setting")
    assert Settings({}).freeze().max_crashes == 9


def test_an_invalid_value_in_the_environment_is_rejected_immediately() -> None:
    with pytest.raises(ConfigError, match=r"^max_crashes must be an integer from 1 to 1000, not 'two'"):
        Settings({}, {"BULLTASK_MAX_CRASHES": "two"})


def test_none_overrides_a_default() -> None:
    assert config(result_expires=None).result_expires_ms is None


# --- changing and freezing --------------------------------------------------------------------------------------------


def test_update_sets_several_settings() -> None:
    settings = conf()
    settings.update({"lock_duration": 5}, {"prefix": "b"}, max_crashes=3)
    assert (settings.lock_duration, settings.prefix, settings.max_crashes) == (5, "b", 3)


@pytest.mark.parametrize("name", ["lock_durration", "lockDuration", "worker_concurency"])
def test_an_unknown_setting_is_rejected_with_a_suggestion(name: str) -> None:
    settings = conf()
    message = r"unknown setting '\w+'; did you mean '(lock_duration|worker_concurrency)'\?"
    with pytest.raises(ConfigError, match=message):
        setattr(settings, name, 1)
    with pytest.raises(ConfigError, match=message):
        settings.update({name: 1})
    with pytest.raises(ConfigError, match=message):
        settings.override(name, 1)
    with pytest.raises(AttributeError, match=message):
        getattr(settings, name)


def test_an_unknown_setting_without_a_similar_name_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"^unknown setting 'zzz'$"):
        conf(zzz=1)


def test_a_rejected_value_changes_nothing() -> None:
    settings = conf(max_crashes=3)
    with pytest.raises(ConfigError):
        settings.max_crashes = 0
    assert settings.max_crashes == 3


def test_frozen_settings_cannot_be_changed() -> None:
    settings = conf(max_crashes=3)
    frozen = settings.freeze()
    with pytest.raises(
        ConfigError, match="cannot set max_crashes, because the app has already been used: set it before"
    ):
        settings.max_crashes = 4
    with pytest.raises(ConfigError, match="has already been used"):
        settings.override("max_crashes", 4)
    assert settings.freeze() is frozen
    assert frozen.max_crashes == 3


def test_settings_that_cannot_be_frozen_can_still_be_corrected() -> None:
    settings = conf(lock_duration=5, lock_renew_time=6)
    with pytest.raises(ConfigError):
        settings.freeze()
    settings.lock_renew_time = 2
    assert settings.freeze().renew_ms == 2_000


def test_dir_and_repr_show_settings_without_passwords() -> None:
    settings = conf(broker_url="redis://:secret@host/0", max_crashes=3)
    assert set(SETTINGS) <= set(dir(settings))
    assert "max_crashes" in repr(settings)
    assert "host" in repr(settings)
    assert "secret" not in repr(settings)


@given(st.floats(0, 2**40))
def test_any_number_of_seconds_is_rounded_to_milliseconds(seconds: float) -> None:
    assert config(shutdown_timeout=seconds).shutdown_timeout_ms == round(seconds * 1000)


@pytest.mark.parametrize(
    ("value", "kib"),
    [
        (400_000, 400_000),
        ("400000", 400_000),
        ("20480K", 20_480),
        ("512M", 512 * 1024),
        ("512 MiB", 512 * 1024),
        ("512mb", 512 * 1024),
        ("1.5G", 1536 * 1024),
        ("none", None),
    ],
)
def test_memory_is_in_kib_as_in_celery_or_has_a_unit(value: object, kib: int | None) -> None:
    assert config(worker_max_memory_per_child=value).max_memory_kib == kib


@pytest.mark.parametrize("value", [512, "512", "1M", 0])
def test_a_memory_limit_that_no_process_can_meet_is_rejected_with_the_unit(value: object) -> None:
    assert "write '512M' for 512 MiB" in rejection("worker_max_memory_per_child", value)


@pytest.mark.parametrize("value", ["much", "512T", "-1", True, "M"])
def test_an_invalid_size_of_memory_is_rejected(value: object) -> None:
    assert "must be a number of KiB or a size such as '512M'" in rejection("worker_hard_memory_limit", value)


def test_the_hard_memory_limit_must_not_be_less_than_the_other_one() -> None:
    with pytest.raises(ConfigError, match="worker_hard_memory_limit must not be less than"):
        config(worker_max_memory_per_child="512M", worker_hard_memory_limit="511M")
    assert config(worker_max_memory_per_child="512M", worker_hard_memory_limit="512M").hard_memory_kib == 524_288


@pytest.mark.parametrize(("value", "pool"), [("prefork", "prefork"), ("processes", "prefork"), ("Threads", "threads")])
def test_pools_have_celerys_names(value: str, pool: str) -> None:
    assert config(worker_pool=value).pool == pool


@pytest.mark.parametrize(
    ("value", "hint"), [("gevent", "async def"), ("solo", "-c 1"), ("fibres", "prefork or threads")]
)
def test_another_pool_of_celerys_is_rejected_with_a_replacement(value: str, hint: str) -> None:
    assert hint in rejection("worker_pool", value)


def test_a_threads_pool_has_one_child_with_as_many_threads_as_the_concurrency() -> None:
    threads, prefork = (config(worker_pool=pool, worker_concurrency=20) for pool in ("threads", "prefork"))
    assert (threads.children, threads.threads) == (1, 20)
    assert (prefork.children, prefork.threads) == (20, 0)
    with pytest.raises(ConfigError, match="worker_autoscale scales the number of child processes"):
        config(worker_pool="threads", worker_autoscale="10,3")
