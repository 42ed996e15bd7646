"""Fits the weights of the causes: `python -m benchmarks.faults.fit`.

Of each run in the tuning halves - the own suite's seeds for tuning, the kinds for tuning of the external one - it takes
what speaks for each cause at the end (`fastguard.diagnosis.causes.evidence_for`) and which causes are right; of a sound
run, none. The weights and offsets are those under which the right answers are likeliest, held near the usual ones by a
Gaussian prior, and weights stay above zero: what speaks for a cause never speaks against it. They go to
fastguard/diagnosis/fitted.json. Nothing of the reporting halves is read.

Of the sure causes nearly all are right on these runs, also where kinds are left out of the fit (`--leave-kinds-out`):
rules were written while looking at them, and no fit on them tells how sure one may be elsewhere. So shares are
multiplied by a trust, which is what was right of the sure causes where nobody had looked before: 0.77 to 0.82 in the
report half, as its table has it; 0.73 of thirty that were told of faults just written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fastguard.diagnosis import CAUSES, diagnose, fitted
from fastguard.diagnosis.causes import UNKNOWN, evidence_for, shares

from . import cases, external
from .alarms import histories
from .external.cases import CASES as EXTERNAL
from .external.score import SURE, calibration_error
from .runs import load_or_train

PATH = Path(fitted.__file__).with_name("fitted.json")
LEAST_WEIGHT = 0.5
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


def out_of_sample(known: list[Example], prior: float, folds: int = 5) -> list[tuple[float, bool]]:
    """The share of each run's first cause, and whether it is right, by weights fitted without its kind.

    A kind is what stands ahead of the last part of a run's name.
    """
    told = []
    for fold in range(folds):
        apart = [one for one in known if _fold(one.name, folds) == fold]
        weights, offsets = fit([one for one in known if _fold(one.name, folds) != fold], prior)
        for one in apart:
            scores = {
                name: offsets.get(name, fitted.USUAL_OFFSET)
                + sum(weights.get(name, {}).get(sign, fitted.USUAL_WEIGHT) * value for sign, value in signs.items())
                for name, signs in one.evidence.items()
            }
            best, share = max(shares(scores).items(), key=lambda item: item[1])
            if best != UNKNOWN:
                told.append((share, best in one.right))
    return told


def _fold(name: str, folds: int) -> int:
    return hashlib.sha256(name.rpartition("/")[0].encode()).digest()[0] % folds


def main() -> int:
    """Fits, and writes the weights."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults.fit", description=__doc__.partition("\n")[0])
    parser.add_argument("--prior", type=float, default=1.0, help="one over the variance of the prior (default: 1)")
    parser.add_argument("--trust", type=float, default=fitted.TRUST, help="(default: %(default)s)")
    parser.add_argument(
        "--leave-kinds-out", action="store_true", help="of how much is right out of sample; fits nothing"
    )
    parser.add_argument("--dry", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    known = list(examples())
    if arguments.leave_kinds_out:
        told = out_of_sample(known, arguments.prior)
        sure = [right for share, right in told if share >= SURE]
        right = sum(sure) / max(len(sure), 1)
        print(f"{len(told)} told, {len(sure)} of them at {SURE} or more: {right:.2f} right")
        print(f"calibration error: {calibration_error(told)}")
        return 0
    weights, offsets = fit(known, arguments.prior)
    print(f"{len(known)} runs, {sum(map(len, weights.values()))} weights of {len(weights)} of {len(CAUSES)} causes")
    if not arguments.dry:
        PATH.write_text(
            json.dumps({"offsets": offsets, "trust": arguments.trust, "weights": weights}, indent=1, sort_keys=True)
            + "\n"
        )
        print(PATH)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
