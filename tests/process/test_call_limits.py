"""The supervisor's calls to a Redis that does not reply end when the worker must stop."""

from __future__ import annotations

import signal

import pytest

from tests.support.programs import run_program

pytestmark = pytest.mark.process

PROGRAM = """
import signal, socket, sys
from bulltask.clock import mono_ms
from bulltask.errors import BrokerUnavailableError
from bulltask.transport.call import command
from bulltask.transport.client import Client
from bulltask.transport.endpoint import Endpoint
from bulltask.worker.supervisor.call_limits import CallLimits

silent = socket.create_server(("127.0.0.1", 0))  # connects, and never replies
limits = CallLimits()
client = limits.client(Client(Endpoint(f"redis://127.0.0.1:{silent.getsockname()[1]}", 60_000, 60_000), None))

def call():
    started_ms = mono_ms()
    try:
        client.run(command("PING"))
    except BrokerUnavailableError:
        print(mono_ms() - started_ms, flush=True)

if sys.argv[1] == "signal":
    signal.signal(signal.SIGTERM, lambda *_: limits.end_calls_in(100))
    print("waiting", flush=True)
else:
    limits.end_calls_without_reply_in(100)
call()
call()
if sys.argv[1] == "silence":
    assert limits.has_given_up
"""


@pytest.mark.parametrize("limit", ["signal", "silence"])
def test_the_current_call_and_the_next_ones_end(limit: str) -> None:
    with run_program(PROGRAM, limit) as program:
        if limit == "signal":
            assert program.read_line() == "waiting"
            program.process.send_signal(signal.SIGTERM)
        assert int(program.read_line()) < 30_000
        assert int(program.read_line()) < 50
        assert program.process.wait(60) == 0
