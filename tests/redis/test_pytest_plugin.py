"""The pytest plugin, tested with suites that pytest runs in another process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from tests.support.machine_load import scale_to_load

pytestmark = pytest.mark.redis

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples/testing"

# As if the plugin was found through its entry point, even if bulltask was installed before it had one.
PLUGIN = ("-p", "no:bulltask", "-p", "bulltask.testing.plugin")


def run_pytest(directory: Path, *options: str) -> str:
    """Run pytest and return its output; without plugins that a user might not have."""
    words = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "-W", "error", *options]
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(words, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def suite(directory: Path, tests: str, **files: str) -> Path:
    """Write a suite of tests."""
    for name, text in {"test_it": tests, **files}.items():
        (directory / f"{name}.py").write_text(textwrap.dedent(text))
    (directory / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    return directory


def test_the_package_declares_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"bulltask": "bulltask.testing.plugin"}


@pytest.mark.slow
def test_the_example_suite_of_more_than_50_tests_takes_less_than_5_seconds() -> None:
    limit = scale_to_load(5)
    output = run_pytest(EXAMPLE, "-q")
    found = re.search(r"(\d+) passed in ([\d.]+)s", output)
    assert found is not None, output
    assert "failed" not in output
    assert int(found[1]) >= 50
    assert float(found[2]) < limit


@pytest.mark.slow
def test_the_fixtures_work_in_a_suite_without_settings(tmp_path: Path) -> None:
    output = run_pytest(
        suite(
            tmp_path,
            """
            import sys
            import time
            import pytest

            def test_pytest_has_not_imported_the_modules_of_bulltask():
                names = [name for name in sys.modules if name.startswith("bulltask")]
                assert sorted(names) == ["bulltask", "bulltask.testing", "bulltask.testing.plugin"]

            @pytest.mark.parametrize("x", [1, 2])
            def test_the_app_has_the_tasks_of_the_test_and_shared_tasks(bulltask_app, bulltask_worker, x):
                from bulltask import shared_task

                @shared_task(name="double")
                def double(x):
                    return 2 * x

                @bulltask_app.task
                def add(x, y):
                    return x + y

                assert double.delay(x).get() == 2 * x
                assert add.delay(x, y=1).get() == x + 1

            @pytest.mark.parametrize("number", [1, 2])
            def test_each_test_has_an_empty_server_and_its_own_clock(
                bulltask_app, bulltask_clock, bulltask_server, assert_enqueued, number
            ):
                assert bulltask_app._config.broker_url.get_secret_value() == bulltask_server.url
                assert abs(bulltask_clock.now_ms() / 1000 - time.time()) < 5
                assert_enqueued("add", count=0)
                bulltask_app.send_task("add")
                bulltask_clock.advance(86_400)
                assert_enqueued("add", count=1)

            @pytest.mark.parametrize("url", ["embedded://", "redis://127.0.0.1:1"])
            def test_without_a_fixture_no_job_reaches_the_development_server(url):
                from bulltask import App, BrokerError

                app = App("shop", url, broker_publish_timeout=0.1)
                if url == "embedded://":
                    with pytest.raises(TimeoutError, match="this test has no worker"):
                        app.send_task("add").get()
                else:
                    with pytest.raises(BrokerError):  # it may be a server for tests
                        app.send_task("add")
            """,
        )
    )
    assert "7 passed" in output, output


@pytest.mark.slow
def test_the_setting_names_the_app_and_markers_change_its_settings(tmp_path: Path) -> None:
    directory = suite(
        tmp_path,
        """
        import pytest
        from shop import app, add

        pytestmark = pytest.mark.bulltask(max_payload=500, task_default_queue="module")

        @pytest.mark.bulltask(max_payload=300)
        def test_markers(bulltask_app, assert_enqueued):
            assert bulltask_app is app
            assert (app._config.max_payload, app._config.default_queue) == (300, "module")
            add.delay(1, 2)
            assert_enqueued(add, (1, 2), queue="module")

        def test_own_settings_and_no_job_for_the_apps_own_server():
            result = add.delay(1, 2)
            with pytest.raises(TimeoutError, match="this test has no worker"):
                result.get()
            assert (app._config.max_payload, app._config.default_queue) == (10_000_000, "default")

        def test_failure(bulltask_app, assert_enqueued):
            add.delay(1, 2)
            assert_enqueued(add, (3, 4))
        """,
        shop="""
        from bulltask import App

        app = App("shop", "redis://redis.invalid:1")

        @app.task
        def add(x, y):
            return x + y
        """,
    )
    output = run_pytest(directory, "-o", "bulltask_app=shop", "--strict-markers")
    assert "1 failed, 2 passed" in output, output
    # The failure shows the line of the test and what is enqueued, but no code of bulltask.
    assert ">       assert_enqueued(add, (3, 4))" in output
    assert re.search(r'^E +shop.add {"x":1,"y":2} in queue module$', output, re.MULTILINE), output
    assert "__tracebackhide__" not in output
