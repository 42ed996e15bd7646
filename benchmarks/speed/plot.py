"""Plots of cost against elements and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastguard.commands.bench import harness

_AXES = (("elements", "elements in one float32 tensor"), ("tensors", "float32 tensors of 1000 elements"))


class MissingExtraError(RuntimeError):
    """An optional package is not installed; says how to install it."""


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError("plots need matplotlib: pip install 'fastguard[bench]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def check_available() -> None:
    """Raises MissingExtraError if plots cannot be drawn here."""
    _pyplot()


def _curves(points: list[dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(label, colour, times by point); of the two plain reads the quicker one at each point."""
    fastest = [
        min((p[name] for name in ("read", "read-prefetch") if name in p), key=lambda t: t["median"], default=None)
        for p in points
    ]
    curves = [
        ("torch clip_grad_norm_", "tab:gray", [p["torch-clip"] for p in points]),
        ("fastguard.clip_grad_norm_", "tab:blue", [p["clip"] for p in points]),
    ]
    if None not in fastest:
        curves.append(("plain read stream", "tab:green", fastest))
    return curves


def draw(results: dict[str, Any], folder: Path) -> list[Path]:
    """Writes `cost-elements.png` and `cost-tensors.png` into `folder`, and returns their paths.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for axis, label in _AXES:
        points = results["sweep"][axis]
        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        for title, colour, times in _curves(points):
            x = [p["x"] for p in points]
            axes.plot(x, [t["median"] for t in times], "o-", color=colour, label=title, markersize=4)
            axes.fill_between(
                x, [t["min"] for t in times], [t["max"] for t in times], color=colour, alpha=0.2, linewidth=0
            )
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="µs a call (median; band: min to max)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.set_title("Clipping without reaching the limit", loc="left")
        figure.supxlabel(harness.line(results["machine"]), fontsize=6, color="gray", wrap=True)
        paths.append(folder / f"cost-{axis}.png")
        figure.savefig(paths[-1], dpi=150)
        pyplot.close(figure)
    return paths
