"""`fastguard.preflight`: the checks that an expert makes before a training begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..._text import did_you_mean
from ...diagnosis import CAUSES, RULES, Finding, diagnose
from ...diagnosis.finding import Seen
from ...diagnosis.registry import CHECKS as CHECKS
from ...diagnosis.registry import Rule, rule
from ...records import values
from ...records.failures import Failures
from ...report import Report, Status
from ...report.report import not_checked
from ...report.text import num_of_each
from ..bench import set_up
from .evidence import Evidence
from .losses import chance

_TRIAL = 3  # depth of the trial steps' findings, which follow from anything else
_ONLY_HERE = {
    "samples-mixed": "A sample's output depends on the other samples of its batch.",
    "shape-mismatch": "Shapes do not fit together in the first step.",
    "error-in-first-step": "The first step raises an error.",
}


def check(
    name: str, *, cause: str, like: str = "", **about: Any
) -> Callable[[Callable[..., Finding | Seen | None]], Rule]:
    """Registers a check, a function of an `Evidence` that speaks for `cause` and has the remedy of the rule `like`."""
    summary = _ONLY_HERE.get(cause) or CAUSES[cause].summary
    about.setdefault("remedy", RULES[like].remedy if like else "")
    return rule(name, stage="before", cause=(cause, summary), **about)


def find_causes(findings: Iterable[Finding]) -> list[Finding]:
    """The root causes, the most severe and surest first, each with the findings it explains as `symptoms`.

    The shallowest finding names a cause, the most severe and surest among equals. Deeper ones follow from it and name
    no cause, unless they are critical, it is not, and they do not come from trial steps.
    """
    left = [f for f in findings if f.severity != "info"]
    causes = []
    depths = {name: one.depth for name, one in CHECKS.items()}
    spoken_for = {id(f): str(f.evidence.get("cause", (CHECKS[f.rule].cause or ("",))[0])) for f in left}
    while left:
        first = min(left, key=lambda f: (depths[f.rule], *(-part for part in f.weight)))
        name = spoken_for[id(first)]
        reasons = sorted((f for f in left if spoken_for[id(f)] == name), key=lambda f: f.weight, reverse=True)
        deeper = [f for f in left if f not in reasons and depths[f.rule] > depths[first.rule]]
        followed = [f for f in deeper if f.weight[0] <= reasons[0].weight[0] or depths[f.rule] >= _TRIAL]
        left = [f for f in left if f not in reasons and f not in followed]
        causes.append(
            Finding(
                _ONLY_HERE.get(name) or CAUSES[name].summary,
                severity=reasons[0].severity,
                layers=next((f.layers for f in reasons if f.layers), ()),
                evidence={"speaks_for_it": [f.rule for f in reasons]},
                confidence=1.0 - math.prod(1.0 - f.confidence for f in reasons),
                recommendation=reasons[0].recommendation,
                rule=name,
                link=f"docs/rules/causes.md#{name}" if name in CAUSES else reasons[0].link,
                symptoms=(*reasons, *followed),
            )
        )
    return sorted(causes, key=lambda one: one.weight, reverse=True)


@dataclass(frozen=True, slots=True, repr=False)
class PreflightReport(Report):
    """A `Report` of checks instead of steps: `numbers` has counts, the first loss, and the loss at each rate."""

    def __str__(self) -> str:
        lines = [Report.__str__(self), ""]
        numbers = self.numbers
        if "loss" in numbers:
            chance = f"; the chance level is {numbers['chance']:.4g}" if "chance" in numbers else ""
            lines.append(f"{'loss at the start':<22}{numbers['loss']:.4g}{chance}")
        rates = [(key, value) for key, value in numbers.items() if key.startswith("loss at lr ")]
        for place, (key, value) in enumerate(rates):
            head = f"after {numbers['num_trial_steps']:g} steps" if not place else ""
            lines.append(f"{head:<22}{value:.4g} at lr {key.removeprefix('loss at lr ')}")
        lines.append(f"{'checked':<22}{numbers['num_checks']:g} checks in {numbers['seconds']:.2g} s")
        return "\n".join(lines)

    def _verdict(self) -> str:
        return f"{self.status.upper()} before the first step: {num_of_each(self.findings)}"


def preflight(
    model: torch.nn.Module,
    optimizer: Any,
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    num_batches: int = 3,
    num_steps: int = 60,
    seconds: float = 3.0,
    checks: Iterable[str] | None = None,
    thresholds: Mapping[str, Mapping[str, float]] | None = None,
) -> Report:
    """Checks a training before its first step, as an expert would, and changes nothing.

    It checks the output against the loss, the first loss against chance, inputs and targets, which parameters the
    gradient and the optimizer reach, the initial scale of each layer, settings, modes and precision. Then it trains on
    a few batches at the given learning rate and at a hundredth to a hundred times it: the rate may be too low or too
    high, or the model unable to learn. docs/guide/preflight.md lists the checks.

    Model and optimizer are restored bit for bit, also after an error or Ctrl-C: parameters, buffers, gradients,
    optimizer state, modes, and Python attributes that are plain data. So are random generators. A guard sees nothing.

    Args:
        model: the model, on its device, in training mode.
        optimizer: its optimizer, guarded or not.
        loss_fn: `loss_fn(model(inputs), targets)` for batches that are pairs, or `loss_fn(model, batch)`. If its first
            parameter is called `model` or annotated as a module, it is the second form. Otherwise the first form is
            tried, and the second if it raises. The model gets inputs that are a dict as keywords, and a list or tuple
            as arguments.
        batch: one batch (a tensor, a dict, a tuple, a list with tensors) or a source of batches: a DataLoader, a list
            of pairs. Not an iterator, which would be used up.
        num_batches: number of batches to take.
        num_steps: largest number of trial steps at each learning rate.
        seconds: approximate time for all trial steps. Slow models take fewer steps, but at least ten at each rate.
        checks: names of the checks to make; all by default.
        thresholds: other thresholds by check, like `{"dead-units-at-start": {"share": 0.9}}`.

    Returns:
        A `Report`: `causes` with their findings; `numbers` with the first loss, and the loss after the
        trial steps at each learning rate.

    Raises:
        TypeError: `model`, `optimizer`, `loss_fn` or `batch` has another type; a check does not have that threshold.
        ValueError: unknown check; `batch` is empty or an iterator; a number is below 1.

    Cost: `num_batches` forward and backward passes, then about 5 · `num_steps` training steps, or 8 · `num_steps` if
        nothing is learnt; memory for two copies of parameters and optimizer state. Synchronises.

    Source: Karpathy 2019, "A recipe for training neural networks"; Zhang et al. 2021 (AUTOTRAINER), Schoop et al. 2021
    (UMLAUT), Wardat et al. 2022 (DeepDiagnosis) for many of the checks; each names its own.

    >>> import torch, fastguard
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(dim=1))
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    >>> batch = torch.randn(32, 4), torch.randint(3, (32,))
    >>> report = fastguard.preflight(model, optimizer, torch.nn.CrossEntropyLoss(), batch, num_steps=10)
    >>> report.status, report.causes[0].rule, report.causes[0].symptoms[0].rule
    ('critical', 'wrong-output-layer', 'softmax-before-cross-entropy')
    """
    names = [checks] if isinstance(checks, str) else list(CHECKS if checks is None else checks)
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"`checks` must name checks, got {name!r}. {did_you_mean(name, CHECKS)}")
    asked = [CHECKS[name] for name in names]
    values.at_least(1, "num_batches", num_batches)
    values.at_least(1, "num_steps", num_steps)
    values.positive("seconds", seconds, "It is about how long the trial steps may take.")
    started = time.perf_counter()
    failures = Failures()
    with set_up(model, optimizer, loss_fn, batch, num_batches) as (bench, batches):
        evidence = Evidence(bench, batches, max_steps=num_steps, seconds=seconds)
        found = diagnose(evidence, rules=asked, thresholds=thresholds, failures=failures)  # type: ignore[arg-type]
        numbers = _numbers(evidence)
    causes = find_causes(found)
    numbers |= {"num_checks": len(asked), "num_failed": len(failures), "seconds": time.perf_counter() - started}
    found += not_checked(list(failures), len(asked))
    status: Status = next((f.severity for f in found if f.severity != "info"), "healthy")
    told = dict.fromkeys(one.recommendation for one in (*causes, *found) if one.recommendation)
    return PreflightReport(status, tuple(found), list(told), numbers, tuple(causes))


def _numbers(evidence: Evidence) -> dict[str, float]:
    answer, fit = (evidence.__dict__.get(name) for name in ("answer", "fit"))  # if a check has asked for them
    known: dict[str, float | None] = {
        "num_steps": 0,
        "num_records_lost": 0,
        "num_batches": len(evidence.batches),
        "loss": evidence.first.loss if math.isfinite(evidence.first.loss) else None,
        "chance": None if evidence.call is None or not evidence.is_single_loss else chance(evidence.call),
        "constant_answer": evidence.baseline,
        "loss_was_asked": None if answer is None else not answer.abstained,
        "num_trial_steps": None if fit is None else fit.given.num_steps,
    }
    rates = () if fit is None else sorted(fit.attempts.values(), key=lambda one: one.lr)
    known |= {f"loss at lr {one.lr:.3g}": one.end for one in rates}
    return {name: value for name, value in known.items() if value is not None}
