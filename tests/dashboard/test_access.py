"""Who may use the dashboard: logins, sessions, roles, forged requests, guesses, and the audit log."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from bulltask import App
from bulltask.dashboard import Access, Dashboard, Role, access
from bulltask.dashboard.actions import ENDPOINTS
from bulltask.dashboard.site import _PAGES
from bulltask.jobs.clock import mono_s
from bulltask.jobs.errors import ConfigError
from bulltask.transport.permissions import role_grants
from tests.dashboard.conftest import SECRET, Browser, Open

pytestmark = pytest.mark.redis

TOKEN = "the token of the dashboard in these tests"


@pytest.fixture
def failed_job(app: App) -> str:
    """The id of a job in the queue ``mail``, which is delayed."""
    return app.send_task("send", queue="mail", countdown=3600).id


def paths() -> list[tuple[str, str]]:
    """Return the method and an example path of each route that shows or changes something."""
    pages = [("GET", page.path) for page in _PAGES]
    return [
        (method, re.sub(r"\{\w+\}", "mail", path))
        for method, path in [*pages, *(("POST", endpoint.path) for endpoint in ENDPOINTS)]
    ]


# ---- login ----


@pytest.mark.parametrize(("method", "path"), paths())
def test_without_a_login_every_page_and_action_asks_for_one(browser_with: Open, method: str, path: str) -> None:
    browser = browser_with(token=TOKEN)
    response = browser.request(method, path, follow_redirects=False)
    assert response.status_code == 303
    assert response.headers["location"].startswith("/login")
    stream = browser.request(method, path, headers={"accept": "text/event-stream"})
    assert stream.status_code == 401


def test_the_login_page_does_not_say_where_redis_is(browser_with: Open, app: App) -> None:
    browser = browser_with(token=TOKEN)
    for path in ("/login", "/nothing-is-here"):
        assert app._broker.endpoint.safe_url not in browser.get(path).text


def test_the_address_with_the_token_logs_in_and_leads_to_the_page_that_was_asked_for(
    browser_with: Open, failed_job: str
) -> None:
    browser = browser_with(token=TOKEN)
    asked = f"/queues/mail/jobs/{failed_job}?text=1"
    login = browser.get(asked, follow_redirects=False).headers["location"]
    response = browser.get(f"{login}&token={TOKEN}")
    assert response.url.path == f"/queues/mail/jobs/{failed_job}"
    assert response.url.query == b"text=1"
    assert TOKEN not in str(response.url)
    assert "Log out" in response.text


def test_a_session_cookie_is_hidden_from_scripts_and_from_other_sites(browser_with: Open) -> None:
    browser = browser_with(password="open sesame")
    response = browser.post("/login", data={"secret": "open sesame"}, follow_redirects=False)
    cookie = response.headers["set-cookie"].lower()
    assert {"httponly", "samesite=lax", "path=/"} < set(cookie.split("; "))
    assert "secure" not in cookie
    secure = Browser(Dashboard(App("x"), Access(token=TOKEN, secret=SECRET)), base_url="https://testserver")
    response = secure.get(f"/login?token={TOKEN}", follow_redirects=False)
    assert "; secure" in response.headers["set-cookie"].lower()


@pytest.mark.parametrize(
    "target", ["//evil.example", "/\\evil.example", "https://evil.example", "/\t/evil.example", "/x\n", "javascript:1"]
)
def test_a_login_leads_to_no_other_site(browser_with: Open, target: str) -> None:
    browser = browser_with(token=TOKEN)
    response = browser.get("/login", params={"token": TOKEN, "next": target}, follow_redirects=False)
    assert response.headers["location"] == "/"


def test_an_ended_session_is_not_accepted_again(browser_with: Open) -> None:
    browser = browser_with(token=TOKEN)
    browser.get(f"/login?token={TOKEN}")
    (stolen,) = browser.cookies.jar
    assert browser.act("/logout").url.path == "/login"
    browser.cookies.set(stolen.name, str(stolen.value))
    assert browser.get("/").url.path == "/login"


def test_a_new_password_ends_all_sessions(browser_with: Open) -> None:
    browser = browser_with(password="the old one")
    browser.post("/login", data={"secret": "the old one"})
    other = browser_with(password="the new one")
    for cookie in browser.cookies.jar:
        other.cookies.set(cookie.name, str(cookie.value))
    assert other.get("/").url.path == "/login"


def test_a_session_ends_after_twelve_hours(browser_with: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    browser = browser_with(token=TOKEN)
    browser.get(f"/login?token={TOKEN}")
    assert browser.get("/").url.path == "/"
    later = time.time() + access.SESSION_S + 1
    monkeypatch.setattr(access, "time", lambda: later)
    assert browser.get("/").url.path == "/login"


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value[:-1] + ("0" if value[-1] != "0" else "1"),
        lambda value: value.replace("token", "password"),
        lambda value: value.partition(".")[2],
        lambda value: base64.b64encode(value.encode()).decode(),
        lambda value: "",
        lambda value: "." * 1000,
        lambda value: "é\x00ü",
    ],
)
def test_an_altered_session_is_not_accepted(change: Any) -> None:
    rules = Access(token=TOKEN, password="open sesame", secret=SECRET)
    user = access.User("token", Role.ADMIN, "0" * 32)
    assert rules._logged_in(rules.session(user)) == user
    assert rules._logged_in(change(rules.session(user))) is None


def test_secrets_are_not_shown_by_repr() -> None:
    shown = repr(Access(token=TOKEN, password="open sesame", secret=SECRET))
    assert not {TOKEN, "open sesame", SECRET} & set(re.findall(r"'([^']*)'", shown))


def test_access_without_users_or_with_a_weak_password_is_refused() -> None:
    refused: tuple[dict[str, Any], ...] = ({}, {"token": ""}, {"password": "short"}, {"user_header": "X-User"})
    for options in refused:
        with pytest.raises(ConfigError):
            Access(**options)


# ---- guesses ----


def guess(browser: Browser, secret: str) -> int:
    return int(browser.post("/login", data={"secret": secret}).status_code)


def test_after_five_wrong_passwords_an_address_must_wait_even_with_the_right_one(
    browser_with: Open, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = mono_s()
    monkeypatch.setattr(access, "mono_s", lambda: now)
    site = Dashboard(app, Access(password="open sesame", secret=SECRET))
    attacker, other = Browser(site, "10.0.0.1"), Browser(site, "10.0.0.2")
    assert [guess(attacker, f"wrong {number}") for number in range(7)] == [401] * 5 + [429] * 2
    assert guess(attacker, "open sesame") == 429
    assert guess(other, "open sesame") == 200
    now += 61
    assert guess(attacker, "open sesame") == 200


def test_many_addresses_together_cannot_guess_more_often_but_lock_nobody_out_who_has_the_token(app: App) -> None:
    site = Dashboard(app, Access(password="open sesame", token=TOKEN, secret=SECRET))
    codes = [guess(Browser(site, f"10.0.{number}.1"), "wrong") for number in range(60)]
    assert codes == [401] * 50 + [429] * 10
    assert guess(Browser(site, "10.1.0.1"), "open sesame") == 429
    assert Browser(site, "10.1.0.1").get(f"/login?token={TOKEN}").url.path == "/"


def test_the_addresses_of_one_ipv6_network_count_as_one(app: App) -> None:
    site = Dashboard(app, Access(password="open sesame", secret=SECRET))
    codes = [guess(Browser(site, f"2001:db8::{number}"), "wrong") for number in range(1, 8)]
    assert codes == [401] * 5 + [429] * 2


def test_a_huge_login_form_is_refused(browser_with: Open) -> None:
    assert guess(browser_with(token=TOKEN), "x" * 2**20) == 413


# ---- roles ----


def allowed(browser: Browser, job_id: str, **headers: str) -> set[str]:
    """Return which of three actions a user may do; buttons and routes must agree."""
    browser.headers.update(headers)
    done = set()
    for action, page in (
        ("pause", "/queues/mail"),
        ("resume", "/queues/mail"),
        ("remove", "/queues/mail/jobs/" + job_id),
    ):
        path = f"/queues/mail/{action}" + (f"/{job_id}" if action == "remove" else "")
        has_button = f'action="{path}"' in browser.get(page).text
        response = browser.act(path, page)
        assert (response.status_code == 403) is not has_button
        assert "was not sent by" not in response.text
        done |= {action} if has_button else set()
    return done


def test_each_role_sees_the_buttons_that_it_may_use_and_no_others(browser_with: Open, failed_job: str) -> None:
    roles = {"ann": Role.OPERATOR, "bob": Role.ADMIN}
    browser = browser_with(user_header="X-User", proxies=["10.0.0.0/8"], roles=roles)
    assert allowed(browser, failed_job, **{"X-User": "somebody"}) == set()
    assert allowed(browser, failed_job, **{"X-User": "ann"}) == {"pause", "resume"}
    assert allowed(browser, failed_job, **{"X-User": "bob"}) == {"pause", "resume", "remove"}


def test_read_only_not_even_an_admin_changes_anything(browser_with: Open, app: App, failed_job: str) -> None:
    browser = browser_with(anonymous=Role.ADMIN, read_only=True)
    assert allowed(browser, failed_job) == set()
    assert "read-only" in browser.act("/queues/mail/pause").text
    assert not app.queue("mail").is_paused()
    assert app.queue("mail").get_job(failed_job) is not None


def test_a_user_header_is_believed_only_from_a_proxy_and_only_once(browser_with: Open) -> None:
    options: dict[str, Any] = {"user_header": "X-User", "proxies": ["192.168.1.1"], "roles": {"bob": Role.ADMIN}}
    proxied = browser_with(address="192.168.1.1", **options)
    assert "bob" in proxied.get("/", headers={"X-User": "bob"}).text
    assert "Only the users of a proxy" in proxied.get("/").text
    twice = proxied.get("/", headers=[("X-User", "bob"), ("X-User", "ann")])
    assert "Only the users of a proxy" in twice.text
    direct = browser_with(address="192.168.1.2", **options)
    forged = {"X-User": "bob", "X-Forwarded-For": "192.168.1.1"}
    assert "Only the users of a proxy" in direct.get("/", headers=forged).text


def test_each_action_needs_a_role() -> None:
    assert {endpoint.action for endpoint in ENDPOINTS} == access.ACTIONS.keys()


# ---- forged requests ----


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://testserver:81"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": "http://testserver"}, 200),
        ({}, 200),
    ],
)
def test_only_forms_of_its_own_pages_are_accepted(
    browser: Browser, app: App, failed_job: str, headers: dict[str, str], status: int
) -> None:
    fields = {"form_token": browser.form_token("/queues/mail")}
    assert browser.post("/queues/mail/pause", data=fields, headers=headers).status_code == status
    assert app.queue("mail").is_paused() is (status == 200)


def test_a_form_without_the_token_of_its_session_is_refused(browser_with: Open, app: App, failed_job: str) -> None:
    browser, other = browser_with(token=TOKEN), browser_with(token=TOKEN)
    browser.get(f"/login?token={TOKEN}")
    other.get(f"/login?token={TOKEN}")
    for token in ("", "0" * 64, other.form_token("/queues/mail")):
        assert browser.post("/queues/mail/pause", data={"form_token": token}).status_code == 403
    assert not app.queue("mail").is_paused()
    assert browser.post("/logout").status_code == 403
    assert browser.get("/").url.path == "/"


def test_a_notice_is_shown_only_if_the_dashboard_has_written_it(browser: Browser, failed_job: str) -> None:
    response = browser.act("/queues/mail/pause", "/queues/mail")
    assert "Queue mail is paused." in response.text
    forged = browser.get("/queues/mail", params={"notice": "Call 555-0100", "seal": response.url.params["seal"]})
    assert "555-0100" not in re.sub(r"<input[^>]*>", "", forged.text)


def test_an_action_leads_back_to_no_other_site(browser: Browser, failed_job: str) -> None:
    token = browser.form_token("/queues/mail")
    fields = {"form_token": token, "back": "//evil.example"}
    response = browser.post("/queues/mail/pause", data=fields, follow_redirects=False)
    assert response.headers["location"].startswith("/?notice=")


def test_another_host_name_is_refused_so_that_no_web_page_reaches_it_by_dns(browser_with: Open) -> None:
    browser = browser_with(anonymous=Role.VIEWER, hosts=["localhost", "[::1]"])
    assert browser.get("/", headers={"host": "evil.example:8787"}).status_code == 421
    assert browser.get("/", headers={"host": ""}).status_code == 421
    assert browser.get("/", headers={"host": "localhost:8787"}).status_code == 200
    assert browser.get("/", headers={"host": "[::1]:8787"}).status_code == 200
    proxied = browser_with(anonymous=Role.VIEWER, hosts=["ops.example.com"], proxies=["10.0.0.1"])
    assert proxied.get("/", headers={"x-forwarded-host": "ops.example.com"}).status_code == 200
    assert proxied.get("/", headers={"x-forwarded-host": "evil.example"}).status_code == 421


def test_every_response_forbids_scripts_that_are_not_files_of_the_dashboard(
    browser_with: Open, monkeypatch: pytest.MonkeyPatch, app: App
) -> None:
    site = Dashboard(app, Access(anonymous=Role.VIEWER, secret=SECRET))
    browser = Browser(site, raise_server_exceptions=False)
    monkeypatch.setattr(site._pages, "failures", lambda: 1 / 0)
    answers = [browser.get(path) for path in ("/login", "/", "/nothing", "/failures", "/static/live.js")]
    assert [answer.status_code for answer in answers] == [200, 500, 404, 500, 200]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"<script(?! src=)|\son\w+=|\sstyle=|<style", answer.text)


def test_only_files_are_kept_by_browsers(browser: Browser) -> None:
    style = browser.get("/static/style.css")
    assert style.headers["cache-control"] == "no-cache"
    again = browser.get("/static/style.css", headers={"if-none-match": style.headers["etag"]})
    assert again.status_code == 304
    assert browser.get("/").headers["cache-control"] == "no-store"


def test_without_redis_users_log_in_and_are_told_so(caplog: pytest.LogCaptureFixture) -> None:
    site = Dashboard(App("x", "redis://127.0.0.1:1"), Access(token=TOKEN, secret=SECRET))
    page = Browser(site).get(f"/login?token={TOKEN}")
    assert page.status_code == 502
    assert "This cannot be shown" in page.text
    assert "was not stored in Redis" in caplog.text


# ---- audit log ----


def test_what_was_done_and_refused_and_who_logged_in_is_in_the_audit_log(
    browser_with: Open, app: App, failed_job: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "bulltask.dashboard.audit")
    browser = browser_with(token=TOKEN, address="10.1.2.3")
    guess(browser, "wrong")
    browser.get(f"/login?token={TOKEN}")
    browser.act(f"/queues/mail/promote/{failed_job}")
    browser.post("/queues/mail/pause", data={"form_token": "forged"})
    browser.act("/logout")
    browser.get(f"/login?token={TOKEN}")
    lines = [re.sub(r"<[^>]*>|\s+", " ", row) for row in browser.get("/audit").text.split("<tr>")[2:]]
    expected = [
        "token 10.1.2.3 login logged in",
        "token 10.1.2.3 logout logged out",
        "token 10.1.2.3 pause refused queue mail This form was not sent",
        f"token 10.1.2.3 promote queue mail, job {failed_job} Job {failed_job} waits for a worker.",
        "token 10.1.2.3 login logged in",
        "\N{EN DASH} 10.1.2.3 login refused wrong token or password",
    ]
    shown = [re.sub(r"\s+", " ", line.partition(" UTC")[2] or line) for line in lines]
    for line, part in zip(shown, expected, strict=True):
        assert " ".join(part.split()) in " ".join(line.split()), shown
    logged = [record.getMessage() for record in caplog.records]
    assert logged[2].startswith(f"dashboard: token (10.1.2.3) promote queue mail, job {failed_job}: Job")
    assert not any("wrong" in line and "password" not in line for line in logged)
    assert TOKEN not in "".join(logged)


def test_the_audit_log_is_for_admins_also_if_nothing_may_be_changed(browser_with: Open) -> None:
    assert 'href="/audit"' not in browser_with(anonymous=Role.OPERATOR).get("/").text
    assert browser_with(anonymous=Role.OPERATOR).get("/audit").status_code == 403
    assert browser_with(anonymous=Role.ADMIN, read_only=True).get("/audit").status_code == 200


def test_the_audit_log_is_bounded_and_guesses_do_not_push_out_what_was_done(
    browser: Browser, app: App, redis_client: redis.Redis, failed_job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "_MAX_ENTRIES", 100)
    audit = access.Audit(app)
    audit.record("pause", "Queue mail is paused.", user="ann", address="10.0.0.1", target="queue mail")
    for _ in range(300):
        audit.record("login", "wrong " + "x" * 10_000, user="", address="10.0.0.1", refused=True)
    assert redis_client.xlen("bulltask:dashboard-refused") <= 200  # "~" removes whole nodes of the stream
    assert (redis_client.memory_usage("bulltask:dashboard-refused") or 0) < 300_000
    assert [entry.user for entry in audit.newest(1_000)].count("ann") == 1
    assert audit.newest(1)[0].is_refused


@contextmanager
def user_of_redis(client: redis.Redis, app: App, role: str) -> Iterator[App]:
    """Yield an app whose user of Redis has a role."""
    client.execute_command("ACL", "SETUSER", role, "on", ">pw", *role_grants([role]).rules())
    restricted = App(role, str(app._broker.endpoint.url).replace("redis://", f"redis://{role}:pw@"))
    try:
        yield restricted
    finally:
        restricted.close()
        client.acl_deluser(role)


def test_a_user_of_redis_who_may_only_read_sees_pages_and_is_told_that_actions_are_not_permitted(
    app: App, redis_client: redis.Redis, failed_job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with user_of_redis(redis_client, app, "reader") as reader:
        browser = Browser(Dashboard(reader, Access(anonymous=Role.ADMIN, secret=SECRET)))
        assert "mail" in browser.get("/").text
        assert browser.get("/audit").status_code == 200
        response = browser.act(f"/queues/mail/promote/{failed_job}", f"/queues/mail/jobs/{failed_job}")
        assert "lacks permission" in response.text
        assert "was not stored in Redis" in caplog.text


def test_the_role_operator_of_redis_suffices_for_all_pages_actions_and_the_audit_log(
    app: App, redis_client: redis.Redis, failed_job: str, caplog: pytest.LogCaptureFixture
) -> None:
    with user_of_redis(redis_client, app, "operator") as operator:
        browser = Browser(Dashboard(operator, Access(anonymous=Role.ADMIN, secret=SECRET)))
        for page in _PAGES:
            if "{" not in page.path:
                assert "not permitted" not in browser.get(page.path).text, page.path
        for path in ("promote", "revoke", "remove"):
            assert "Error" not in browser.act(f"/queues/mail/{path}/{failed_job}", "/queues/mail").text
        assert [entry.action for entry in access.Audit(app).newest(9)] == ["remove", "revoke", "promote"]
        assert "lacks permission" not in caplog.text
