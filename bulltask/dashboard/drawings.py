"""Pictures in SVG, without styles of their own: the page's style sheet gives their colours."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

__all__ = ["sparkline"]


def sparkline(values: Sequence[float], label: str, width: int = 120, height: int = 24) -> Markup:
    """Return a line through some values, the last one at the right; ``label`` says what they are."""
    if len(values) < 2:
        return Markup('<svg class="spark" width="{}" height="{}" role="img" aria-label="{}"></svg>').format(
            width, height, label
        )
    top = max(*values, 1e-9)
    step = width / (len(values) - 1)
    points = " ".join(
        f"{at * step:.1f},{height - 2 - value / top * (height - 4):.1f}" for at, value in enumerate(values)
    )
    return Markup(
        '<svg class="spark" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" aria-label="{label}">'
        '<polyline points="{points}"/></svg>'
    ).format(w=width, h=height, label=label, points=points)
