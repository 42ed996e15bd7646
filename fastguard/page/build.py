"""From runs to the text of a page."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .._text import NAME_WIDTH, listed, number, shown
from ..diagnosis import RULES, Rule
from ..records.log import LogReader
from ..report import Report, build_report
from ..report.report import steps_of
from ..report.tables import number_rows
from ..report.whole_file import write_whole
from ..visualization.runs import DrawnRun
from ..visualization.runs import runs_of as runs_of
from . import parts

_ASSETS = importlib.resources.files(__name__.rpartition(".")[0]) / "assets"
_NUM_STATIC_ROWS = 100
_FACTS = ("clip_limit", "clip_policy", "autocast", "dtypes", "backward_per_step", "steps_per_epoch", "loss_kind")
_WORDS = {
    "lr": "learning rate",
    "val": "validation",
    "coef": "coefficient",
    "std": "standard deviation",
    "rms": "root mean square",
    "nonfinite": "not finite",
    "threshold": "limit",
    "nans": "NaN",
    "infs": "Inf",
    "us": "(us)",
}
_Step = tuple[int, dict[str, Any]]


def build_page(source: Any, *, title: str = "", command: str = "") -> str:
    """The page, as text.

    Args:
        source: as for the figures: a guard, a history, the path of a log, or up to eight in a list, or in a dict by
            name; the others are compared with the first.
        title: title of the page; by default the names of the runs.
        command: the command that made the page, for the footer.

    Raises:
        ImportError: plotly or Jinja2 is missing.
        TypeError, ValueError, OSError: as for the figures.

    Cost: for a log, one pass over it. The page contains plotly, compressed to 2 MB, and at most about 1 MB more.
    """
    _environment()
    runs = runs_of(source)
    reports = [build_report(run.history) if run.guard is None else run.guard.report() for run in runs]
    return render(runs, reports, title or ", ".join(run.name for run in runs), command)


def _environment() -> Any:
    """Jinja2's environment; an ImportError says how to install missing packages."""
    try:
        import jinja2
        import plotly  # noqa: F401
    except ImportError as error:
        raise ImportError("the page of a run needs plotly and Jinja2: pip install fastguard[report]") from error
    neat: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, finalize=_printable, **neat)


def render(runs: Sequence[DrawnRun], reports: Sequence[Report], title: str, command: str = "") -> str:
    """The page of some runs and the report on each."""
    environment = _environment()
    from plotly import offline

    plotly, early, late = offline.get_plotlyjs(), _asset("early.js"), _asset("page.js")
    # Scripts are allowed by hash. plotly needs inline styles, which have nowhere to load anything from.
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, (early, plotly, late)))}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    charts, left_out = parts.charts_of(runs, reports[0].findings)
    names = parts.tensor_names(runs[0], reports[0].findings)
    tensors, modules = parts.tensor_rows(runs[0], names), parts.module_rows(reports[0])
    # These follow the first paint. Each is one compressed text, so that a chart costs nothing before it is drawn.
    packed = {f"chart-{chart.name}": _packed(_json(chart.figure).encode()) for chart in charts}
    ribbon = runs[0].ribbon
    packed["ribbon"] = _packed(bytes(ribbon.states))
    packed["tensors"] = _packed(_json(tensors["rows"]).encode())
    packed["lines"] = _packed(_json(parts.tensor_lines(runs[0], names)).encode())
    packed["plotly"] = _packed(plotly.encode())
    data: dict[str, Any] = {
        "clocks": [parts.clock(run) for run in runs],
        "ribbon": {"first": ribbon.first_step, "width": ribbon.width, "looks": list(parts.LOOKS.values())},
        "charts": [{"name": chart.name, "height": chart.height, "group": chart.group} for chart in charts],
    }
    environment.filters["number"] = number
    return str(
        environment.from_string(_asset("page.html")).render(
            title=title,
            command=command,
            policy=policy,
            style=_trusted(_asset("page.css")),
            early=_trusted(early),
            late=_trusted(late),
            data=_trusted(_json(data)),
            packed=packed,
            runs=[
                {
                    "run": run,
                    "report": report,
                    "cards": cards_of(report),
                    "verdict": str(report).splitlines()[0],
                    "key_numbers": parts.key_numbers(run, report),
                    "numbers": number_rows(report.numbers, report.sinks),
                    "ribbon": parts.ribbon_svg(run),
                }
                for run, report in zip(runs, reports)
            ],
            is_timed=all(steps for steps, _ in data["clocks"]),
            charts=[chart for chart in charts if not chart.group],
            maps=[chart for chart in charts if chart.group],
            left_out=left_out,
            infections=parts.infection(runs[0]),
            tensors=tensors["rows"][:_NUM_STATIC_ROWS],
            num_tensors=len(names),
            columns=tensors["columns"],
            modules=modules,
            parting=[parting(runs[0], run) for run in runs[1:]],
            differences=differences(runs, reports),
            looks=parts.LOOKS,
        )
    )


def overview(report: Report, source: Any) -> str | None:
    """Verdict, key numbers and findings as HTML without scripts, for a notebook; None without Jinja2."""
    try:
        environment = importlib.import_module("jinja2").Environment(autoescape=True, finalize=_printable)
    except ImportError:
        return None
    try:
        runs = [] if source is None else runs_of(source)
    except (ValueError, OSError):  # there is no step, or the log is gone: the findings are still here
        runs = []
    environment.filters["where"] = lambda one: ", ".join(filter(None, (steps_of(one), listed(one.layers))))
    environment.filters["shown"] = lambda text: shown(text, 2000)
    return str(
        environment.from_string(_asset("notebook.html")).render(
            report=report,
            verdict=str(report).splitlines()[0],
            numbers=[row for run in runs for row in parts.key_numbers(run, report).items()],
        )
    )


def save_page(page: str, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Writes `page` completely or not at all. Writes into the target of a link, and into a device or pipe directly.

    Raises:
        FileExistsError: `path` exists, if only as a broken link, and `force` is false.
        OSError: the page cannot be written.
    """
    path = Path(path)
    if os.path.lexists(path) and not force:
        raise FileExistsError(f"{path} exists already: use --force to overwrite it")
    if path.exists() and not path.is_file():  # a rename would replace it by a file, even /dev/null as root
        path.write_text(page, encoding="utf-8", newline="\n")
        return path
    write_whole(Path(os.path.realpath(path)), lambda file: file.write(page.encode()))
    return path


def cards_of(report: Report) -> list[dict[str, Any]]:
    """The findings of the report, in its order, each with its number on the charts."""
    return [
        {
            "number": place,
            "finding": one,
            "summary": shown(one.summary, 2000),
            "steps": steps_of(one),
            "layers": "" if all(name in one.summary for name in one.layers) else listed(one.layers, 8),
            "evidence": [(in_words(key), _in_words(value)) for key, value in one.evidence.items()],
            "rule": RULES.get(one.rule),
            "about": _about(RULES.get(one.rule)),
        }
        for place, one in enumerate(report.findings, 1)
    ]


def _about(rule: Rule | None) -> str:
    """The docstring of a rule, with the values of thresholds in place of their names."""
    if rule is None:
        return ""
    values: dict[str, Any] = dict(rule.thresholds)
    text = " ".join((rule.check.__doc__ or "").split())
    return re.sub(r"`(\w+)`", lambda found: number(values.get(found[1], found[1])), text)


def in_words(key: str) -> str:
    """A key of evidence, or of the numbers of a report, in words.

    >>> in_words("last_num_nans"), in_words("lr"), in_words("is_certain"), in_words("the rule x")
    ('last NaN', 'learning rate', 'certain', 'the rule x')
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
        return shown(key, NAME_WIDTH)
    return " ".join(_WORDS.get(part, part) for part in key.split("_") if part not in ("num", "is"))


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return listed([str(one) for one in value], 8)
    return shown(number(value), NAME_WIDTH)


def _packed(data: bytes) -> str:
    """Compressed, as text; the same for the same data."""
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")


def _json(value: Any) -> str:
    """JSON that is safe inside a script element, whatever names are in it."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _printable(value: Any) -> Any:
    """Text with control characters, surrogates and changes of writing direction escaped; anything else as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__") or value.isprintable():
        return value
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in value)


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _trusted(text: str) -> Any:
    """Text of ours, which must not be escaped."""
    import markupsafe

    return markupsafe.Markup(text)


def parting(base: DrawnRun, run: DrawnRun) -> str:
    """The first step at which loss or norm of `run` and `base` differ. Cost: reads the logs again, up to that step."""
    num, lefts, rights = 0, _steps(base), _steps(run)
    left, right = next(lefts, None), next(rights, None)
    while left is not None and right is not None:
        if left[0] == right[0]:
            for what in ("loss", "norm"):
                one, other = left[1].get(what), right[1].get(what)
                if one != other and repr(one) != repr(other):
                    show = repr if number(one) == number(other) else number  # with enough digits to see it
                    values = f"{what} {show(other)} instead of {show(one)}"
                    return f"{run.name}: differs from {base.name} from step {left[0]} on: {values}"
            num += 1
        at, to = left[0], right[0]
        left = next(lefts, None) if at <= to else left
        right = next(rights, None) if to <= at else right
    if not num:
        return f"{run.name}: no step in common with {base.name}"
    return f"{run.name}: same losses and norms as {base.name} at all {num} steps in common"


def _steps(run: DrawnRun) -> Iterator[_Step]:
    """Loss and norm by step: of a log all steps, else the points of the charts."""
    if run.path is not None:
        log = LogReader(run.path)
        for line in log:
            if "step" in line and log.num_runs == run.num_runs:
                yield line["step"], {"loss": line.get("loss"), "norm": line.get("grad/norm")}
        return
    drawn: dict[int, dict[str, Any]] = {}
    for what in ("loss", "norm"):
        for point in run.curves[what].points:
            drawn.setdefault(point.last_step, {})[what] = point.middle
    yield from sorted(drawn.items())


def differences(runs: Sequence[DrawnRun], reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
    """A row for each number and setting that differs between the runs."""
    keys = dict.fromkeys(key for report in reports for key in report.numbers)
    rows = [(in_words(key), [number(report.numbers.get(key)) for report in reports]) for key in keys]
    settings = [_settings(run) for run in runs]
    rows += [(key, [one.get(key, "-") for one in settings]) for key in dict.fromkeys(k for s in settings for k in s)]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _settings(run: DrawnRun) -> dict[str, str]:
    model = run.history.model
    found = {fact: getattr(model, fact) for fact in _FACTS}
    for place, group in enumerate(model.optimizer_settings[:8]):
        found.update({f"optimizer {key}" + (f", group {place}" if place else ""): one for key, one in group.items()})
    return {key: shown(value, 80) for key, value in found.items() if value not in (None, "", ())}
