"""What the rules and causes say of all runs that are kept here, held against `golden.json`: each change is to be seen.

`python tests/test_golden.py` writes the file. Of trained runs it holds no numbers: those depend on the machine.
"""

import json
import sys
from pathlib import Path

import pytest

from fastguard.diagnosis import by_sign, diagnose, find_causes

from faulty_runs import BAD, HEALTHY

GOLDEN = Path(__file__).with_name("golden.json")
FAULTS = ["lr-jump", "nan", "dead-relu", "init-large", "frozen", "weight-decay", "labels", "bad-epoch", "same-batch"]
SOUND = ["digits-mlp", "digits-mlp-sgd", "digits-autoencoder", "noisy-batch-of-4", "sparse-relu"]


def invented():
    import test_causes

    sets = {"bad": BAD, "healthy": HEALTHY, "cause": test_causes.RIGHT}
    return {f"{kind}: {name}": history for kind, runs in sets.items() for name, history in runs.items()}


def trained():
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.faults import alarms, runs
    from benchmarks.faults.cases import CASES, TUNE_SEEDS

    for name in (*(f"{fault}@digits-mlp" for fault in FAULTS), *SOUND):
        *_, (_, history) = alarms.histories(runs.train(CASES[name], TUNE_SEEDS[0]))
        yield f"trained: {name}", history


def said(history, is_sure=True):
    def line(one, name):
        known = sorted(one.evidence.items()) if is_sure else []
        numbers = {key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in known}
        sure = [f"{one.confidence:.2f}"] if is_sure else []
        return " ".join([name, one.severity, *sure, *one.layers[:3], *([json.dumps(numbers)] if numbers else [])])

    findings = diagnose(history)
    parts = {sign: part for sign, part in by_sign(findings).items() if is_sure or part.severity != "info"}
    return {
        "findings": sorted(line(one, " of ".join(dict.fromkeys([sign, one.rule]))) for sign, one in parts.items()),
        "causes": [line(one, one.rule) for one in find_causes(findings, history)],
    }


def check(runs, is_sure):
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    now = {name: said(history, is_sure) for name, history in runs}
    changed = {name: (golden.get(name), one) for name, one in now.items() if golden.get(name) != one}
    assert not changed, f"other than in {GOLDEN.name}: {json.dumps(changed, indent=1)}"
    return golden.keys() - now.keys()


def test_invented_runs():
    left = check(invented().items(), is_sure=True)
    assert all(name.startswith("trained: ") for name in left)


@pytest.mark.slow
def test_trained_runs():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn: pip install -e '.[dev]'")
    check(trained(), is_sure=False)


if __name__ == "__main__":
    golden = {name: said(history) for name, history in invented().items()}
    golden |= {name: said(history, is_sure=False) for name, history in trained()}
    GOLDEN.write_text(json.dumps(golden, indent=0) + "\n", encoding="utf-8")
