"""A report's HTML page and Markdown: complete, self-contained, and with all data escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bulltask.lake.report import sections
from bulltask.lake.report.page import Report, html, make_report, markdown
from tests.support.gold import queue_minute, task_minute
from tests.support.lake import LakeBuilder, at
from tests.support.lake_report import period

EVIL = (
    "</script><script>alert('x')</script><img src=x onerror=alert(1)> {{ 7*7 }} |a|`b`\n# *c* "
    "[d](http://e.example) \u202eevil"
)
VOID = {"meta", "br", "hr", "img", "input", "link"}

Make = Callable[[LakeBuilder], Report]


def build_report(lake: LakeBuilder, days: str = "2026-11-22") -> Report:
    return make_report(lake.lake, period(days), created_at=datetime(2026, 11, 23, tzinfo=UTC))


def full_report(lake: LakeBuilder, name: str = "send", queue: str = "mail", reason: str = "no answer") -> Report:
    """Return a report with data in every section."""
    waits, runs = [10, 20, 3000], [100, 200, 4000]
    counts = {"added": 5, "finished": 3, "completed": 2, "failed": 1, "requeued": 2, "stalled": 1, "wasted_ms": 500}
    lake.gold("task_minute", [task_minute("10:00", name, queue=queue, waits=waits, runs=runs, **counts)])
    busy = {"busy_slots": 1.5, "utilization": 0.5, "capacity": 3, "peak_slots": 2, "backlog_delta": 2}
    lake.gold("capacity_minute", [queue_minute("10:00", queue=queue, **busy)])
    key = {"queue": queue, "name": name, "dt": "2026-11-22"}
    times = {"first_seen": at("2026-11-22 10:00"), "last_seen": at("2026-11-22 10:01")}
    ids = {"sample_failed_reason": f"{reason}\nline 2", "sample_job_ids": [f"id-{reason}"]}
    lake.gold("errors_day", [{**key, "error_fingerprint": reason, "count": 1, **times, **ids}])
    slo = {"metric": "wait", "threshold_ms": 2000, "target": 0.9, "measured": 3, "good": 2, "complete": True}
    lake.gold("slo_day", [{**key, **slo}])
    cost = {"jobs": 3, "attempts": 6, "busy_s": 4.3, "wasted_s": 0.5, "cost": Decimal("0.5"), "complete": True}
    lake.gold("cost_day", [{**key, **cost}])
    lost = {"lost": 7, "exact": True, "loss_reason": "trimmed", "detected_at": at("2026-11-22 10:00", 9)}
    lake.gaps([{"queue": queue, "last_id_before": "1-0", "last_at_before": at("2026-11-22 10:00"), **lost}])
    return build_report(lake)


class ParsedPage(HTMLParser):
    """The texts, tags and scripts of a page. A tag that is not closed fails the test."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def test_a_page_has_every_section(lake: LakeBuilder) -> None:
    text = ParsedPage(html(full_report(lake))).text
    for expected in (
        "Jobs, 22 November 2026", "queue mail · 10:00 to 10:01 UTC · created 2026-11-23 00:00:00 UTC",
        "Incomplete: 1 minute", "Events of mail were lost: 7.", "shaded: events lost",
        "Finished jobs 3", "33.3%", "Cost 0.50 0.17 per job",
        "send", "no answer", "100% of all failures", "id-no answer", "line 2",
        "Recommended concurrency", "The busiest of", "slots across all workers so that",
        "90% wait within 2 s", "overspent, -233%", "trimmed",
    ):  # fmt: skip
        assert expected in text, expected


def test_a_page_is_well_formed_and_its_data_is_json(lake: LakeBuilder) -> None:
    page = ParsedPage(html(full_report(lake)))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    links = [attrs["href"] or "" for tag, attrs in page.tags if tag == "a"]
    assert sorted(links) == sorted(f"#{target}" for target in ids)
    payloads = [json.loads(script) for script in page.scripts[:-1]]
    assert len(payloads) == 5, "all charts except the backlog, which is unknown after the gap"
    assert payloads[0] == {
        "start": at("2026-11-22 10:00").timestamp(),
        "step": 60,
        "unit": "number",
        "lines": [
            {"label": "added", "values": [5]},
            {"label": "completed", "values": [2]},
            {"label": "failed", "values": [1]},
        ],
    }


def test_a_page_loads_no_other_resources(lake: LakeBuilder) -> None:
    text = html(full_report(lake))
    page = ParsedPage(text)
    assert not re.search(r"https?:|url\(|@import|//[a-z]", text.replace("// A cursor", "").replace("data:", ""))
    loading = {"src", "srcset", "action", "background", "poster", "data"}
    assert [attrs for tag, attrs in page.tags if loading & attrs.keys() or tag in {"link", "base", "iframe"}] == []


def test_the_security_policy_allows_only_the_reports_script(lake: LakeBuilder) -> None:
    page = ParsedPage(html(full_report(lake)))
    [policy] = [attrs["content"] or "" for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    kinds = [attrs.get("type") for tag, attrs in page.tags if tag == "script"]
    assert kinds == ["application/json"] * 5 + [None]
    digest = base64.b64encode(hashlib.sha256(page.scripts[-1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert [name for _, attrs in page.tags for name in attrs if name.startswith("on")] == []


def test_names_and_reasons_are_escaped_in_a_page(lake: LakeBuilder) -> None:
    plain = ParsedPage(html(full_report(LakeBuilder(lake.root / "plain"))))
    page = ParsedPage(html(full_report(lake, EVIL, EVIL.replace("/", "_"), EVIL)))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert "<script>alert('x')</script>" in page.text
    assert "{{ 7*7 }}" in page.text
    assert "\\u202eevil" in page.text
    assert "\u202e" not in html(full_report(LakeBuilder(lake.root / "other"), EVIL))
    payload = json.loads(page.scripts[1])
    assert payload["lines"][0]["label"] == EVIL


ATTACKS = "<script>document.title='forged'</script><img src=x onerror=\"document.title='forged'\"><!--</script>"


def open_in_browser(page: str, directory: Path) -> str:
    """Return the HTML of a page after a browser has loaded it and run its scripts."""
    browser = shutil.which("chromium") or pytest.skip("needs chromium")
    (directory / "page.html").write_text(page)
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-breakpad", "--dump-dom"]
    return subprocess.run(
        [browser, *arguments, f"--user-data-dir={directory}/profile", (directory / "page.html").as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


@pytest.mark.slow
def test_a_browser_runs_no_script_of_a_name_or_reason(lake: LakeBuilder, tmp_path: Path) -> None:
    shown = open_in_browser(html(full_report(lake, ATTACKS, ATTACKS.replace("/", "_"), ATTACKS)), tmp_path)
    assert "<title>Jobs, 22 November 2026</title>" in shown
    assert "<img" not in shown
    assert "&lt;img src=x" in shown


@pytest.mark.slow
def test_a_browser_runs_no_foreign_script_even_if_it_is_in_the_page(lake: LakeBuilder, tmp_path: Path) -> None:
    page = html(full_report(lake)).replace("</main>", f"{ATTACKS}--></main>")
    assert "<title>Jobs, 22 November 2026</title>" in open_in_browser(page, tmp_path)
    without_policy = re.sub("<meta http-equiv[^>]*>", "", page)
    assert "<title>forged</title>" in open_in_browser(without_policy, tmp_path)


def test_names_and_reasons_are_escaped_in_markdown(lake: LakeBuilder) -> None:
    plain = markdown(full_report(LakeBuilder(lake.root / "plain")))
    text = markdown(full_report(lake, EVIL, EVIL.replace("/", "_"), EVIL))
    assert not re.search(r"[<>`\[\]]|http://", text.replace("> **", "").replace("\n>", ""))
    assert [line.count("|") for line in text.splitlines()] == [line.count("|") for line in plain.splitlines()]
    assert "&#60;script&#62;alert('x')" in text
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in plain.splitlines() if line.startswith("#")
    ]


def test_markdown_has_every_section(lake: LakeBuilder) -> None:
    text = markdown(full_report(lake))
    for expected in (
        "# Jobs, 22 November 2026",
        "> **Incomplete: 1 minute**",
        "| Finished jobs | **3** | 3 per minute |",
        "| added | █ | at most 5 |",
        "| send | 3 | 33.3% | 20 ms | 3.01 s | 3.01 s | 200 ms | 3.97 s | 3.97 s |",
        "| no answer | 1 | 100% | send |",
        "| send | 6 | 2 | 33.3% | 1 | 16.7% | 500 ms |",
        ", so that 99% of the attempts start within 2 s",
        "| send | wait | 2 s | 90% | 3 | 2 | 66.7% | -233% | yes |",
        "| mail | 7 | yes | trimmed |",
    ):
        assert expected in text, expected


def test_a_page_about_200_tasks_shows_15_rows(lake: LakeBuilder) -> None:
    rows = [
        task_minute(f"10:{n % 60:02}", f"task-{n:03}", runs=[n + 1], waits=[n], finished=1, requeued=1)
        for n in range(200)
    ]
    lake.gold("task_minute", rows)
    text = html(build_report(lake))
    page = ParsedPage(text)
    assert "186 others" in page.text
    assert page.text.count("task-199") == page.text.count("task-198") == 5  # two ranges, two legends, the retries
    assert "task-000" not in text
    assert len(text) < 150_000


def test_long_tables_are_truncated_and_name_the_command_for_the_rest(lake: LakeBuilder) -> None:
    lost = {"lost": 1, "exact": True, "loss_reason": "trimmed", "last_at_before": at("2026-11-22 10:00")}
    gaps = [{"last_id_before": f"{n}-0", "detected_at": at("2026-11-22 10:01", n), **lost} for n in range(50)]
    slo = {"queue": "mail", "metric": "run", "target": 0.9, "measured": 10, "complete": True, "dt": "2026-11-22"}
    slos = [{**slo, "name": f"task-{n:02}", "threshold_ms": 5, "good": n % 10} for n in range(60)]
    lake.gold("task_minute", [task_minute("10:00", finished=1)]).gaps(gaps).gold("slo_day", slos)
    report = build_report(lake)
    for text in (ParsedPage(html(report)).text, markdown(report)):
        assert "40 others: bulltask pipeline report slo" in text
        assert "30 others: bulltask pipeline gaps" in text
        assert len(re.findall(r"task-\d\d", text)) == 20
        assert "task-00" in text  # the worst
        assert "task-09" not in text


def test_a_page_about_one_task_has_all_sections(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", runs=[5], waits=[0], added=1, finished=1, completed=1)])
    text = ParsedPage(html(build_report(lake))).text
    for expected in (
        "No jobs failed.",
        "No attempts were requeued",
        "No objectives are set",
        "no events from this period",
        "With 1 slot, ",
    ):
        assert expected in text, expected


def test_a_page_can_be_created_without_attempts(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", added=3)])
    text = ParsedPage(html(build_report(lake))).text
    assert "No attempts started or ended." in text
    assert "No attempts ran." in text
    assert "| added | █ | at most 3 |" in markdown(build_report(lake))


@pytest.mark.parametrize("make", [html, markdown])
def test_a_report_about_a_day_without_data_contains_only_advice(
    make: Callable[[Report], str], lake: LakeBuilder
) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1)])
    text = make(build_report(lake, "2026-11-25"))
    assert "No jobs for 25 November 2026" in text
    assert "The lake has days from 2026-11-22 to 2026-11-22" in text
    assert "Throughput" not in text
    lake.events([{"event_id": "1795572000000-0", "event": "added"}])  # on 25 November
    text = make(build_report(lake, "2026-11-25"))
    assert f"bulltask pipeline build gold --lake {lake.root} --days 2026-11-25" in text.replace("&#95;", "_")


def test_a_page_without_gaps_has_no_alert(lake: LakeBuilder) -> None:
    lake.gold("task_minute", [task_minute("10:00", finished=1)])
    page = html(build_report(lake))
    assert "no events from this period" in page
    assert 'class="alert' not in page


def test_a_very_long_reason_is_truncated(lake: LakeBuilder) -> None:
    page = html(full_report(lake, reason="x" * 1_000_000))
    assert len(page) < 4_000_000
    assert "x" * 5_000 not in re.search(r"<pre>(.*?)</pre>", page, re.DOTALL)[1]  # type: ignore[index]


@pytest.mark.parametrize("letters", [120, 5_000])
def test_a_long_name_is_shortened_and_may_wrap(lake: LakeBuilder, letters: int) -> None:
    """The style lets all text wrap, and no name takes more than a few lines on a phone."""
    report = full_report(lake, name="com.example." + "n" * letters, queue="queue." + "q" * 240)
    page, text = ParsedPage(html(report)), markdown(report)
    shown = [*page.texts, *text.splitlines(), *(attrs.get("aria-label") or "" for _, attrs in page.tags)]
    assert not any(re.search("n{121}|q{121}", line) for line in shown)
    assert any(line.startswith("com.example.nnn") and "n…n" in line for line in shown)
    assert re.search(r"body \{[^}]*overflow-wrap: anywhere", html(report))
    assert sections.table_of(sections.Cost, report.costs).rows[0][1] == "com.example." + "n" * letters, (
        "tables have the full name"
    )
