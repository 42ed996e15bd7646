"""Each script of examples/ runs, and comes to what it says."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("examples/ is not beside the tests: they run from a copy", allow_module_level=True)


def run(name: str, *arguments: Any) -> Any:
    """What the script's `main` returns."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(*arguments)


def test_accumulation(capsys):
    assert run("accumulation") == 10 and "HEALTHY after 10 steps" in capsys.readouterr().out


def test_mixed_precision():
    skipped = run("mixed_precision")
    assert skipped[0] and not any(skipped[-6:])  # the scale comes down, and stays


def test_layer_wise_rates():
    rates = sorted(set(run("layer_wise_rates")))
    assert rates == pytest.approx([2e-4 * 0.8**4, *(2e-3 * 0.8**k for k in (3, 2, 1, 0))])


def test_discriminative_fine_tuning(capsys):
    first, second = run("discriminative_fine_tuning")
    assert second < 0.8 * first and len(capsys.readouterr().out.splitlines()) >= 3


def test_warmup_and_cosine():
    lrs = run("warmup_and_cosine")
    assert lrs[:4] == pytest.approx([1e-4, 1e-4 + 0.0099 / 4, 1e-4 + 0.0099 / 2, 1e-4 + 0.0099 / 2])  # one was skipped
    assert max(lrs) == 0.01 and lrs[-1] == pytest.approx(0.005 * (1 + math.cos(math.pi * 14 / 16)))


def test_lookahead():
    assert run("lookahead") < 0.5


def test_ema():
    model, average = run("ema")
    assert average < model < 1.0


def test_checkpoints_and_resume(tmp_path, capsys):
    assert run("checkpoints_and_resume", tmp_path) is True
    assert capsys.readouterr().out.count("from step 24\n") == 1


def test_dropout_and_augmentation():
    dropout, noise = run("dropout_and_augmentation")
    assert 0.2 <= dropout <= 0.5 and 0.2 <= noise <= 0.5


def test_recovery():
    without, brought_through = run("recovery")
    assert without > 10.0 and brought_through < 0.5


def test_rules_of_others():
    found = run("rules_of_others")
    assert found["lightning"] == ["lightning/spike"] and found["megatron"] == ["megatron/large"]
    assert "torchmortem/large-norm" in found["torchmortem"] and found["sagemaker"] == ["sagemaker/loss-not-decreasing"]


def test_the_list_is_complete():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert len(scripts) >= 10 and all(f"]({name})" in text for name in scripts)
    tests = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    tests |= {"fsdp2", "elastic"}  # of several processes: tests/ranks/test_example.py and test_elastic.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} <= tests
