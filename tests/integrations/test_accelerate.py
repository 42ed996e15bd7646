"""`attach` with the real Accelerator, and steps that are skipped under its scaler."""

import logging
import math

import pytest
import torch
from guard_helpers import assert_identical, loss_at, make_model, poison, snapshot
from torch import nn

import fastguard

from framework_helpers import Witness, assert_norms, assert_same_parameters, batches, gist

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
from accelerate.tracking import GeneralTracker, on_main_process  # noqa: E402

pytestmark = pytest.mark.slow


class Tracker(GeneralTracker):
    """Keeps what was logged."""

    name, requires_logging_directory, main_process_only = "kept", False, True

    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def tracker(self):
        return self.rows

    @on_main_process
    def store_init_configuration(self, values):
        return

    @on_main_process
    def log(self, values, step=None, **others):
        self.rows.append({**values, "step": step})


@pytest.fixture(autouse=True)
def _fresh():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


class Run:
    """A prepared model and its guarded optimizer."""

    def __init__(self, *, accumulation=1, precision="no", attach=True, **settings):
        self.tracker, self.sink = Tracker(), fastguard.MemorySink()
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulation, mixed_precision=precision, log_with=self.tracker
        )
        self.accelerator.init_trackers("run")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.witness = Witness(inner)
        self.model, self.optimizer = self.accelerator.prepare(model, inner)
        fastguard.wrap(self.optimizer, self.model, sinks=[self.sink], **settings)
        if attach:
            fastguard.integrations.accelerate.attach(self.accelerator, self.optimizer)

    def train(self, data, clip=None):
        for x, y in data:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x), y)
                self.accelerator.backward(loss)
                if clip is not None and self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.optimizer.guard.observe(loss=loss)
                self.accelerator.log({"loss": loss.item()}, step=self.optimizer.guard.last.step)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_figures_reach_the_trackers_and_it_clips_once(precision):
    run = Run(accumulation=2, precision=precision, max_norm=0.1)
    run.train(batches(8))
    run.accelerator.end_training()
    assert run.optimizer.guard.history.has_ended
    assert_norms(run.sink, run.witness.norms)
    assert [row["fastguard/grad/norm"] for row in run.tracker.rows] == [record.norm for record in run.sink.records]
    assert [row["fastguard/num_clipped"] for row in run.tracker.rows] == [1, 2, 3, 4]
    assert [row["fastguard/loss"] for row in run.tracker.rows] == [row["loss"] for row in run.tracker.rows]
    plain = Run(accumulation=2, precision=precision, attach=False)
    plain.train(batches(8), clip=0.1)
    assert_same_parameters(plain.model, run.model, rtol=1e-5, atol=1e-6)


def test_its_own_clipping_is_told_of_once(caplog):
    run = Run()
    with caplog.at_level(logging.WARNING, "fastguard"):
        run.train(batches(3), clip=math.inf)  # which only measures
        assert not caplog.records
        run.train(batches(3), clip=0.1)
    assert ["clip_grad_norm_(..., 0.1) clips before" in r.getMessage() for r in caplog.records].count(True) == 1


def test_a_bad_batch_is_skipped():
    run = Run()
    run.train(batches(6, bad=2))
    run.optimizer.guard.flush()
    assert [record.skipped for record in run.sink.records] == run.witness.was_idle == [i == 2 for i in range(6)]
    assert run.tracker.rows[-1]["fastguard/num_skipped"] == 1


def test_a_resumed_training_is_one_that_was_not_interrupted(tmp_path):
    data = batches(8)

    def run(resume):
        one = Run(clip=fastguard.Percentile(50.0, window=8, min_steps=2))
        if resume:
            one.accelerator.load_state(str(tmp_path))
        else:
            one.train(data[:4])
            one.accelerator.save_state(str(tmp_path))
        one.train(data[4:])
        return one

    whole, resumed = run(False), run(True)
    assert [record.step for record in resumed.sink.records][:1] == [4]
    assert gist(resumed.optimizer.guard) == gist(whole.optimizer.guard)
    assert_same_parameters(whole.model, resumed.model)


def _train(guarded, fused=False):
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    Accelerator(cpu=True)
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    settings = {} if guarded == "policy" else {"max_norm": 1e9}
    if guarded == "policy":
        settings["clip"] = fastguard.SkipSpikes()
    if guarded == "before":
        fastguard.wrap(inner, model, **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    outer = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu", init_scale=16.0))
    if guarded in ("after", "policy"):
        fastguard.wrap(outer, model, **settings)
    waiting = AcceleratedScheduler(scheduler, outer, step_with_optimizer=True, split_batches=True)
    skipped, rates, scales = [], [], []
    for step in range(8):
        outer.zero_grad()
        outer.scaler.scale(loss_at(model, step)).backward()
        if step in (0, 3, 4):
            poison(model, math.inf)
        outer.step()
        waiting.step()
        skipped.append(outer.step_was_skipped)
        rates.append(inner.param_groups[0]["lr"])
        scales.append(outer.scaler.get_scale())
    return skipped, rates, scales, snapshot(model, inner)


@pytest.mark.parametrize("guarded", ["before", "after", "policy"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skip_is_one_to_accelerate_and_its_scheduler_waits(guarded, fused, monkeypatch):
    state = pytest.importorskip("accelerate.state", reason="accelerate is not installed")
    monkeypatch.setattr(state.AcceleratorState, "_shared_state", {})  # not left to others
    expected, got = _train("not at all"), _train(guarded, fused)
    assert got[:3] == expected[:3]
    assert got[0] == [step in (0, 3, 4) for step in range(8)]
    if not fused:
        assert_identical(got[3], expected[3])
