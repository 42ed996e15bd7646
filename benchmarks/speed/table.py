"""The measures that fastguard holds itself to: where each stands in the results, its limit, and what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .timing import Spread

Results = dict[str, Any]
REACHED, MISSED, NOT_MEASURED, NO_LIMIT = "reached", "missed", "not measured", "—"
ALONE, BESIDE = "alone", "beside"  # a busy core
READS = ("read", "read-prefetch")


class Predicted(NamedTuple):
    """What was expected before it was measured, and from what it follows."""

    value: float
    reason: str
    beside: float | None = None


@dataclass(frozen=True)
class Measure:
    """One line of the table.

    Attributes:
        path: where the figure stands in a part's results: the part, then the keys.
        at_most: the limit on the median of the figure taken alone; None for what is only told.
        aim: what we would like to see.
    """

    key: str
    title: str
    path: tuple[str, ...]
    at_most: float | None = None
    aim: float | None = None
    unit: str = ""
    predicted: Predicted | None = None

    def value(self, results: Results, condition: str = ALONE) -> Spread | None:
        """The figure; None if the results do not have it."""
        part, *keys = self.path
        return _spread(results, part, condition, *keys)

    def verdict(self, results: Results) -> str:
        """Whether the median keeps to the limit."""
        value = self.value(results)
        if value is None:
            return NOT_MEASURED
        if self.at_most is None:
            return NO_LIMIT
        return REACHED if value.median <= self.at_most else MISSED


class AgainstRead(Measure):
    """A ratio against whichever of the plain read streams was quicker."""

    def value(self, results: Results, condition: str = ALONE) -> Spread | None:
        found = [_spread(results, self.path[0], condition, read, "ratio") for read in READS]
        return max((spread for spread in found if spread is not None), default=None)


def _spread(results: Results, part: str, condition: str, *keys: str) -> Spread | None:
    found: Any = results.get("parts", {}).get(part, {})
    for key in (condition, *keys):
        found = found.get(key) if isinstance(found, dict) else None
    return None if found is None else Spread(**found)


_STEP = "guarding a step / what clip_grad_norm_ adds to it"
_CLIP = "clip: ours / torch's"
_GPT2 = "GPT-2 124M float32"
MEASURES = (
    Measure(
        "step-mlp",
        f"{_STEP}, MLP of 101k parameters",
        ("step-mlp", "ratio"),
        0.15,
        0.12,
        predicted=Predicted(
            0.25,
            "51 us today, some forty Python calls that run cold at three times what they cost in a loop; the "
            "prototype's way (a hook, one C++ call, no object) is a third of them: 20 to 25 us of torch's 95",
            0.30,
        ),
    ),
    Measure(
        "step-mlp-jsonl",
        f"{_STEP}, MLP, each loss observed and each record written as JSON lines",
        ("step-mlp-jsonl", "ratio"),
        0.40,
        predicted=Predicted(
            0.45, "on top of it 10 us hot, 20 cold, for dict, JSON and write; three norms fewer (2 us)", 0.55
        ),
    ),
    Measure(
        "step-mlp-mean",
        f"{_STEP}, MLP of 101k parameters, mean",
        ("step-mlp", "mean", "ratio"),
        0.22,
        predicted=Predicted(
            0.22,
            "0.53 today, half of it in the tenth of the steps that deliver, look or check; on multiples of 32 and in "
            "C++ these come to 0.06",
        ),
    ),
    Measure(
        "step-mlp-jsonl-mean",
        f"{_STEP}, MLP, each loss observed and each record written as JSON lines, mean",
        ("step-mlp-jsonl", "mean", "ratio"),
        0.60,
        predicted=Predicted(0.55, "0.80 today; formatting and one write a step remain, and they are 0.12 to 0.15"),
    ),
    Measure(
        "step-mlp-first",
        f"{_STEP}, MLP, each loss observed, mean over the first 1000 steps",
        ("step-mlp-first", "mean", "ratio"),
        0.35,
        predicted=Predicted(
            0.35, "0.74 to 0.98 today; eight looks at the loss's gradient and fifty at batches fall from 0.15 to 0.02"
        ),
    ),
    Measure(
        "script-5ms",
        "a training of 1000 steps of 5 ms, guarded / not, from end to end",
        ("script-5ms", "ratio"),
        1.03,
        predicted=Predicted(1.02, "a third of a clip, 30 us, and the first look of each kind"),
    ),
    Measure(
        "script-0.5ms",
        "the same, with steps of 0.5 ms",
        ("script-0.5ms", "ratio"),
        1.08,
        predicted=Predicted(1.08, "a third of a clip is 6 % of such a step"),
    ),
    Measure(
        "clip-300x1000",
        f"{_CLIP}, 300 tensors × 1000, not clipping",
        ("300x1000", "ratio"),
        0.09,
        0.07,
        predicted=Predicted(
            0.09,
            "0.11 today; of 120 us some 40 go to finding `.grad` before reading: one loop saves half of them",
            0.10,
        ),
    ),
    Measure(
        "clip-3000x64",
        f"{_CLIP}, 3000 tensors × 64, not clipping",
        ("3000x64", "ratio"),
        0.08,
        predicted=Predicted(0.13, "0.17 today, half `.grad` and half reading: one loop while the lines are near", 0.14),
    ),
    Measure(
        "clipping-300x1000",
        f"{_CLIP}, 300 tensors × 1000, clipping at every step",
        ("300x1000-clipping", "ratio"),
        0.12,
        predicted=Predicted(
            0.12, "the walk over the views that scaling repeats goes, the 1.2 MB are in the second cache by then", 0.13
        ),
    ),
    Measure(
        "clipping-3000x64",
        f"{_CLIP}, 3000 tensors × 64, clipping at every step",
        ("3000x64-clipping", "ratio"),
        0.18,
        predicted=Predicted(
            0.17, "without Python a tensor (1.6 ms to 0.75 in a copy), as reading plus a quarter for writing", 0.18
        ),
    ),
    Measure(
        "clip-gpt2",
        f"{_CLIP}, {_GPT2}, not clipping",
        ("gpt2-float32", "ratio"),
        0.36,
        predicted=Predicted(
            0.38,
            "0.39 today, by the memory's speed: nothing here reads less. Beside a busy core the half of a thread "
            "that is not running is waited for; torch's norm of one tensor has one thread anyway",
            0.55,
        ),
    ),
    Measure(
        "clip-gpt2-bfloat16",
        f"{_CLIP}, GPT-2 124M bfloat16, not clipping",
        ("gpt2-bfloat16", "ratio"),
        0.38,
        predicted=Predicted(0.42, "0.43 today, as above", 0.60),
    ),
    Measure(
        "adamw-grad-scale",
        f"clip and fused AdamW step: ours through grad_scale / torch's, {_GPT2}, clipping at every step",
        ("adamw", "grad_scale", "ratio"),
        0.92,
        predicted=Predicted(
            0.91, "by traffic 9 units against 10, and torch's norm takes one thread where ours has two", 0.93
        ),
    ),
    Measure(
        "adamw-scale",
        f"clip and fused AdamW step: ours through a pass that scales / torch's, {_GPT2}, clipping at every step",
        ("adamw", "scale", "ratio"),
        predicted=Predicted(0.97, "by traffic 10 against 10; clipping alone is 0.93 and a fifth of the step", 0.98),
    ),
    Measure(
        "further-tensor",
        "cost of a further tensor, 10 000 tensors × 1",
        ("further-tensor", "ours_ns"),
        150.0,
        unit="ns",
        predicted=Predicted(
            190.0, "258 before; the second walk took 60 to 80. A dozen cold cache lines a tensor remain", 220.0
        ),
    ),
    Measure(
        "frames-cpu",
        "Python frames of fastguard in a clean step on the CPU, with its forward pass",
        ("frames-cpu", "clean"),
        2.0,
        unit="frames",
        predicted=Predicted(5.0, "two hooks, the switch that keeps torch.compile out, the ring's turn"),
    ),
    Measure(
        "frames-cpu-mean",
        "Python frames of fastguard in a step on the CPU, mean of 256 with what is delivered and diagnosed in them",
        ("frames-cpu", "mean"),
        12.0,
        unit="frames",
        predicted=Predicted(20.0, "history takes 32 steps at a time, as it does today; the rules run at every 50th"),
    ),
    Measure(
        "frames-gpu",
        "Python frames of fastguard in a clean step on the GPU path, in Triton's interpreter",
        ("frames-gpu", "clean"),
        60.0,
        unit="frames",
        predicted=Predicted(55.0, "a cached route saves some 30 frames; there is one judge less"),
    ),
    Measure(
        "memory-guarding-10000x1",
        "extra memory of guarding 10 000 tensors",
        ("memory-10000x1", "guarding_bytes"),
        2.5e6,
        unit="bytes",
        predicted=Predicted(
            2.6e6,
            "two tables of 64 bytes a tensor (1.3 MB), a track of 112 bytes (1.1 MB), and the list of the names",
        ),
    ),
    Measure(
        "package-lines",
        "lines of Python in the package",
        ("package-lines", "lines"),
        35_635.0,
        unit="lines",
        predicted=Predicted(21_000.0, "the design's 20 900, and some; then came what keeps it upright"),
    ),
    AgainstRead(
        "read",
        f"one pass / plain read stream of the same bytes, {_GPT2}",
        ("one-pass",),
        1.25,
        1.1,
        predicted=Predicted(1.08, "unchanged", 1.10),
    ),
    Measure(
        "separate-ops",
        f"all statistics: ours / separate torch ops, {_GPT2}",
        ("statistics", "separate-ops", "ratio"),
        0.02,
        predicted=Predicted(0.011, "unchanged"),
    ),
    Measure(
        "clipping-gpt2",
        f"{_CLIP}, {_GPT2}, clipping at every step",
        ("gpt2-float32-clipping", "ratio"),
        0.80,
        predicted=Predicted(0.92, "0.93 today: the same bytes on both sides, as in the round before", 0.95),
    ),
    *(
        Measure(
            f"memory-{kind}-{part}",
            f"extra memory of {what}, {title}",
            (f"memory-{part}", f"{kind}_bytes"),
            256.0 * num_tensors + 2**20,
            unit="bytes",
        )
        for kind, what, part, title, num_tensors in (
            ("clip", "fastguard.clip_grad_norm_", "10000x1", "10 000 tensors × 1", 10_000),
            ("clip", "fastguard.clip_grad_norm_", "gpt2", _GPT2, 148),
            ("guarding", "guarding", "gpt2", _GPT2, 148),
        )
    ),
    Measure(
        "kept-10000x1",
        "kept by each record in a MemorySink, 10 000 tensors",
        ("memory-10000x1", "kept_bytes"),
        unit="bytes",
    ),
    Measure("clip-resnet50", f"{_CLIP}, ResNet-50, not clipping", ("resnet50", "ratio")),
    Measure("step-transformer", f"{_STEP}, transformer of 4.8M parameters", ("step-transformer", "ratio")),
    Measure(
        "fresh-300x1000", f"{_CLIP}, 300 tensors × 1000, first call after a backward pass", ("300x1000-fresh", "ratio")
    ),
    Measure(
        "fresh-3000x64", f"{_CLIP}, 3000 tensors × 64, first call after a backward pass", ("3000x64-fresh", "ratio")
    ),
    Measure("further-tensor-torch", "cost of a further tensor of torch's", ("further-tensor", "theirs_ns"), unit="ns"),
    Measure("toolkit", f"all statistics: ours / the toolkit's numpy, {_GPT2}", ("statistics", "toolkit", "ratio")),
    Measure("norm", f"get_total_norm: ours / torch's, {_GPT2}", ("norm", "torch-norm", "ratio")),
    Measure("memcpy", f"one pass / memcpy of the same bytes, {_GPT2}", ("one-pass", "memcpy", "ratio")),
)


def number(value: float | None, unit: str) -> str:
    """A figure of the table as text."""
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / 1e6:.2f} MB" if value >= 1e6 else f"{value / 1e3:,.0f} kB"
    if unit:
        return f"{value:,.0f} ns" if unit == "ns" else f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"  # two digits that count


def median(value: Spread | None, unit: str) -> str:
    """The figure as text; nothing if there is none."""
    return "" if value is None else number(value.median, unit)


def span(value: Spread | None, unit: str) -> str:
    """From the least to the largest of the rounds, as text."""
    if value is None or value.min == value.max:
        return ""
    return f"{number(value.min, unit)} – {number(value.max, unit)}"


def limit(measure: Measure) -> str:
    """The limit as text, with the aim."""
    text = number(measure.at_most, measure.unit)
    return text if measure.aim is None else f"{text} (aim {number(measure.aim, measure.unit)})"


HEADER = ("measure", "median", "min – max", "beside a busy core", "at most", "")


def row(measure: Measure, results: Results) -> tuple[str, ...]:
    """The cells under `HEADER`."""
    value, unit = measure.value(results), measure.unit
    beside = median(measure.value(results, BESIDE), unit)
    return measure.title, median(value, unit), span(value, unit), beside, limit(measure), measure.verdict(results)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of text, the first flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(cells, widths))).rstrip()
        for cells in rows
    )


def text(results: Results, chosen: Callable[[Measure], bool] = lambda measure: True) -> str:
    """The table of measures for a terminal; what was not measured is left out."""
    rows: Iterable[Measure] = (m for m in MEASURES if chosen(m) and m.verdict(results) != NOT_MEASURED)
    return aligned([HEADER, *(row(m, results) for m in rows)])
