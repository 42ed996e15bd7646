"""Each script of examples/ runs, and comes to what it says."""

import importlib.util
import math
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("examples/ is not beside the tests: they run from a copy", allow_module_level=True)


def run(name, *arguments):
    """What the script's `main` returns."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(*arguments)


CHECKS = {
    "accumulation": lambda steps: steps == 10,
    "mixed_precision": lambda skipped: skipped[0] and not any(skipped[-6:]),  # the scale comes down, and stays
    "layer_wise_rates": lambda rates: (
        sorted(set(rates)) == pytest.approx([2e-4 * 0.8**4, *(2e-3 * 0.8**k for k in (3, 2, 1, 0))])
    ),
    "discriminative_fine_tuning": lambda losses: losses[1] < 0.8 * losses[0],
    "warmup_and_cosine": lambda lrs: (
        lrs[:4] == pytest.approx([1e-4, 1e-4 + 0.0099 / 4, 1e-4 + 0.0099 / 2, 1e-4 + 0.0099 / 2])  # one was skipped
        and max(lrs) == 0.01
        and lrs[-1] == pytest.approx(0.005 * (1 + math.cos(math.pi * 14 / 16)))
    ),
    "lookahead": lambda loss: loss < 0.5,
    "ema": lambda losses: losses[1] < losses[0] < 1.0,
    "dropout_and_augmentation": lambda shares: all(0.2 <= share <= 0.5 for share in shares),
    "recovery": lambda losses: losses[0] > 10.0 and losses[1] < 0.5,
    "rules_of_others": lambda found: (
        found["lightning"] == ["lightning/spike"]
        and found["megatron"] == ["megatron/large"]
        and "torchmortem/large-norm" in found["torchmortem"]
        and found["sagemaker"] == ["sagemaker/loss-not-decreasing"]
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_what_it_comes_to(name):
    assert CHECKS[name](run(name))


def test_checkpoints_and_resume(tmp_path, capsys):
    assert run("checkpoints_and_resume", tmp_path) is True
    assert capsys.readouterr().out.count("from step 24\n") == 1


def test_the_list_is_complete():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert all(f"]({name}.py)" in text for name in scripts)
    # Those of several processes are in tests/ranks/test_examples.py.
    assert scripts <= {*CHECKS, "checkpoints_and_resume", "fsdp2", "elastic"}
