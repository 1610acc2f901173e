"""``@app.task(spark=True)`` and its settings are checked without Spark."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from bulltask import App, ConfigError, PermanentError
from bulltask.worker import spark_tasks
from bulltask.worker.spark_tasks import SparkTaskRunner, missing_dependencies


@pytest.fixture
def app() -> App:
    return App("tested")


def test_a_task_with_spark_is_called_and_sent_like_any_other(app: App) -> None:
    @app.task(spark=True, queue="reports")
    def count(table: str) -> int:
        return len(table)

    assert count._options.spark
    assert count("abc") == 3
    assert "spark" not in str(count.s("abc").job().opts(0))


def test_an_async_task_with_spark_is_rejected_with_an_explanation(app: App) -> None:
    async def count() -> int:
        return 1

    with pytest.raises(ConfigError, match=r"'.*count' is an async def and cannot have spark=True, .* a plain function"):
        app.task(spark=True)(count)
    assert len(app.tasks) == 0


def test_settings_given_as_the_spark_option_are_rejected_with_advice(app: App) -> None:
    with pytest.raises(ConfigError, match=r"spark must be True or False.*spark_conf"):
        app.task(spark={"spark.executor.memory": "2g"})  # type: ignore[call-overload]


@pytest.mark.parametrize("as_text", [False, True])
def test_spark_conf_is_a_dictionary_or_json_and_becomes_strings(as_text: bool) -> None:
    conf = {"spark.executor.memory": "2g", "spark.ui.port": 4050, "spark.ui.enabled": True}
    app = App("tested", spark_conf=json.dumps(conf) if as_text else conf, spark_master="spark://one:7077")
    assert app._config.spark_conf == {
        "spark.executor.memory": "2g",
        "spark.ui.port": "4050",
        "spark.ui.enabled": "true",
    }
    assert app._config.spark_master == "spark://one:7077"


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("spark.password=secret", "must be a dictionary or a JSON object as a string, not str"),
        (["secret"], "must be a dictionary or a JSON object as a string, not list"),
        ({"executor.memory": "secret"}, r"begin with 'spark\.', not 'executor.memory'"),
        ({"spark.jars": ["secret"]}, "spark.jars in spark_conf must be a string, a number, true or false, not list"),
    ],
)
def test_an_invalid_spark_conf_is_rejected_without_showing_its_values(conf: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        App("tested", spark_conf=conf)
    assert "secret" not in str(caught.value)


def test_spark_conf_is_masked_in_the_repr_of_settings() -> None:
    assert "secret" not in repr(App("tested", spark_conf={"spark.hadoop.fs.s3a.secret.key": "secret"}).conf)


@pytest.mark.parametrize("module", ["pyspark", "py4j", "pyarrow"])
def test_a_missing_extra_is_reported_with_the_install_command(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert (
        missing_dependencies()
        == f"{module} is not installed in the worker's environment: pip install 'bulltask[spark]'"
    )


def test_spark_connect_cannot_run_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_REMOTE", "sc://localhost")
    assert missing_dependencies().startswith("SPARK_REMOTE is set, but tasks cannot use Spark Connect")


def test_a_worker_with_only_the_spark_connect_client_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", ModuleType("pyspark"))
    unused: Any = None
    SparkTaskRunner(App("tested"), unused, unused, unused).close()


def test_java_is_found_by_java_home_and_path_as_in_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Java was not found: install a JRE, 17 or newer, or set JAVA_HOME" in missing_dependencies()
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert missing_dependencies() == ""
    monkeypatch.setenv("JAVA_HOME", str(java))
    assert missing_dependencies() == f"JAVA_HOME={java} has no bin/java: set it to a JRE, 17 or newer"


NO_JOB: Any = SimpleNamespace(id="7", name="count")


@pytest.mark.parametrize("has_context_class", [False, True])
def test_spark_starts_unless_the_import_of_the_app_created_a_session(
    app: App, monkeypatch: pytest.MonkeyPatch, has_context_class: bool
) -> None:
    def error(active: object) -> str:
        thin = SimpleNamespace()  # Spark Connect's client has no SparkContext
        full = SimpleNamespace(SparkContext=SimpleNamespace(_active_spark_context=active))
        monkeypatch.setitem(sys.modules, "pyspark", cast(ModuleType, full if has_context_class else thin))
        runner = SparkTaskRunner(app, lambda _: cast(Any, None), lambda _job, _token: True, lambda: None)
        monkeypatch.setattr(spark_tasks, "_SPARK_MODULE", "no.such.module")
        monkeypatch.setattr(spark_tasks, "missing_dependencies", lambda: "")
        with pytest.raises((PermanentError, ModuleNotFoundError)) as raised:
            runner.wrap(NO_JOB, "token", len, None)("abc")
        return str(raised.value)

    assert "No module named" in error(None)
    assert ("was created while the app was being imported" in error(object())) == has_context_class


@pytest.mark.parametrize(("context", "has_reported"), [(None, False), (False, False), (True, True)])
def test_spark_reports_progress_only_until_the_task_itself_does(
    app: App, monkeypatch: pytest.MonkeyPatch, context: bool | None, has_reported: bool
) -> None:
    runner = SparkTaskRunner(app, lambda _: cast(Any, None), lambda _job, _token: True, lambda: None)
    attempts: list[Any] = []

    def run(attempt: Any) -> AbstractContextManager[None]:
        attempts.append(attempt)
        return nullcontext()

    monkeypatch.setattr(runner, "_spark_child", lambda _: SimpleNamespace(run=run))
    reporter: Any = None if context is None else SimpleNamespace(_has_reported=context)
    assert runner.wrap(NO_JOB, "token", len, reporter)("abc") == 3
    assert attempts[0].has_reported() is has_reported
