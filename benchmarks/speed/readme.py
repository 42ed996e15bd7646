"""Writes the tables of speed into documents from saved results.

    python -m benchmarks.speed.readme benchmarks/results/cpu.json README.md benchmarks/README.md [--check]

`<!-- costs:begin -->` … `<!-- costs:end -->` gets what things cost with torch and with fastguard, `bench` four rows
for the README; `measures` what is held to; `predictions` what was predicted beside what was measured. `--check` writes
nothing and fails if a table is not what the results say.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from .. import machine, readme
from . import table
from .table import ALONE, BESIDE, Results


def duration(us: float) -> str:
    """A time in µs with its unit, to three digits."""
    for factor, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= factor:
            return f"{us / factor:.3g} {unit}" if us < 1e3 * factor else f"{us / factor:,.0f} {unit}"
    return f"{us:.3g} µs"


def conditions(results: Results) -> str:
    """Under what conditions the figures were taken."""
    m = results["machine"]
    parts = results["parts"].values()
    others = max((part["others_ratio"] or 0.0 for part in parts), default=0.0)
    dates = sorted({part["date"] for part in parts} or {m["date"]})
    date = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    noisy = " The machine was busy with other work: the figures are noisy." if others > machine.BUSY_RATIO else ""
    return (
        f"{m['cpu']}, {m['num_cores']} cores, {m['num_threads']} threads, {m['isa'] or 'no extension'}; torch "
        f"{m['torch']}, Python {m['python']}, fastguard {m['fastguard']}, {date}; "
        f"others took at most {others:.1%} of the cores in any part.{noisy}"
    )


def _cost(results: Results, title: str, part: str, *keys: str) -> list[str] | None:
    found = results["parts"].get(part, {})
    alone, beside = found.get(ALONE), found.get(BESIDE)
    for key in keys:
        alone, beside = (side and side.get(key) for side in (alone, beside))
    if not alone:
        return None
    times = [duration(alone[side]["median"]) for side in ("theirs_us", "ours_us")]
    if "plain_us" in alone:  # what is added to a step
        plain = alone["plain_us"]["median"]
        title = f"{title} ({duration(plain)})"
        times = [
            f"+{text} ({alone[side]['median'] / plain:+.0%})"
            for text, side in zip(times, ("theirs_us", "ours_us"), strict=True)
        ]
    ratios = [table.number(side["ratio"]["median"], "") if side and side["ratio"] else "—" for side in (alone, beside)]
    return [title, *times, f"**{ratios[0]}**", ratios[1]]


# What is measured: its title, its part of the results, and where in that part.
COSTS = (
    ("added to a step, MLP of 101k parameters", "step-mlp"),
    ("the same, each loss observed and written as JSON lines", "step-mlp-jsonl"),
    ("clip, 300 tensors × 1000, limit not reached", "300x1000"),
    ("clip, 3000 tensors × 64, limit not reached", "3000x64"),
    ("clip, ResNet-50, limit not reached", "resnet50"),
    ("clip, GPT-2 124M float32, limit not reached", "gpt2-float32"),
    ("clip, GPT-2 124M bfloat16, limit not reached", "gpt2-bfloat16"),
    ("clip, 300 tensors × 1000, clipping at every step", "300x1000-clipping"),
    ("clip, 3000 tensors × 64, clipping at every step", "3000x64-clipping"),
    ("clip, GPT-2 124M float32, clipping at every step", "gpt2-float32-clipping"),
    ("clip and fused AdamW, GPT-2 124M float32, clipping at every step", "adamw", "grad_scale"),
    ("every statistic of every tensor, GPT-2 124M float32", "statistics", "separate-ops"),
)
IN_README = ("step-mlp", "step-mlp-jsonl", "gpt2-float32", "adamw")


def cost_table(results: Results, parts: Sequence[str] = ()) -> list[str]:
    """What things cost with torch and with fastguard, or only what these parts measured, and the conditions."""
    rows = [_cost(results, *each) for each in COSTS if not parts or each[1] in parts]
    header = ("CPU, medians", "torch", "fastguard", "ratio", "beside a busy core")
    return [
        *readme.markdown(header, [row for row in rows if row is not None]),
        "",
        f"Measured on {conditions(results)}",
        "`torch` is `torch.nn.utils.clip_grad_norm_`; the last column is the ratio while another process keeps a core "
        "busy, as a data loader does.",
    ]


def measures_table(results: Results) -> list[str]:
    """The measures that fastguard holds itself to, and the conditions."""
    rows = [table.row(measure, results) for measure in table.MEASURES]
    return [*readme.markdown(table.HEADER, rows), "", f"Measured on {conditions(results)}"]


def predictions_table(results: Results) -> list[str]:
    """What was predicted beside what was measured."""
    rows = []
    for measure in table.MEASURES:
        if measure.predicted is not None:
            value, reason, beside = measure.predicted
            cells = [
                table.number(value, measure.unit),
                table.median(measure.value(results), measure.unit),
                table.number(beside, measure.unit),
                table.median(measure.value(results, BESIDE), measure.unit),
            ]
            rows.append([measure.title, *cells, reason])
    header = ("measure", "predicted", "measured", "predicted, busy", "measured, busy", "because")
    return readme.markdown(header, rows, num_texts_at_end=1)


TABLES: readme.Tables = {
    "bench": functools.partial(cost_table, parts=IN_README),
    "costs": cost_table,
    "measures": measures_table,
    "predictions": predictions_table,
}
main = functools.partial(readme.main, tables=TABLES, prog="python -m benchmarks.speed.readme")

if __name__ == "__main__":
    raise SystemExit(main())
