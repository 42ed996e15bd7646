"""Results as tables: for the terminal, and for the page."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from ..readme import Results, markdown
from .trial import CLOSE, Verdict

Record = dict[str, Any]

_KEPT = 6  # differences that are written down; the rest is counted
_HEADER = ("package", "version", "classes", "run", "idle", "skip", "clip", "clip as torch")


def brief(verdict: Record) -> Record:
    """A verdict without what is empty, and of long lists the beginning."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items() if item}
        if isinstance(value, list) and len(value) > _KEPT:
            return [*value[:_KEPT], f"and {len(value) - _KEPT} more"]
        return value

    kept = {key: cut(value) for key, value in verdict.items()}
    return {key: value for key, value in kept.items() if value not in (None, "", [], {}) and (key, value) not in _USUAL}


_USUAL = (("gradients_kept", True),)


def record(verdict: Verdict) -> Record:
    """A verdict as it is written down."""
    return brief(dataclasses.asdict(verdict))


def _runs(verdict: Record) -> bool:
    return "unusable" not in verdict


def failures(verdict: Record) -> dict[str, str]:
    """What does not hold for a class that runs, with the first sign of it."""
    if not _runs(verdict):
        return {}
    if "refused" in verdict:
        return {"refused": verdict["refused"]}
    found = {}
    for name, different in verdict.get("idle", {}).items():
        found.setdefault("idle", f"{name}: {_first(different)}")
    if "skip" in verdict:
        found["skip"] = _first(verdict["skip"])
    elif "skip_after" in verdict:
        found["skip"] = f"later steps: {_first(verdict['skip_after'])}"
    elif "skip_first_after" in verdict:
        found["skip"] = f"after a skipped first step: {_first(verdict['skip_first_after'])}"
    elif "skip_first" in verdict:
        found["skip"] = f"in the first step: {_first(verdict['skip_first'])}"
    if "clip" in verdict:
        found["clip"] = _first(verdict["clip"])
    return found


def _first(different: Sequence[str]) -> str:
    return different[0] + (f" and {len(different) - 1} more" if len(different) > 1 else "")


def _is_close(verdict: Record) -> bool:
    return "clip_torch" not in verdict or verdict["clip_torch"] <= CLOSE


def counts(verdicts: Iterable[Record]) -> dict[str, int]:
    """How many classes there are, run, and hold each promise."""
    verdicts = list(verdicts)
    run = [v for v in verdicts if _runs(v)]
    bad = [failures(v) for v in run]
    clip = [v for v, f in zip(run, bad) if not {"clip", "refused"} & f.keys() and "clip_unknown" not in v]
    return {
        "classes": len(verdicts),
        "run": len(run),
        "idle": sum(not {"idle", "refused"} & f.keys() for f in bad),
        "skip": sum(not {"skip", "refused"} & f.keys() for f in bad),
        "clip": len(clip),
        "close": sum(map(_is_close, clip)),
    }


def _all(results: Results) -> list[tuple[str, Record]]:
    """All verdicts, with package and class in words."""
    packages = results["packages"].items()
    return [(f"{name}: {label(p, v)}", v) for name, p in packages for v in p.get("verdicts", ())]


def _row(name: str, package: Record) -> tuple[str, ...]:
    if "missing" in package:
        return name, "not installed", *[""] * 6
    return name, package.get("version", ""), *map(str, counts(package["verdicts"]).values())


def label(package: Record, verdict: Record) -> str:
    """The name of a class, with its module where another of the package has the name too."""
    name = verdict["name"]
    if sum(v["name"] == name for v in package["verdicts"]) == 1:
        return name
    return f"{verdict['module'].split('.')[-1]}.{name}"


def rows(results: Results) -> list[tuple[str, ...]]:
    """A row a package, and one for all."""
    total = counts(v for _, v in _all(results))
    each = [_row(name, package) for name, package in results["packages"].items()]
    return [*each, ("all", "", *map(str, total.values()))]


def text(results: Results) -> str:
    """The table for a terminal, with what does not hold below it."""
    cells = [_HEADER, *rows(results)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
             for row in cells]  # fmt: skip
    for name, verdict in _all(results):
        for what, sign in failures(verdict).items():
            lines.append(f"{what}: {name}: {sign}")
    return "\n".join(lines)


def one_line(package: Record) -> str:
    """A package while the suite runs."""
    if "missing" in package:
        return f"{package['package']}: not installed: {package['missing']}"
    c = counts(package["verdicts"])
    return (
        f"{package['package']}: {c['run']} of {c['classes']} classes run; idle {c['idle']}, skip {c['skip']}, "
        f"clip {c['clip']}; {package['cpu_seconds']:.0f} s of CPU time"
    )


def changes(earlier: Results, now: Results) -> list[str]:
    """Classes for which something else holds than did in `earlier`."""

    def signs(results: Results) -> dict[str, tuple[str, ...]]:
        return {name: tuple(failures(v)) if _runs(v) else ("unusable",) for name, v in _all(results)}

    before, after = signs(earlier), signs(now)
    return [
        f"{name}: {', '.join(before.get(name, ('not there',))) or 'held'} -> {', '.join(sign) or 'holds'}"
        for name, sign in after.items()
        if sign != before.get(name)
    ]


def _table(results: Results) -> list[str]:
    return [*markdown(_HEADER, rows(results)), "", conditions(results)]


def conditions(results: Results) -> str:
    """What it was measured with, in a sentence."""
    c, cpu_s = results["conditions"], sum(p.get("cpu_seconds", 0.0) for p in results.get("packages", {}).values())
    return (
        f"fastguard {c['fastguard']} ({c['commit'] or 'commit unknown'}), torch {c['torch']}, Python {c['python']}, "
        f"{c['cpu']}, {c['date']}; {cpu_s / 60:.0f} minutes of CPU time."
    )


def _code(message: str) -> str:
    return "`" + message.replace("`", "'").replace("|", "\\|") + "`"


def _what_does_not_hold(results: Results) -> list[str]:
    found = [(name, what, _code(sign)) for name, verdict in _all(results) for what, sign in failures(verdict).items()]
    return markdown(("class", "what", "first sign"), found, 2) if found else ["Nothing."]


def _far_from_torch(results: Results) -> list[str]:
    found = [
        (name, f"{v['clip_torch']:.1e}", f"{v['clip_torch_ulp']:.1e}") for name, v in _all(results) if not _is_close(v)
    ]
    return markdown(("class", "to torch's clip", "torch's to itself, two ulps away"), found) if found else ["None."]


def _not_run(results: Results) -> list[str]:
    found = [
        (name, _code(v["unusable"]) + (f" ({v['note']})" if "note" in v else ""))
        for name, v in _all(results)
        if not _runs(v)
    ]
    return markdown(("class", "reason"), found, 1) if found else ["None."]


TABLES = {
    "optimizers": _table,
    "failures": _what_does_not_hold,
    "far": _far_from_torch,
    "unusable": _not_run,
}
