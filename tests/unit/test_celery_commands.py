"""What Celery's users type is answered with bulltask's command, and typing errors with the right name."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main


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
