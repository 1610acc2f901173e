"""``chart.py RESULTS SVG`` draws the summary of a run: bars for each framework, one panel for each measurement."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

PANELS = (
    ("Backlog of no-op jobs (jobs/s)", "throughput", "rate"),
    ("Sending one by one (jobs/s)", "single", "rate"),
    ("From send to result (p50, ms; shorter is better)", "latency", "result_p50_ms"),
    ("200 jobs sleeping at once (jobs/s; 4,000 is ideal)", "sleep", "rate"),
)
NAMES: Mapping[str, str] = {
    "bulltask": "bulltask",
    "bulltask-async": "bulltask (async)",
    "celery": "Celery",
    "dramatiq": "Dramatiq",
    "huey": "Huey",
    "taskiq": "Taskiq",
    "bullmq": "BullMQ (Node.js)",
}
OURS, OTHERS = "#2563eb", "#9ca3af"


def draw(rounds: list[dict[str, Any]], path: Path) -> None:
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "bulltask", "font.family": "sans-serif"})
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), layout="constrained")
    for axis, (title, measure, number) in zip(axes.flat, PANELS, strict=True):
        rows = [(name, values) for name in reversed(NAMES) if (values := _values(rounds, measure, name, number))]
        labels, medians = [NAMES[name] for name, _ in rows], [statistics.median(values) for _, values in rows]
        colors = [OURS if name.startswith("bulltask") else OTHERS for name, _ in rows]
        bars = axis.barh(labels, medians, color=colors)
        axis.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.2f}" for value in medians], padding=3)
        axis.set_title(title, fontsize=11, loc="left")
        axis.margins(x=0.2)
        axis.xaxis.set_visible(False)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def _values(rounds: list[dict[str, Any]], measure: str, name: str, number: str) -> list[float]:
    results = (each.get(measure, {}).get(name, {}) for each in rounds)
    return [result[number] for result in results if number in result]


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["rounds"], Path(sys.argv[2]))
