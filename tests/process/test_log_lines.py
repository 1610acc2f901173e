"""Log lines of several processes in one pipe."""

from __future__ import annotations

import json
import signal
from collections import Counter

import pytest

from tests.support.programs import run_program

pytestmark = pytest.mark.process

# Every 7th line is longer than an atomic write to a pipe, every 50th longer than the pipe's buffer. The timeout is long
# for busy machines; in production a line is dropped earlier.
FOUR_WRITERS = """
import os, sys
from bulltask.observe.log import configure
from bulltask.observe.log import LineWriter

LineWriter.timeout_ms = 50_000
log = configure(level="info", worker_id="node-1-1-abc", stream=sys.stdout)
pids = []
for writer in range(4):
    if pid := os.fork():
        pids.append(pid)
        continue
    for number in range(1000):
        size = 100_000 if number % 50 == 0 else 9_000 if number % 7 == 0 else 10
        log.info("line", writer=writer, number=number, text=chr(97 + writer) * size)
    os._exit(0)
codes = [os.waitpid(pid, 0)[1] for pid in pids]
log.info("end", codes=codes)
"""


def test_long_lines_of_four_processes_are_not_interleaved() -> None:
    with run_program(FOUR_WRITERS) as program:
        lines = [json.loads(text) for text in program.read_rest().splitlines()]
    assert lines.pop()["codes"] == [0, 0, 0, 0]
    assert {line["worker_id"] for line in lines} == {"node-1-1-abc"}
    assert Counter(line["writer"] for line in lines) == {0: 1000, 1: 1000, 2: 1000, 3: 1000}
    for writer in range(4):
        own_lines = [line for line in lines if line["writer"] == writer]
        assert [line["number"] for line in own_lines] == list(range(1000))
        assert all(set(line["text"]) == {chr(97 + writer)} for line in own_lines)


STOPPED_IN_THE_MIDDLE = """
import os, signal, sys
from bulltask.observe.log import configure

log = configure(level="info", worker_id="node-1-1-abc", stream=sys.stdout)
writer = log._logger.msg.__self__
child = os.fork()
if not child:
    writer._send = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    log.info("the child is stopped while it holds the lock")
    os._exit(0)
os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
for number in range(100):
    log.info("line", number=number)
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
log.info("end", dropped=writer.dropped, stuck=writer._lock_stuck)
"""


def test_a_stopped_child_does_not_silence_the_supervisor() -> None:
    with run_program(STOPPED_IN_THE_MIDDLE) as program:
        lines = [json.loads(text) for text in program.read_rest().splitlines()]
    assert [line.get("number") for line in lines] == [*range(100), None]
    assert lines[-1]["dropped"] == 0


# The lock of a killed process is released immediately, and a forked process does not inherit the lock of a thread.
FORKED_WHILE_A_THREAD_WRITES = """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
from bulltask.observe.log import configure

log = configure(level="info", worker_id="node-1-1-abc", stream=sys.stdout)
writer = log._logger.msg.__self__
held, done = threading.Event(), threading.Event()

def hold():
    with writer._threads:
        held.set()
        done.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if not child:
    log.info("from the child")
    os._exit(0)
os.waitpid(child, 0)
done.set()
thread.join()
log.info("from the parent")
"""


def test_a_child_forked_while_a_thread_writes_can_write() -> None:
    with run_program(FORKED_WHILE_A_THREAD_WRITES) as program:
        lines = [json.loads(text)["event"] for text in program.read_rest().splitlines()]
    assert lines == ["from the child", "from the parent"]


BRIDGED = """
import logging, sys
from bulltask.observe.log import configure

logging.getLogger("shop.tasks").info("before")
configure(level="info", worker_id="node-1-1-abc")
logging.getLogger("shop.tasks").info("after")
logging.getLogger("redis").debug("not at this level")
import warnings
warnings.warn("old")
sys.stdin.readline()
"""


def test_a_worker_outputs_standard_library_log_records() -> None:
    with run_program(BRIDGED) as program:
        lines = [json.loads(program.read_line()) for _ in range(2)]
        assert program.send(signal.SIGKILL) == -signal.SIGKILL
    assert [line["logger"] for line in lines] == ["shop.tasks", "py.warnings"]
    assert {line["worker_id"] for line in lines} == {"node-1-1-abc"}
