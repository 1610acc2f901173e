"""Invalid options and arguments raise an error before anything is sent or started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulltask import App
from bulltask.cli.main import main
from bulltask.errors import InvalidNameError
from bulltask.worker.run import run_worker

pytestmark = pytest.mark.redis


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The import path of an app, whose module is unloaded after the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "shop.py").write_text("from bulltask import App\napp = App('shop', 'redis://127.0.0.1:1/0')\n")
    monkeypatch.chdir(tmp_path)
    yield "shop:app"
    sys.modules.pop("shop", None)


@pytest.mark.parametrize("args", [["-b", "", "revoke"], ["revoke", "-b", ""], ["worker", "-b", ""]])
def test_an_empty_broker_option_is_an_error(shop: str, args: list[str]) -> None:
    done = CliRunner().invoke(main, [*args, "-A", shop, *(["some-id"] if "revoke" in args else [])])
    assert done.exit_code == 1
    assert "broker_url must start with redis://, rediss://, redis+cluster://" in done.output


@pytest.mark.parametrize("flag", ["-Q", "-X"])
@pytest.mark.parametrize("name", ["a:b", "{}", "x" * 256])
def test_a_worker_rejects_the_queue_names_that_app_queue_rejects(shop: str, flag: str, name: str) -> None:
    app = App("shop", "redis://127.0.0.1:1/0")
    with pytest.raises(InvalidNameError) as caught:
        app.queue(name)
    done = CliRunner().invoke(main, ["worker", "-A", shop, flag, f"mail,{name}"])
    assert done.exit_code == 1
    assert str(caught.value) in done.output
    with pytest.raises(InvalidNameError):
        run_worker(app, ["mail", name])
    with pytest.raises(InvalidNameError):
        app.result("1", queue=name).get(timeout=1)
    app.close()
