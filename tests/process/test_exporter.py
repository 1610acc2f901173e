"""Metrics of several processes, scraped over HTTP from the forked exporter."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bulltask.errors import ConfigError
from bulltask.observe.metrics import bind
from tests.support.processes import wait_for_exit
from tests.support.programs import Program, run_program

pytestmark = pytest.mark.process

# A small supervisor that executes one command per input line and replies with one line of JSON.
SUPERVISOR = """
import json, os, signal, sys
from bulltask import events
from bulltask.events import Bus
from bulltask.observe.counters import MetricsListener, MetricsMemory
from bulltask.observe.metrics import bind, run_exporter
from bulltask.observe.metrics import MetricsCollector
from bulltask.worker.slots import ChildLimit
from bulltask.config.process import die_with_parent
from bulltask.transport.scripts.queue import QueueFigures

QUEUES = ("mail", "sms")
memory = MetricsMemory(QUEUES, 4, ChildLimit)
parent = os.getpid()
children = {}

def lengths():
    with open(sys.argv[1]) as file:  # stands for Redis and can be removed
        return {queue: QueueFigures(**jobs) for queue, jobs in json.load(file).items()}

def exporter():
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    if pid := os.fork():
        listener.close()
        return {"pid": pid, "port": port}
    run_exporter(listener, MetricsCollector(memory, "node-1-1-abc", lengths), parent)

def child(index, jobs):
    ready, notify = os.pipe()
    if pid := os.fork():
        children[index] = pid
        os.close(notify)
        assert os.read(ready, 1) == b"!"
        os.close(ready)
        return {"pid": pid}
    die_with_parent(signal.SIGKILL, parent)
    bus = Bus()
    block = memory.block(index + 1)
    MetricsListener(block, QUEUES).attach(bus)
    for number in range(jobs):
        block.ended(None, "mail", "t", "completed", 20.0)
    block.ended(None, "sms", "t", "permanent", 1.0)
    if jobs == 0:
        bus.emit(events.RedisDisconnected("refused"))
    os.write(notify, b"!")
    signal.pause()

def kill(index):
    os.kill(children[index], signal.SIGKILL)
    return {"status": os.waitpid(children.pop(index), 0)[1]}

def handle_signals():  # like the real supervisor: handlers, a wakeup pipe and blocked signals, which a fork inherits
    reader, writer = os.pipe2(os.O_NONBLOCK)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return {}

def stop_exporter(pid):
    os.kill(pid, signal.SIGTERM)
    return {"status": os.waitpid(pid, 0)[1]}

MetricsListener(memory.block(0), QUEUES).attach(Bus())
for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(globals()[name](*arguments)), flush=True)
"""


LABELS = ("queue", "status", "state", "worker_id", "le")


class Supervisor:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.port = 0

    def do(self, *command: object) -> dict[str, Any]:
        self.program.write_line(json.dumps(command))
        answer: dict[str, Any] = json.loads(self.program.read_line())
        self.port = answer.get("port", self.port)
        return answer

    def scrape(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            text = response.read().decode()
        return {
            " ".join([sample.name, *(sample.labels[name] for name in LABELS if name in sample.labels)]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
def supervisor(tmp_path) -> Iterator[Supervisor]:
    (tmp_path / "lengths.json").write_text('{"mail": {"wait": 3, "paused": 0}, "sms": {"wait": 4}}')
    with run_program(SUPERVISOR, str(tmp_path / "lengths.json")) as program:
        yield Supervisor(program)


def test_a_scrape_sums_the_counters_of_running_and_dead_children(supervisor: Supervisor) -> None:
    supervisor.do("exporter")
    for index, jobs in enumerate((100, 20, 3)):
        supervisor.do("child", index, jobs)
    before = supervisor.scrape()
    supervisor.do("kill", 1)
    without = supervisor.scrape()
    supervisor.do("child", 1, 1000)  # its replacement
    after = supervisor.scrape()

    completed = [samples["bullmq_jobs_processed_total mail completed"] for samples in (before, without, after)]
    assert completed == [123, 123, 1123]
    workers = [samples["bullmq_active_workers mail node-1-1-abc"] for samples in (before, without, after)]
    assert workers == [3, 2, 3]
    assert after["bullmq_jobs_processed_total sms failed"] == 4
    assert after["bullmq_job_duration_seconds_bucket mail 0.01"] == 0
    assert after["bullmq_job_duration_seconds_bucket mail 0.025"] == 1123
    assert after["bullmq_job_duration_seconds_count mail"] == 1123
    assert after["bullmq_job_duration_seconds_sum mail"] == pytest.approx(1123 * 0.02)
    assert after["bullmq_queue_length mail wait"] == 3
    assert after["bullmq_queue_length sms wait"] == 4


def test_a_scrape_works_without_redis_and_reports_it_as_disconnected(supervisor: Supervisor, tmp_path) -> None:
    supervisor.do("exporter")
    supervisor.do("child", 0, 5)
    (tmp_path / "lengths.json").unlink()
    samples = supervisor.scrape()
    assert samples["bullmq_jobs_processed_total mail completed"] == 5
    assert samples["bullmq_redis_connection_status connected"] == 0
    assert samples["bullmq_redis_connection_status disconnected"] == 1


def test_the_lost_connection_of_a_dead_child_is_not_reported(supervisor: Supervisor) -> None:
    supervisor.do("exporter")
    supervisor.do("child", 0, 0)  # with a lost connection
    assert supervisor.scrape()["bullmq_redis_connection_status connected"] == 0
    supervisor.do("kill", 0)
    assert supervisor.scrape()["bullmq_redis_connection_status connected"] == 1


def test_the_exporter_exits_on_sigterm_even_though_the_supervisor_handles_it(supervisor: Supervisor) -> None:
    supervisor.do("handle_signals")
    pid = supervisor.do("exporter")["pid"]
    supervisor.scrape()
    assert supervisor.do("stop_exporter", pid) == {"status": 0}


def test_the_exporter_ignores_signals_for_the_supervisor(supervisor: Supervisor) -> None:
    pid = supervisor.do("exporter")["pid"]
    supervisor.scrape()  # the exporter has set up its signals
    for number in ("INT", "QUIT", "HUP", "TSTP", "TTIN", "TTOU", "USR1", "USR2"):
        os.kill(pid, signal.Signals[f"SIG{number}"])
    assert supervisor.scrape()["bullmq_queue_length mail wait"] == 3


def test_the_exporter_dies_with_its_supervisor(supervisor: Supervisor) -> None:
    pid = supervisor.do("exporter")["pid"]
    supervisor.scrape()
    supervisor.program.send(signal.SIGKILL)
    wait_for_exit(pid)
    with bind("127.0.0.1", supervisor.port) as again:  # and the port is free
        assert again.getsockname()[1] == supervisor.port


def test_a_silent_client_does_not_block_a_scrape(supervisor: Supervisor) -> None:
    supervisor.do("exporter")
    with socket.create_connection(("127.0.0.1", supervisor.port)) as silent:
        silent.send(b"GET /metr")
        assert supervisor.scrape()["bullmq_queue_length mail wait"] == 3


@pytest.mark.parametrize(("path", "status"), [("/metrics", 200), ("/secrets", 404)])
def test_a_head_request_gets_the_response_of_get_without_its_body(
    supervisor: Supervisor, path: str, status: int
) -> None:
    supervisor.do("exporter")
    connection = http.client.HTTPConnection("127.0.0.1", supervisor.port, timeout=10)
    answers = []
    for method in ("GET", "HEAD"):
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
        answers.append((answer.status, answer.headers["Content-Type"], answer.headers["Content-Length"], len(body)))
        connection.close()
    assert answers[0][0] == status
    assert answers[1] == (*answers[0][:3], 0)


def test_paths_other_than_metrics_return_404(supervisor: Supervisor) -> None:
    supervisor.do("exporter")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{supervisor.port}/secrets", timeout=10)
    with caught.value:
        assert caught.value.code == 404


def test_a_metrics_port_in_use_is_rejected_before_the_fork() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use\. Choose another metrics port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70_000), ("192.0.2.1", 0), ("no such host", 0)])
def test_a_metrics_address_that_is_not_local_is_rejected(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="metrics cannot be served on"):
        bind(host, port)


def test_metrics_can_be_served_on_ipv6() -> None:
    with bind("::1", 0) as listener:
        assert listener.family == socket.AF_INET6


ORPHAN = """
import os, signal, sys
from bulltask.config.process import die_with_parent

middle = os.getpid()
ready, notify = os.pipe()
gone, leave = os.pipe()
child = os.fork()
if child:
    os.read(ready, 1)
    print(child, flush=True)
    os._exit(0)
os.close(leave)
if sys.argv[1] == "late":  # the parent dies before die_with_parent() is called
    os.write(notify, b"!")
    os.read(gone, 1)
    die_with_parent(signal.SIGKILL, middle)
else:
    assert die_with_parent(signal.SIGKILL, middle)
    os.write(notify, b"!")
signal.pause()
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_die_with_parent_kills_the_process_even_if_its_parent_is_already_dead(when: str) -> None:
    with run_program(ORPHAN, when) as program:
        pid = int(program.read_line())
        assert program.process.wait(60) == 0
        wait_for_exit(pid)


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 403), ("evil.example:80", 403), ("localhost:1", 200), ("LOCALHOST", 200)]
)
def test_a_web_page_that_renames_this_machine_cannot_read_the_metrics(
    supervisor: Supervisor, host: str, status: int
) -> None:
    supervisor.do("exporter")
    connection = http.client.HTTPConnection("127.0.0.1", supervisor.port, timeout=10)
    connection.request("GET", "/metrics", headers={"Host": host})
    assert connection.getresponse().status == status
    connection.close()
