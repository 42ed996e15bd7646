"""The guard's tests once more, on the device path: whatever holds on the host holds there.

A few are left out, each for a reason; the tests beside this file say what holds instead.
"""

import re

import pytest
import test_closures
import test_compiled_steps
import test_copies_and_checkpoints
import test_grad_scaler
import test_leaving_no_trace
import test_optimizers
import test_proxies
import test_step_records

MODULES = (
    test_closures,
    test_compiled_steps,
    test_copies_and_checkpoints,
    test_grad_scaler,
    test_leaving_no_trace,
    test_optimizers,
    test_proxies,
    test_step_records,
)
# These also run the kernels themselves, if slow tests are asked for; the others the torch operations only.
WITH_KERNELS = (test_proxies, test_step_records)
# What takes longest, and is held for a few of its cases by test_skips.py.
SELDOM = (test_compiled_steps, test_optimizers)
LATER = "a run of skips raises in a later step: test_skips.py"
ZEROS = "a fused optimizer that skips its first step makes its state, all zeros: test_skips.py"
DELIVERY = "records are delivered later: test_delivery.py"
UNKNOWN = "whether anything is clipped is known on the device only"
LEFT_OUT = {
    r"test_only_steps_that_were_skipped_count_towards_the_limit\[.*\{.*1\}": LATER,
    r"test_a_step_that_raised_leaves_nothing_to_the_next": LATER,
    r"test_trap_1_flags_summed_over_devices\[.*True": ZEROS,
    r"test_a_skipped_step_never_was\[.*0-nan-.*-fused": ZEROS,
    r"test_a_record_is_delivered_when_the_next_step_begins": DELIVERY,
    r"test_the_last_record_is_delivered_at_the_end": DELIVERY,
    r"test_versions_are_bumped_by_clipping_alone\[.*1000000": UNKNOWN,
    r"test_a_graph_through_clipped_gradients_fails_rather_than_go_on\[.*False": UNKNOWN,
    r"test_trap_1_gradients_that_are_not_contiguous\[.*True": "they are put right: test_skips.py",
}


@pytest.fixture(autouse=True)
def _left_out(request):
    for pattern, reason in LEFT_OUT.items():
        if re.match(pattern, request.node.name):
            pytest.skip(reason)


def _class_of(module):
    """The tests of `module`, in a class of their own, because some modules have tests of one name."""
    tests = {name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_")}
    marks = getattr(module, "pytestmark", [])
    kernels = pytest.param("triton", marks=pytest.mark.slow)
    engines = ["reference", kernels] if module in WITH_KERNELS else ["reference"]
    needed = [pytest.mark.parametrize("engine", engines, indirect=True), pytest.mark.usefixtures("engine", "no_lag")]
    if module in SELDOM:
        needed.append(pytest.mark.slow)
    marks = [*needed, *(marks if isinstance(marks, list) else [marks])]
    return type(module.__name__, (), {**tests, "pytestmark": marks})


for _module in MODULES:
    globals()["Test" + _module.__name__.removeprefix("test_").title().replace("_", "")] = _class_of(_module)
    for _name, _value in vars(_module).items():
        if type(_value).__name__ == "FixtureFunctionDefinition":
            globals()[_name] = _value


def test_what_is_left_out_exists():
    names = [name for module in MODULES for name in vars(module)]
    for pattern in LEFT_OUT:
        assert pattern.split(r"\[")[0] in names
