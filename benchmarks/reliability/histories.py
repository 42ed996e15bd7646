"""Random histories, logs and saved states through rules, causes, report, reader: nothing may crash, all JSON is strict.

python -m benchmarks.reliability.histories                       # 10 000 cases; results/reliability-histories.json
python -m benchmarks.reliability.histories --number 500 --seed 7 --dry
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastguard
from fastguard.diagnosis import RULES
from fastguard.records import TrainingHistory, strict_json
from fastguard.records.failures import Failures
from fastguard.report import build_report
from fastguard.sinks import read_jsonl

from . import invented

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reliability-histories.json"
_EVERY_RULE = tuple(RULES.values())
_SHOWN = 20


class CrashError(Exception):
    """Something was kept from the training that ought not to have raised at all."""


class NotStrictError(Exception):
    """JSON that holds what no JSON may."""


def _refuse(constant: str) -> Any:
    raise NotStrictError(f"a bare {constant}")


def strict(plain: Any) -> Any:
    """`plain` through JSON as a parser has it that knows no NaN.

    Raises:
        NotStrictError: it is none.
    """
    try:
        text = json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise NotStrictError(str(error)) from error
    return json.loads(text, parse_constant=_refuse)


def _diagnosed(history: TrainingHistory, rules: Any = None) -> None:
    failures = Failures()
    report = build_report(history, rules=rules, failures=failures)
    if len(failures):
        raise CrashError("; ".join(f"{failure.what}: {failure.error}" for failure in failures))
    str(report)
    strict(report.to_dict())


def use(history: TrainingHistory) -> None:
    """Asks of a history all that can be asked, saves it, and goes on with what was saved."""
    _diagnosed(history)
    _diagnosed(history, _EVERY_RULE)
    strict(strict_json.encode(history.diagnose()))
    repr(history), history.norm_quantiles(), history.overhead_quantiles(), history.overview.buckets
    state = strict(history.state_dict())
    twin = TrainingHistory(history.window)
    twin.load_state_dict(state)
    if strict(twin.state_dict()) != state or strict(history.copy().state_dict()) != state:
        raise CrashError("what was saved is not what was loaded")
    twin.record(10**6, 1e200, 1.0, 0.1)
    twin.record(10**6 + 1, float("nan"), 1e-300, 0.1, -1e308)
    _diagnosed(twin)


def history_case(rng: random.Random) -> str:
    """A history as a guard, a log or a caller might fill it."""
    use(invented.history(rng))
    return "sound"


def log_case(rng: random.Random) -> str:
    """The bytes of a log; the reader may refuse them in words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        path.write_bytes(invented.log(rng))
        try:
            history = TrainingHistory.from_log(read_jsonl(path), rng.choice((1, 40, 512)), path)
        except ValueError as error:
            if str(path) not in str(error):
                raise CrashError(f"an error that does not say where: {error}") from error
            return "refused"
    use(history)
    return "read"


def state_case(rng: random.Random) -> str:
    """The state of a history, damaged: refused in words with nothing changed, or loaded, and then of use."""
    state = strict(invented.history(rng).state_dict())
    invented.damage(rng, state)
    history = invented.history(rng, (0, 3, 12))
    before = history.state_dict()  # shares nothing with it
    try:
        history.load_state_dict(state)
    except ValueError as error:
        if "`state" not in str(error):
            raise CrashError(f"an error that does not say what: {error}") from error
        if history.state_dict() != before:
            raise CrashError("a state was refused, and something has changed") from error
        return "refused"
    use(history)
    return "loaded"


def guard_case(rng: random.Random) -> str:
    """The state of a guard, damaged: as that of a history; then the guard takes steps."""
    import torch  # here alone: all else runs without it

    def guarded() -> tuple[torch.nn.Parameter, Any]:
        parameter = torch.nn.Parameter(torch.ones(3))
        return parameter, fastguard.wrap(torch.optim.SGD([parameter], lr=0.1), max_norm=1.0, check_every=3)

    def train(parameter: torch.nn.Parameter, optimizer: Any, num_steps: int) -> None:
        for _ in range(num_steps):
            parameter.grad = torch.full((3,), rng.choice((1.0, 1e30, 0.0, 1.0, float("nan"), 1e-30)))
            optimizer.step()
            optimizer.guard.observe(loss=invented.number(rng))

    parameter, optimizer = guarded()
    train(parameter, optimizer, rng.randrange(9))
    state = strict(optimizer.guard.state_dict())
    invented.damage(rng, state)
    parameter, optimizer = guarded()
    train(parameter, optimizer, rng.randrange(5))
    before = strict(optimizer.guard.state_dict())
    outcome = "loaded"
    try:
        optimizer.guard.load_state_dict(state)
    except ValueError as error:
        if "`state" not in str(error):
            raise CrashError(f"an error that does not say what: {error}") from error
        if strict(optimizer.guard.state_dict()) != before:
            raise CrashError("a state was refused, and something has changed") from error
        outcome = "refused"
    try:
        train(parameter, optimizer, 8)
    except fastguard.NonFiniteGradientsError:
        pass  # the saved run of skips was long enough
    failed = [finding.summary for finding in optimizer.guard.report().findings if finding.rule.startswith("failed-")]
    if failed:
        raise CrashError("; ".join(failed))
    strict(optimizer.guard.report().to_dict())
    strict(optimizer.guard.state_dict())
    return outcome


CASES: dict[str, Callable[[random.Random], str]] = {
    "history": history_case,
    "log": log_case,
    "state of a history": state_case,
    "state of a guard": guard_case,
}


def run(number: int, seed: int, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Tries `number` cases, the kinds in turn; counts as the results' file has them.

    Each case has a random state of its own, made of `seed` and its number: one that fails runs again by itself.
    """
    logging.getLogger("fastguard").setLevel(logging.CRITICAL)
    outcomes: Counter[str] = Counter()
    crashes: list[str] = []
    num_not_strict = 0
    kinds = list(CASES.items())
    started = time.perf_counter()
    for case in range(number):
        kind, attempt = kinds[case % len(kinds)]
        try:
            outcomes[f"{kind}: {attempt(random.Random(f'{seed}/{case}'))}"] += 1
        except Exception as error:
            num_not_strict += isinstance(error, NotStrictError)
            crashes.append(f"case {case} of seed {seed} ({kind}): {type(error).__name__}: {error}")
            say(crashes[-1] + "\n" + traceback.format_exc())
    return {
        "num_cases": number,
        "seed": seed,
        "num_crashes": len(crashes) - num_not_strict,
        "num_not_strict": num_not_strict,
        "outcomes": dict(sorted(outcomes.items())),
        "failed": crashes[:_SHOWN],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000, help="how many cases (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="save nothing")
    arguments = parser.parse_args(argv)
    results = run(arguments.number, arguments.seed, lambda line: print(line, file=sys.stderr, flush=True))
    results["versions"] = {"fastguard": fastguard.__version__, "Python": platform.python_version()}
    print(json.dumps(results, indent=2))
    if not arguments.dry:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(bool(results["failed"]))


if __name__ == "__main__":
    sys.exit(main())
