"""What Celery's users type is answered with bulltask's command, and typing errors with the right name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main
from bulltask.cli.options import ExitCode
from bulltask.queue.control import Answers
from bulltask.queue.sync.control import Control


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("beat", "no beat process; 'bulltask schedule list' shows them"),
        ("-A shop beat -l info", "no beat process"),
        ("purge -f -Q mail", "use 'bulltask queue drain QUEUE'"),
        ("status", "use 'bulltask workers'"),
        ("multi start 3", "'bulltask worker -c N' has N child processes"),
        ("list bindings", "'bulltask queues' lists the queues"),
        ("graph workers", "'bulltask job tree ID'"),
        ("amqp repl", "'bulltask queues'"),
        ("flower --port=5555", "'bulltask workers'"),
        ("migrate redis://a redis://b", "'bulltask migrate-bull'"),
        ("upgrade settings x.py", "nothing needs to be converted"),
        ("logtool stats", "log lines are JSON"),
        ("worker -B", "no beat process"),
        ("worker -E", "events are always on"),
        ("worker --task-events", "events are always on"),
        ("worker -Ofair", "only one scheduling strategy"),
        ("worker -s /tmp/x", "schedules are in Redis"),
        ("worker --logfile x.log", "log lines are written to stderr"),
        ("worker -D", "systemd"),
        ("worker --pidfile=/run/x", "systemd"),
        ("worker --without-gossip", "workers do not talk to each other"),
        ("worker --prefetch-multiplier 1", "worker_prefetch"),
        ("worker --statedb x", "revocations are stored in Redis"),
        ("worker --purge", "'bulltask queue drain QUEUE'"),
        ("--result-backend redis://x worker", "results are stored in the Redis server of -b"),
        ("inspect scheduled", "'bulltask jobs QUEUE --state delayed'"),
        ("inspect revoked", "'bulltask job show'"),
        ("inspect query_task 1", "'bulltask job show'"),
        ("inspect memdump", "kill -USR1"),
        ("inspect objgraph", "kill -USR1"),
        ("inspect clock", "no logical clock"),
        ("inspect report", "'bulltask report'"),
        ("inspect activ", "did you mean 'active'"),
        ("control revoke 1", "'bulltask revoke'"),
        ("control terminate KILL 1", "'bulltask revoke'"),
        ("control enable_events", "events are always on"),
        ("control disable_events", "events are always on"),
        ("control election", "need no leader"),
        ("control heartbeat", "'bulltask workers'"),
        ("control rate_limit add", "Missing argument 'RATE'"),
        ("control pool_grow many", "'many' is not a valid integer"),
        ("events --dump", "'bulltask events' prints them"),
        ("events --camera x", "'bulltask pipeline' records events"),
        ("wroker", "did you mean 'worker'"),
        ("revok 1", "did you mean 'revoke'?"),
        ("pipeline rnu", "did you mean 'run'?"),
        ("job shwo 1", "did you mean 'show'?"),
        ("outbox nothing-like-it", "use relay"),
        ("revoke 1 --terminat", "'--terminate'?"),
    ],
)
def test_a_command_that_does_not_exist_is_answered_with_the_right_one(typed: str, answer: str) -> None:
    result = CliRunner().invoke(main, typed.split())
    assert result.exit_code == 2
    assert answer in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "typed",
    [
        "control add_consumer mail -d web1@host",
        "control autoscale 10 3",
        "control cancel_consumer mail",
        "control pool_grow 2 --timeout 1 --destination a,b",
        "control pool_restart",
        "control pool_shrink",
        "control rate_limit add 10/m",
        "control shutdown",
        "control time_limit add 1 2 --json",
        "inspect active",
        "inspect active_queues",
        "inspect conf",
        "inspect ping -d a -t 1",
        "inspect registered",
        "inspect registered_tasks",
        "inspect reserved",
        "inspect stats",
    ],
)
def test_celerys_orders_and_questions_are_accepted(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def order(_: object, name: str, *__: object, **___: object) -> Answers:
        given.append(name)
        return Answers()

    monkeypatch.setattr(Control, "order", order)
    result = CliRunner().invoke(main, ["-b", "redis://h", *typed.split()])
    assert result.exit_code == ExitCode.NO_ANSWER
    assert given == [typed.split()[1].removesuffix("_tasks")]
