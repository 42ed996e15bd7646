"""The faults that `benchmarks.lab` plants in small trainings: the report names the right cause first."""

import random

import pytest

pytest.importorskip("benchmarks.lab", reason="the benchmarks are not beside these tests", exc_type=ImportError)

from benchmarks.lab.faults import FAULTS
from benchmarks.lab.setup_faults import SETUP_FAULTS
from benchmarks.lab.tasks import TASKS
from benchmarks.lab.training import WATCHING, Training
from fastguard.diagnosis import unexplained

pytestmark = pytest.mark.usefixtures("threads")

ALWAYS = "nan"  # the quickest one; each of the others takes a second or two
OTHERS = ["lr-jump", "dead-relu", "lr", "warm-up", "lr-small", "fp16", "rnn", "tanh", "init-small", "frozen", "labels"]
OTHERS += ["missing", "weight-decay", "dropout", "overfit", "bad-batch"]
OTHERS += [fault.name for fault in SETUP_FAULTS if fault.name != "outliers"]  # no rule looks for them


@pytest.mark.parametrize("name", [ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_planted_fault_is_named_first(name):
    fault = FAULTS[name]
    setup = TASKS[fault.task](0)
    planted = fault.plant(setup, random.Random(0))
    training = Training(setup, **WATCHING)
    training.run()
    report = training.guard.report()
    training.guard.close()
    first = next(
        one for one in [*report.causes, *unexplained(report.findings, report.causes)] if one.severity != "info"
    )
    assert first.rule in fault.causes, str(report)
    for layer in (planted.layers or ())[:1]:
        assert first.layers and any(first.layers[0].startswith(layer) for layer in planted.layers), (
            layer,
            first.layers,
        )
