"""The measures that fastguard holds itself to, computed from results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .harness import Spread, ratio

Results = dict[str, Any]
REACHED, MISSED, NOT_MEASURED, NO_LIMIT = "reached", "missed", "not measured", "—"
READS = ("read", "read-prefetch")


@dataclass(frozen=True)
class Measure:
    """One line of the table.

    Attributes:
        compute: the figure, from saved results; None if they do not have it.
        at_most: the limit on the median; a function where it depends on the case; None for what is only told.
        aim: what we would like to see.
    """

    key: str
    title: str
    compute: Callable[[Results], Spread | None]
    at_most: float | Callable[[Results], float | None] | None = None
    aim: float | None = None
    unit: str = ""


def _case_ratio(case: str, ours: str, theirs: str) -> Callable[[Results], Spread | None]:
    def compute(results: Results) -> Spread | None:
        measured = results.get("cases", {}).get(case)
        return None if measured is None else ratio(measured, ours, theirs)

    return compute


def fastest_read(measured: dict[str, Any]) -> str | None:
    """Whichever of the plain read streams was quicker."""
    there = [name for name in READS if name in measured["timings"]]
    return min(there, key=lambda name: measured["timings"][name]["median_us"], default=None)


def _against_read(case: str, ours: str) -> Callable[[Results], Spread | None]:
    def compute(results: Results) -> Spread | None:
        measured = results.get("cases", {}).get(case)
        read = None if measured is None else fastest_read(measured)
        return None if measured is None or read is None else ratio(measured, ours, read)

    return compute


def _at(*path: str) -> Callable[[Results], Any]:
    """What lies under `path`, or None."""

    def compute(results: Results) -> Any:
        found: Any = results
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    return compute


def _spread_at(*path: str) -> Callable[[Results], Spread | None]:
    def compute(results: Results) -> Spread | None:
        found = _at(*path)(results)
        return None if found is None else Spread(**found)

    return compute


def _number_at(*path: str) -> Callable[[Results], Spread | None]:
    def compute(results: Results) -> Spread | None:
        found = _at(*path)(results)
        return None if found is None else Spread(found, found, found)

    return compute


_GPT2 = "GPT-2 124M float32"
MEASURES = (
    Measure(
        "clip",
        f"clip_grad_norm_: ours / torch's, {_GPT2}, not clipping",
        _case_ratio("gpt2-float32", "clip", "torch-clip"),
        0.40,
        0.34,
    ),
    Measure(
        "clip-always",
        "the same, clipping at every step",
        _case_ratio("gpt2-float32", "clip-always", "torch-clip-always"),
        0.80,
    ),
    Measure(
        "clip-bfloat16", "the same, bfloat16, not clipping", _case_ratio("gpt2-bfloat16", "clip", "torch-clip"), 0.45
    ),
    Measure("clip-300x1000", "300 tensors × 1000, not clipping", _case_ratio("300x1000", "clip", "torch-clip"), 0.08),
    Measure("clip-3000x64", "3000 tensors × 64, not clipping", _case_ratio("3000x64", "clip", "torch-clip"), 0.08),
    Measure(
        "read",
        f"one pass / plain read stream of the same bytes, {_GPT2}",
        _against_read("gpt2-float32", "stats"),
        1.25,
        1.1,
    ),
    Measure(
        "separate-ops",
        f"all statistics: ours / separate torch ops, {_GPT2}",
        _case_ratio("gpt2-float32", "stats-rows", "separate-ops"),
        0.02,
    ),
    Measure(
        "step-mlp",
        "guarding a whole step / what clip_grad_norm_ adds to it, MLP of 101k parameters",
        _spread_at("steps", "step-mlp", "ratio"),
        0.35,
    ),
    Measure(
        "further-tensor",
        "cost per further tensor, 10 000 tensors × 1 (gradients' Python objects alive)",
        _spread_at("further", "fastguard_alive_ns"),
        120.0,
        unit="ns",
    ),
    *(
        Measure(
            f"memory-{kind}-{case}",
            f"extra memory of {what}, {title} (256 bytes a tensor + 1 MiB)",
            _number_at("memory", case, f"{kind}_bytes"),
            _at("memory", case, "allowed_bytes"),
            unit="bytes",
        )
        for case, title in (("10000x1", "10 000 tensors × 1"), ("gpt2-float32", _GPT2))
        for kind, what in (("clip", "fastguard.clip_grad_norm_"), ("guarding", "guarding"))
    ),
    Measure(
        "toolkit",
        f"all statistics: ours / the toolkit's numpy GradientStats, {_GPT2}",
        _case_ratio("gpt2-float32", "stats-rows", "toolkit"),
    ),
    Measure("norm", f"get_total_norm: ours / torch's, {_GPT2}", _case_ratio("gpt2-float32", "norm", "torch-norm")),
    Measure("memcpy", f"one pass / memcpy of the same bytes, {_GPT2}", _case_ratio("gpt2-float32", "stats", "memcpy")),
    Measure(
        "read-bfloat16",
        "one pass / plain read stream of the same bytes, GPT-2 124M bfloat16",
        _against_read("gpt2-bfloat16", "stats"),
    ),
    Measure(
        "clip-resnet50", "clip_grad_norm_: ours / torch's, ResNet-50", _case_ratio("resnet50", "clip", "torch-clip")
    ),
    Measure(
        "clip-one-100m",
        "clip_grad_norm_: ours / torch's, one tensor of 100M",
        _case_ratio("one-100m", "clip", "torch-clip"),
    ),
    Measure(
        "clip-300x1000-fresh",
        "300 tensors × 1000, first call after a backward pass (gradients' Python objects to be made)",
        _spread_at("further", "300x1000-fresh", "ratio"),
    ),
    Measure(
        "clip-3000x64-fresh",
        "3000 tensors × 64, first call after a backward pass",
        _spread_at("further", "3000x64-fresh", "ratio"),
    ),
    Measure(
        "further-tensor-fresh",
        "cost per further tensor, first call after a backward pass",
        _spread_at("further", "fastguard_fresh_ns"),
        unit="ns",
    ),
    Measure(
        "further-tensor-torch",
        "cost per further tensor of torch's clip_grad_norm_ (Python objects alive)",
        _spread_at("further", "torch_alive_ns"),
        unit="ns",
    ),
    Measure(
        "step-transformer",
        "guarding a whole step / what clip_grad_norm_ adds to it, transformer of 4.8M parameters",
        _spread_at("steps", "step-transformer", "ratio"),
    ),
    Measure(
        "kept-10000x1",
        "kept by each record in a MemorySink, 10 000 tensors × 1",
        _number_at("memory", "10000x1", "kept_bytes"),
        unit="bytes",
    ),
)


def _verdict(value: Spread | None, at_most: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    if at_most is None:
        return NO_LIMIT
    return REACHED if value.median <= at_most else MISSED


def measures(results: Results) -> list[dict[str, Any]]:
    """Every measure, with its figure, its limit and whether the median keeps to it."""
    lines = []
    for measure in MEASURES:
        value = measure.compute(results)
        at_most = measure.at_most(results) if callable(measure.at_most) else measure.at_most
        lines.append(
            {
                "key": measure.key,
                "title": measure.title,
                "unit": measure.unit,
                "value": None if value is None else value.to_dict(),
                "at_most": at_most,
                "aim": measure.aim,
                "verdict": _verdict(value, at_most),
            }
        )
    return lines


def number(value: float | None, unit: str) -> str:
    """A figure of the table as text."""
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / 1024:,.0f} KiB" if value >= 10_240 else f"{value:,.0f} B"
    if unit == "ns":
        return f"{value:,.0f} ns"
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def duration(us: float) -> str:
    """A time in µs with its unit, to three digits."""
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= factor:
            return f"{us / factor:.3g} {unit}" if us < 1e3 * factor else f"{us / factor:,.0f} {unit}"
    return f"{us:.3g} µs"


def limit(line: dict[str, Any]) -> str:
    """The limit of a measure as text, with the aim."""
    text = number(line["at_most"], line["unit"])
    return text if line["aim"] is None else f"{text} (aim {number(line['aim'], line['unit'])})"


def span(line: dict[str, Any]) -> str:
    """From the least to the largest of the rounds, as text."""
    value = line["value"]
    if value is None or value["min"] == value["max"]:
        return ""
    return f"{number(value['min'], line['unit'])} – {number(value['max'], line['unit'])}"


def median(line: dict[str, Any]) -> str:
    """The figure of a measure as text."""
    return "" if line["value"] is None else number(line["value"]["median"], line["unit"])


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows as columns of text, the first `left` of them flush left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    )


def measures_text(lines: Sequence[dict[str, Any]]) -> str:
    """The table of measures for a terminal; what was not measured is left out."""
    rows = [("measure", "median", "min – max", "at most", "")]
    rows += [(m["title"], median(m), span(m), limit(m), m["verdict"]) for m in lines if m["verdict"] != NOT_MEASURED]
    return aligned(rows)


def case_text(measured: dict[str, Any]) -> str:
    """The times of one case for a terminal."""
    rows = [(measured["title"], "median", "min", "max", "norm off by")]
    for timing in measured["timings"].values():
        error = timing["norm_error"]
        rows.append(
            (
                "  " + timing["title"],
                *(duration(timing[key]) for key in ("median_us", "min_us", "max_us")),
                "" if error is None else f"{error:.0e}",
            )
        )
    rows += [(f"  {name}: {reason}", "", "", "", "") for name, reason in measured["left_out"].items()]
    return aligned(rows)


def step_text(measured: dict[str, Any]) -> str:
    """The times of one kind of whole step for a terminal."""
    rows = [(measured["title"], "median", "min", "max")]
    for key, title in (
        ("plain_us", "unguarded"),
        ("clip_us", "with torch clip_grad_norm_"),
        ("guarded_us", "guarded"),
        ("clip_adds_us", "clip_grad_norm_ adds"),
        ("guarded_adds_us", "guarding adds"),
    ):
        spread = measured[key]
        rows.append(("  " + title, duration(spread["median"]), duration(spread["min"]), duration(spread["max"])))
    return aligned(rows)
