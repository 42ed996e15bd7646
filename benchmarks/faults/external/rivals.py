"""Others' monitors on the same runs, trained anew with each of them: `python -m benchmarks.faults.external.rivals`.

They are asked for with `pip install torchmortem arc-training` in an environment of one's own; fastguard does not need
them. Neither names causes as we do, so only alarms are counted. torchmortem speaks once, at the end of a run; of it an
alarm is a finding of severity warning or above, with all families that its category may stand for. ARC speaks at each
step, of failures that it takes back; any status but healthy is an alarm, and counts as the right one. It is asked after
the step instead of before, since no loop here has a place between, and its skips are therefore not followed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..runs import alone
from .case import HALVES, Case
from .cases import CASES
from .loop import Watch, carry_out
from .runs import ROOT, load_or_prove

RESULTS = ROOT / "benchmarks" / "results" / "faults-external-rivals.json"
_FAMILIES = {
    "gradient_flow": ("vanishing", "explosion", "nonfinite"),
    "dead_units": ("units", "vanishing"),
    "saturation": ("units", "vanishing"),
    "update_ratio": ("lr", "weights"),
    "loss_dynamics": ("loss", "explosion", "lr", "data", "nonfinite"),
    "rank_collapse": ("units", "output", "vanishing"),
    "weight_norm": ("weights", "explosion"),
    "gradient_noise": ("data", "lr", "setup"),
}
Alarms = dict[str, tuple[str, ...] | None]  # what spoke -> families; None: any


class Postmortem(Watch):
    """torchmortem's `Autopsy` around each optimizer, as its page shows it."""

    def __init__(self) -> None:
        self._autopsies: dict[int, Any] = {}

    def wrap(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float | None = None
    ) -> torch.optim.Optimizer:
        from torchmortem import Autopsy

        autopsy = Autopsy(model, optimizer=optimizer)
        autopsy.attach()
        self._autopsies[id(optimizer)] = autopsy
        return super().wrap(optimizer, model, max_norm)

    def observe(self, optimizer: torch.optim.Optimizer, **losses: Any) -> None:
        if "loss" in losses:
            self._autopsies[id(optimizer)].step(loss=float(losses["loss"]))

    def alarms(self) -> Alarms:
        """What its reports say."""
        found: Alarms = {}
        for autopsy in self._autopsies.values():
            autopsy.detach()
            for finding in autopsy.get_report().findings:
                if finding.severity.name != "INFO":
                    found[finding.category] = _FAMILIES[finding.category]
        return found


class Recovering(Watch):
    """ARC's `Controller` around each optimizer."""

    def __init__(self) -> None:
        self._controllers: dict[int, Any] = {}
        self._alarms: Alarms = {}

    def wrap(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float | None = None
    ) -> torch.optim.Optimizer:
        from arc import Controller, ControllerConfig

        self._controllers[id(optimizer)] = Controller(model, optimizer, ControllerConfig(verbose=False))
        return super().wrap(optimizer, model, max_norm)

    def observe(self, optimizer: torch.optim.Optimizer, **losses: Any) -> None:
        if "loss" in losses:
            action = self._controllers[id(optimizer)].step(torch.as_tensor(losses["loss"]))
            if action.status.name != "HEALTHY":
                self._alarms[action.failure_type or action.status.value] = None

    def alarms(self) -> Alarms:
        """What it said at any step."""
        return self._alarms


RIVALS: dict[str, Callable[[], Any]] = {"torchmortem": Postmortem, "ARC": Recovering}


def asked(work: tuple[str, tuple[str, ...]]) -> dict[str, tuple[bool | None, list[str], str | None]]:
    """Of each rival: whether it found the fault (None of a sound run), what spoke, and what it raised itself."""
    case = CASES[work[0]]
    if not load_or_prove(case).holds:
        return {}
    return {name: _ask(case, RIVALS[name]()) for name in work[1]}


def _ask(case: Case, watch: Any) -> tuple[bool | None, list[str], str | None]:
    failure = None
    with alone(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, which are alarms or none
        try:
            carry_out(case.make(case.seed), watch)
        except Exception as error:  # a rival that raises ends the run; what it said until then counts
            failure = f"{type(error).__name__}: {error}"
        alarms: Alarms = watch.alarms()
    if case.truth is None:
        return None, list(alarms), failure
    families = set(case.truth.families)
    return any(held is None or families & set(held) for held in alarms.values()), list(alarms), failure


def summary(said: Iterable[tuple[bool | None, list[str], str | None]]) -> dict[str, Any]:
    """Faults found, and false alarms a sound run."""
    said = list(said)
    faulty, sound = [s for s in said if s[0] is not None], [s for s in said if s[0] is None]
    return {
        "num_faulty": len(faulty),
        "num_sound": len(sound),
        "found": sum(bool(s[0]) for s in faulty) / len(faulty) if faulty else None,
        "false_alarms": sum(len(s[1]) for s in sound) / len(sound) if sound else None,
        "num_failed": sum(s[2] is not None for s in said),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Trains every case that counts with each rival, prints and saves what they find."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults.external.rivals", description=__doc__)
    parser.add_argument("--rival", choices=RIVALS, action="append", help="which (default: all)")
    parser.add_argument("--half", choices=HALVES, default="report", help="which kinds (default: report)")
    parser.add_argument("--only", action="append", metavar="NAME", help="cases that begin with this; several times")
    parser.add_argument("--processes", type=int, default=2, help="trainings at the same time (default: 2)")
    parser.add_argument(
        "--json", type=Path, help="where results go (default: with neither --only nor --rival " + RESULTS.name
    )
    arguments = parser.parse_args(argv)
    rivals = tuple(arguments.rival or RIVALS)
    chosen = [c for c in CASES.values() if c.half == arguments.half]
    if arguments.only:
        chosen = [c for c in chosen if c.name.startswith(tuple(arguments.only))]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        said = list(zip(chosen, pool.imap(asked, [(case.name, rivals) for case in chosen])))
    results: dict[str, Any] = {"half": arguments.half, "rivals": {}}
    for name in rivals:
        of_rival = {case: answers[name] for case, answers in said if answers}
        sets = dict.fromkeys(case.set for case in of_rival)
        results["rivals"][name] = {
            "summary": summary(of_rival.values()),
            "sets": {group: summary(s for case, s in of_rival.items() if case.set == group) for group in sets},
            "failures": {case.name: s[2] for case, s in of_rival.items() if s[2] is not None},
        }
        print(name, json.dumps(results["rivals"][name], indent=1))
    results["seconds"] = round(time.perf_counter() - started, 1)
    path = arguments.json or (None if arguments.only or arguments.rival else RESULTS)
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"results: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
