"""A number by rollout, drawn as SVG. No dependencies."""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 260, 52, 30, 30, 14
_SMOOTHED_OVER = 10  # rollouts
_MAX_POINTS = 400


def curve_svg(values: Mapping[int, float], title: str) -> str:
    """The values (thin) and their running mean over 10 rollouts (thick).

    Args:
        values: rollout -> value; those that are not finite are left out. At least one must remain.
    """
    points = sorted((rollout, value) for rollout, value in values.items() if math.isfinite(value))
    if not points:
        raise ValueError(f"a curve needs a finite value, found none among {len(values)} rollouts")
    smooth = _running_mean([value for _, value in points])
    low, high = min(value for _, value in points), max(value for _, value in points)
    if low == high:
        low, high = low - 0.5, high + 0.5
    first, last = points[0][0], points[-1][0]

    def place(rollout: int, value: float) -> str:
        x = _LEFT + (rollout - first) / max(last - first, 1) * (_WIDTH - _LEFT - _RIGHT)
        y = _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    shown = _thinned(range(len(points)))
    thin = " ".join(place(*points[i]) for i in shown)
    thick = " ".join(place(points[i][0], smooth[i]) for i in shown)
    base = _HEIGHT - _BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#555">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        f'<path d="M{_LEFT} {_TOP}V{base}H{_WIDTH - _RIGHT}" fill="none" stroke="#999"/>'
        f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end">{high:.3g}</text>'
        f'<text x="{_LEFT - 6}" y="{base + 4}" text-anchor="end">{low:.3g}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 10}">rollout {first}</text>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 10}" text-anchor="end">{last}</text>'
        f'<polyline points="{thin}" fill="none" stroke="#9db8e8"/>'
        f'<polyline points="{thick}" fill="none" stroke="#1f4fb0" stroke-width="2.5"/>'
        "</svg>"
    )


def as_markdown_image(svg: str, text: str) -> str:
    """The drawing as an image inside Markdown."""
    return f"![{text}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"


def _running_mean(values: Sequence[float]) -> list[float]:
    windows = [values[max(0, end - _SMOOTHED_OVER) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def _thinned(indices: range) -> list[int]:
    """At most about `_MAX_POINTS` of them, the last one included."""
    step = math.ceil(len(indices) / _MAX_POINTS)
    return sorted({*indices[::step], indices[-1]})
