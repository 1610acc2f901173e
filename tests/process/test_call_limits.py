"""The supervisor's calls to a Redis that does not reply end when the worker must stop."""

from __future__ import annotations

import signal

import pytest

from tests.support.machine_load import scale_to_load
from tests.support.programs import run_program

pytestmark = pytest.mark.process

PROGRAM = """
import signal, socket, sys
from bulltask.jobs.clock import mono_ms
from bulltask.errors import BrokerUnavailableError
from bulltask.transport.call import command
from bulltask.transport.client import Client
from bulltask.transport.endpoint import Endpoint
from bulltask.worker.slots import ControlPage
from bulltask.worker.supervisor import CallLimits
from bulltask.worker.supervisor import PrimaryCheck

limit, waits_for = sys.argv[1:]
silent = [socket.create_server(("127.0.0.1", 0)) for _ in range(10)]  # connect, and never reply
hosts = [f"127.0.0.1:{server.getsockname()[1]}" for server in silent]
url = f"redis://{hosts[0]}" if waits_for == "redis" else f"redis+sentinel://{','.join(hosts)}/main"
endpoint = Endpoint(url, 60_000, 60_000)
limits = CallLimits(endpoint.primary)
client = limits.client(Client(endpoint, None))
if waits_for == "primary_check":
    check = PrimaryCheck(endpoint, endpoint.primary, ControlPage(memoryview(bytearray(4096)), None), limits)

def call():
    started_ms = mono_ms()
    try:
        check.tick(0, 0) if waits_for == "primary_check" else client.run(command("PING"))
    except BrokerUnavailableError:
        pass
    print(mono_ms() - started_ms, flush=True)

if limit == "signal":
    signal.signal(signal.SIGTERM, lambda *_: limits.end_calls_in(100))
    print("waiting", flush=True)
else:
    limits.end_calls_without_reply_in(100)
call()
call()
if limit == "silence" and waits_for != "primary_check":
    assert limits.has_given_up
"""


@pytest.mark.parametrize("waits_for", ["redis", "sentinels", "primary_check"])
@pytest.mark.parametrize("limit", ["signal", "silence"])
def test_the_current_call_and_the_next_ones_end(limit: str, waits_for: str) -> None:
    with run_program(PROGRAM, limit, waits_for) as program:
        if limit == "signal":
            assert program.read_line() == "waiting"
            program.process.send_signal(signal.SIGTERM)
        assert int(program.read_line()) < scale_to_load(250)  # without a limit, at least 5 s
        assert int(program.read_line()) < scale_to_load(250)
        assert program.process.wait(60) == 0
