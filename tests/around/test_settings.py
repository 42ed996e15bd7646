"""One file of settings: what each key does, what is no setting, and the three kinds of files."""

import json
import math
import sys

import pytest
import torch
from torch import nn

import fastguard
from fastguard.diagnosis import by_sign
from fastguard.tools.settings import TrainingSettings

EVERYTHING = {
    "clipping": {"max_grad_norm": 0.5, "explosion_threshold": 4},
    "schedule": {"learning_rate": 1e-4, "warmup_steps": 4, "lr_scheduler": "cosine", "lr_min": 1e-8, "lr_max": 0.01},
    "precision": {"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
    "stopping": {"early_stopping": True, "patience": 2},
    "recovery": {"auto_recovery": False, "max_recovery_attempts": 5},
    "monitoring": {"loss_window_size": 20, "divergence_threshold": 3.0, "log_frequency": 5},
    "checkpoint_frequency": 10,
}
FLAT = {key: value for part in EVERYTHING.values() if isinstance(part, dict) for key, value in part.items()} | {
    "checkpoint_frequency": 10
}


def test_every_key_can_be_set_in_sections_or_without():
    found = fastguard.settings(EVERYTHING)
    assert found == fastguard.settings(FLAT) == TrainingSettings(**FLAT)
    assert FLAT.keys() == TrainingSettings.__dataclass_fields__.keys()
    assert fastguard.settings({}) == TrainingSettings()


YAML = """
clipping:
  max_grad_norm: 5e-1   # PyYAML takes this for text
schedule: {learning_rate: 1e-4, warmup_steps: 0.1}
mixed_precision: no
early_stopping: yes
"""


def test_a_yaml_file(tmp_path):
    pytest.importorskip("yaml", reason="YAML files are an extra: pip install fastguard[settings]")
    path = tmp_path / "stable_training.yaml"
    path.write_text(YAML)
    found = fastguard.settings(path)
    assert (found.max_grad_norm, found.learning_rate, found.warmup_steps) == (0.5, 1e-4, 0.1)
    assert found.mixed_precision == "no" and found.early_stopping is True
    assert fastguard.settings(str(path)) == found
    path.write_text("")
    assert fastguard.settings(path) == TrainingSettings()
    path.write_text("a: [1")
    with pytest.raises(ValueError, match=r"stable_training.yaml must be YAML, and cannot be read"):
        fastguard.settings(path)
    path.write_text("- max_grad_norm")
    with pytest.raises(ValueError, match=r"must hold keys with values, got a list"):
        fastguard.settings(path)


def test_json_and_toml_files(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(EVERYTHING))
    assert fastguard.settings(tmp_path / "a.json") == TrainingSettings(**FLAT)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a.json must be JSON, and cannot be read"):
        fastguard.settings(tmp_path / "a.json")
    (tmp_path / "a.toml").write_text("patience = 4\n[clipping]\nmax_grad_norm = 2.0\n")
    if sys.version_info >= (3, 11):
        found = fastguard.settings(tmp_path / "a.toml")
        assert (found.patience, found.max_grad_norm) == (4, 2.0)
    with pytest.raises(
        ValueError, match=r"`source` must be a path that ends in .yaml, .yml, .json, .toml, got '.*a.ini'"
    ):
        fastguard.settings(tmp_path / "a.ini")


@pytest.mark.parametrize(("kind", "needed"), [("yaml", "PyYAML: pip install 'fastguard"), ("toml", "Python 3.11")])
def test_what_reads_a_file_may_be_missing(tmp_path, monkeypatch, kind, needed):
    monkeypatch.setitem(sys.modules, {"toml": "tomllib"}.get(kind, kind), None)
    path = tmp_path / f"a.{kind}"
    path.write_text("")
    with pytest.raises(ImportError, match=f"a.{kind} needs {needed}"):
        fastguard.settings(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gradnorm": 1.0}, r"Unknown setting `max_gradnorm` - at a dict. Did you mean `max_grad_norm`\?"),
        ({"clipping": {"patiense": 1}}, r"Unknown setting `patiense` .* `patience`\?"),
        ({"max_norm": 1.0}, r"Unknown setting `max_norm` - at a dict. Did you mean `max_grad_norm`\?"),
        ({"a": {"b": {"patience": 1}}}, "Unknown setting `b` - at a dict."),
        ({7: 1}, "Unknown setting `7` - at a dict. Known names: auto_recovery, checkpoint_frequency"),
        ({"a": {"patience": 1}, "patience": 2}, "`patience` must be given once, got it twice"),
        ({"max_grad_norm": 0}, "`max_grad_norm` must be a finite number > 0, got 0 - at a dict"),
        ({"max_grad_norm": "much"}, "`max_grad_norm` must be a finite number > 0, got 'much'"),
        ({"learning_rate": math.nan}, "`learning_rate` must be a finite number > 0, got nan"),
        ({"learning_rate": True}, "`learning_rate` must be a finite number > 0, got True"),
        ({"learning_rate": 0.1}, "`learning_rate` must lie from `lr_min` to `lr_max`, got 0.1 with 1e-08 and 0.01"),
        ({"lr_min": 1.0, "lr_max": 0.1, "learning_rate": 0.5}, "`learning_rate` must lie from `lr_min`"),
        ({"patience": 1.5}, "`patience` must be a whole number >= 1, got 1.5"),
        ({"loss_window_size": 1}, "`loss_window_size` must be a whole number >= 2, got 1"),
        ({"warmup_steps": -1}, "`warmup_steps` must be a finite number >= 0, got -1"),
        ({"lr_scheduler": "cosin"}, "`lr_scheduler` must be one of cosine, linear, constant, got 'cosin'"),
        ({"mixed_precision": "fp8"}, "`mixed_precision` must be one of no, fp16, bf16, true or false, got 'fp8'"),
        ({"early_stopping": "yes"}, "`early_stopping` must be true or false, got 'yes'"),
    ],
)
def test_what_is_no_setting(settings, message):
    with pytest.raises(ValueError, match=message):
        fastguard.settings(settings)


def make(lr=0.1):
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def test_arguments_of_wrap():
    for given, expected in ((0.5, 0.5), (None, None), ("0.25", 0.25)):
        settings = fastguard.settings({"max_grad_norm": given})
        model, optimizer = make()
        guard = fastguard.wrap(optimizer, model, **settings.wrapping()).guard
        assert (None if guard.clip is None else guard.clip.max_norm) == expected
    settings = fastguard.settings({"auto_recovery": True, "max_recovery_attempts": 5})
    assert settings.wrapping()["recovery"] == fastguard.Recovery(attempts=5)
    model, optimizer = make()
    assert fastguard.wrap(optimizer, model, **settings.wrapping()).guard.recoveries == []


def rates(kind, warmup, total):
    _, optimizer = make(1.0)
    scheduler = fastguard.settings({"lr_scheduler": kind, "warmup_steps": warmup}).scheduler(optimizer, total)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_schedules():
    rise = [0.01 + 0.99 * i / 4 for i in range(4)]
    for kind, after in (("linear", [1 - i / 6 for i in range(6)]), ("constant", [1.0] * 6)):
        assert rates(kind, 4, 10) == pytest.approx(rise + after)
        assert rates(kind, 0.4, 10) == pytest.approx(rise + after)
        assert rates(kind, 0, 6) == pytest.approx(after)
    cosine = [(1 + math.cos(math.pi * i / 6)) / 2 for i in range(6)]
    assert rates("cosine", 4, 10) == pytest.approx(rise + cosine)
    with pytest.raises(ValueError, match="`total` must be above the 4 steps of the warm-up, got 4"):
        rates("linear", 4, 4)


@pytest.mark.parametrize("given", ["no", False, None, True, "bf16"])
def test_precision(given):
    dtype = {True: torch.float16, "bf16": torch.bfloat16}.get(given)
    settings = fastguard.settings({"mixed_precision": given})
    with settings.autocast("cpu"):
        assert torch.is_autocast_enabled("cpu") is (dtype is not None)
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype is (dtype or torch.float32)
    assert settings.scaler("cpu").is_enabled() is (dtype is torch.float16)


def test_stopping_and_what_is_due():
    given = {"early_stopping": True, "patience": 2, "log_frequency": 3, "checkpoint_frequency": 4}
    settings = fastguard.settings(given)
    stop = settings.stopping(mode="max")
    assert (stop.patience, stop.mode) == (2, "max") and fastguard.settings({}).stopping() is None
    assert [s for s in range(9) if settings.logs(s)] == [0, 3, 6]
    assert [s for s in range(9) if settings.saves(s)] == [4, 8]
    settings = fastguard.settings({"gradient_accumulation_steps": 3})
    assert [settings.accumulates(i) for i in range(6)] == [True, True, False] * 2


def test_thresholds_are_asked_of_a_run():
    settings = fastguard.settings(
        {"max_grad_norm": 2.0, "explosion_threshold": 5, "loss_window_size": 4, "divergence_threshold": 1.0}
    )

    def found(norm, losses, lr):
        history = fastguard.TrainingHistory()
        for step in range(100):
            history.record(step, losses[step % len(losses)], grad_norm=norm, lr=lr)
        return {*by_sign(settings.diagnose(history))}

    ours = {"settings/unstable-loss", "settings/large-norm", "learning-rate-unusual"}
    assert not found(9.9, [1.0, 2.9], 0.009) & ours
    assert found(9.9, [1.0, 3.1], 0.009) & ours == {"settings/unstable-loss"}
    assert "settings/unstable-loss" in found(1.0, [1.0, math.nan], 0.009)
    assert found(10.1, [1.0], 0.009) & ours == {"settings/large-norm"}
    assert found(1.0, [1.0], 0.011) & ours == found(1.0, [1.0], 1e-9) & ours == {"learning-rate-unusual"}
    free = fastguard.settings({"max_grad_norm": None})
    assert all(finding.rule != "settings/large-norm" for finding in free.diagnose(fastguard.TrainingHistory()))


@pytest.mark.parametrize(
    ("name", "text"), [("deep.json", '{"a":' * 20000 + "{}" + "}" * 20000), ("deep.yaml", "[" * 3000 + "]" * 3000)]
)
def test_a_file_that_nests_without_end_is_refused(tmp_path, name, text):
    if name.endswith(".yaml"):
        pytest.importorskip("yaml", reason="YAML files are an extra: pip install fastguard[settings]")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"(?s){name} must be .*, and cannot be read: .*recursion"):
        fastguard.settings(tmp_path / name)
