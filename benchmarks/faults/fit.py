"""Fits the weights of the causes: `python -m benchmarks.faults.fit`.

Of each run in the tuning halves - the own suite's seeds for tuning, the kinds for tuning of the external one - it takes
what speaks for each cause at the end (`fastguard.diagnosis.causes.evidence_for`) and which causes are right; of a sound
run, none. The weights and offsets are those under which the right answers are likeliest, held near the usual ones by a
Gaussian prior, and weights stay above zero: what speaks for a cause never speaks against it. They go to
fastguard/diagnosis/fitted.json. Nothing of the reporting halves is read.

Of the sure causes nearly all are right on these runs, also where kinds are left out of the fit: rules were written
while looking at them, and no fit on them tells how sure one may be elsewhere. So confidences are fitted on what was
told of runs when rules were asked of them for the first time (benchmarks/results/faults-first-asked.json, of sets that
edc0679 has): a logistic regression on a cause's share, on whether its symptoms are of several families, and an offset a
cause, which a Gaussian prior holds near that of all. `--leave-kinds-out` prints how right these confidences are on
kinds and on sets that were left out of their fit, and fits nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fastguard.diagnosis import CAUSES, diagnose, fitted
from fastguard.diagnosis.causes import evidence_for

from . import cases, external
from .alarms import histories
from .external.cases import CASES as EXTERNAL
from .external.score import SURE, calibration_error
from .runs import ROOT, load_or_train

FIRST_ASKED = ROOT / "benchmarks" / "results" / "faults-first-asked.json"
PATH = Path(fitted.__file__).with_name("fitted.json")
LEAST_WEIGHT = 0.5
TRUST_SPREAD = 0.3
Evidence = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Example:
    """A run as the fit sees it.

    Attributes:
        name: of the run.
        evidence: the signs of each cause.
        right: the causes that are right; none of a sound run.
    """

    name: str
    evidence: Evidence
    right: tuple[str, ...]


def examples() -> Iterator[Example]:
    """Every run of the tuning halves that counts."""
    for run, history in external.recorded("tune"):
        truth = EXTERNAL[run.case].truth
        history.has_ended = True
        yield Example(run.case, evidence_for(diagnose(history), history), () if truth is None else truth.causes)
    for case in cases.CASES.values():
        for seed in cases.TUNE_SEEDS:
            run_of_ours = load_or_train(case.name, seed)
            if run_of_ours.is_proven:
                *_, (_, history) = histories(run_of_ours)
                right = () if case.fault is None else case.fault.causes
                yield Example(f"{case.name}/{seed}", evidence_for(diagnose(history), history), right)


def fit(known: list[Example], prior: float, steps: int = 400) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Weights by cause and sign, and offsets by cause.

    Args:
        known: what to fit on.
        prior: one over the variance of a weight around the usual one.
        steps: of LBFGS.
    """
    pairs = sorted({(name, sign) for one in known for name, signs in one.evidence.items() for sign in signs})
    names = sorted({name for name, _ in pairs})
    place, row = {pair: i for i, pair in enumerate(pairs)}, {name: i for i, name in enumerate(names)}
    signs = torch.zeros(len(known), len(names), len(pairs), dtype=torch.float64)
    can_be = torch.zeros(len(known), len(names) + 1, dtype=torch.bool)
    right = torch.zeros(len(known), len(names) + 1, dtype=torch.bool)
    can_be[:, -1] = True  # unknown
    for i, one in enumerate(known):
        for name, strengths in one.evidence.items():
            can_be[i, row[name]] = True
            right[i, row[name]] = name in one.right
            for sign, strength in strengths.items():
                signs[i, row[name], place[name, sign]] = strength
        right[i, -1] = not right[i].any()
    weights = torch.zeros(len(pairs), dtype=torch.float64, requires_grad=True)
    offsets = torch.zeros(len(names), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, offsets], max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = (fitted.USUAL_WEIGHT + weights).clamp_min(LEAST_WEIGHT)
        scores = torch.cat([signs @ total + fitted.USUAL_OFFSET + offsets, torch.zeros(len(known), 1)], 1)
        scores = scores.masked_fill(~can_be, -torch.inf)
        loss = (scores.logsumexp(1) - scores.masked_fill(~right, -torch.inf).logsumexp(1)).sum()
        loss = loss + 0.5 * prior * (weights.square().sum() + offsets.square().sum())
        loss.backward()
        return loss

    optimizer.step(closure)
    found: dict[str, dict[str, float]] = {}
    for (name, sign), weight in zip(pairs, weights.detach().tolist()):
        found.setdefault(name, {})[sign] = round(max(fitted.USUAL_WEIGHT + weight, LEAST_WEIGHT), 2)
    known_offsets = dict(zip(names, (round(fitted.USUAL_OFFSET + offset, 2) for offset in offsets.detach().tolist())))
    return found, known_offsets


@dataclass(frozen=True)
class Told:
    """A cause that was told of a run that was new.

    Attributes:
        run: its name.
        cause, share, num_families: what `fitted.confidence` takes.
        right: whether it is.
    """

    run: str
    cause: str
    share: float
    num_families: int
    right: bool


def told_first() -> list[Told]:
    """What was told of each run when it was new."""
    runs = json.loads(FIRST_ASKED.read_text(encoding="utf-8"))
    return [Told(run["run"], *one) for run in runs for one in run["told"]]


def fit_trust(known: list[Told], spread: float = TRUST_SPREAD) -> tuple[dict[str, float], dict[str, float]]:
    """`fitted.TRUST` and `fitted.OF_CAUSE`; `spread` is the standard deviation of the offsets of causes."""
    causes = sorted({one.cause for one in known})
    place = torch.tensor([causes.index(one.cause) for one in known])
    features = [[fitted.log_odds(one.share), float(one.num_families > 1)] for one in known]
    inputs = torch.tensor(features, dtype=torch.float64)
    targets = torch.tensor([one.right for one in known], dtype=torch.float64)
    offset, slopes, own = (torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in (1, 2, len(causes)))
    optimizer = torch.optim.LBFGS([offset, slopes, own], max_iter=400, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        scores = offset + inputs @ slopes.clamp_min(0.0) + own[place]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, targets, reduction="sum")
        loss = loss + 0.05 * slopes.square().sum() + 0.5 * own.square().sum() / spread**2
        loss.backward()
        return loss

    with torch.no_grad():
        slopes += 0.5  # from where both have a gradient
    optimizer.step(closure)
    by_share, by_families = slopes.detach().clamp_min(0.0).tolist()
    trust = {"offset": offset.item(), "by_share": by_share, "by_families": by_families}
    rounded = {name: round(value, 3) for name, value in trust.items()}
    return rounded, {name: round(value, 3) for name, value in zip(causes, own.tolist())}


def out_of_sample(known: list[Told], group: Callable[[str], object]) -> list[tuple[float, bool]]:
    """The confidence of each cause, and whether it is right, by a fit without the runs of its group."""
    said = []
    for left_out in {group(one.run) for one in known}:
        fitted.TRUST, fitted.OF_CAUSE = fit_trust([one for one in known if group(one.run) != left_out])
        apart = [one for one in known if group(one.run) == left_out]
        said += [(fitted.confidence(one.cause, one.share, one.num_families), one.right) for one in apart]
    return said


def set_of(run: str) -> str:
    """The set of a run."""
    return run.partition("/")[0]


def fold_of(run: str, folds: int = 10) -> int:
    """One of ten, by the set and the task of a run: its first two parts."""
    return hashlib.sha256("/".join(run.split("/")[:2]).encode()).digest()[0] % folds


def main() -> int:
    """Fits, and writes the weights."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults.fit", description=__doc__.partition("\n")[0])
    parser.add_argument("--prior", type=float, default=1.0, help="one over the variance of the prior (default: 1)")
    parser.add_argument("--leave-kinds-out", action="store_true", help="how right confidences are; fits nothing")
    parser.add_argument("--trust-only", action="store_true", help="fit confidences alone, and keep the weights")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    if arguments.leave_kinds_out:
        for title, group in (("kinds, in ten folds", fold_of), ("sets", set_of)):
            said = out_of_sample(told_first(), group)
            sure = [right for confidence, right in said if confidence >= SURE]
            share = f"{sum(sure) / len(sure):.2f} right" if sure else "none"
            error = calibration_error(said)
            print(f"{title}: {len(said)} told, {len(sure)} at {SURE} or more: {share}; calibration error {error:.3f}")
        return 0
    weights, offsets = fitted.WEIGHTS, fitted.OFFSETS
    if not arguments.trust_only:
        known = list(examples())
        weights, offsets = fit(known, arguments.prior)
        print(f"{len(known)} runs, {sum(map(len, weights.values()))} weights of {len(weights)} of {len(CAUSES)} causes")
    trust, of_cause = fit_trust(told_first())
    print(f"trust: {trust}")
    if not arguments.dry:
        found = {"offsets": offsets, "trust": trust, "trust_of_cause": of_cause, "weights": weights}
        PATH.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(PATH)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
