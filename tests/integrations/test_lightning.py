"""`FastguardCallback` in Lightning's real Trainer, and guards under Fabric."""

import logging
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fastguard

from framework_helpers import Witness, assert_norms, assert_same_parameters, gist, norm64

lightning = pytest.importorskip("lightning", reason="lightning is not installed")
from lightning.pytorch.loggers import CSVLogger  # noqa: E402

pytestmark = pytest.mark.slow


class Regression(lightning.LightningModule):
    """A small model; the batch numbered `bad` is NaN."""

    def __init__(self, optimizer=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.norms = []
        self.losses = []
        self.bad = -1
        self._make = optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01))

    def loss(self, batch):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * (math.nan if batch_idx == self.bad else 1.0)
        self.losses.append(loss.item())
        return loss

    def scale(self):
        """That of the gradients: the guard unscales them, as fused optimizers do."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else scaler.get_scale()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(norm64(self.parameters()) / self.scale())

    def configure_optimizers(self):
        made = self._make(self.parameters())
        self.witness = Witness(made)
        return made


def loader(num_batches=8):
    torch.manual_seed(1)
    x = torch.randn(4 * num_batches, 6)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def fit(folder, model, callbacks, *, validate=False, resume=None, **settings):
    defaults = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 1}
    trainer = lightning.Trainer(
        default_root_dir=folder,
        callbacks=callbacks,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        **{**defaults, **settings},
    )
    trainer.fit(model, loader(), loader(2) if validate else None, ckpt_path=resume)
    return trainer


def callback(**settings):
    sink = fastguard.MemorySink()
    return fastguard.integrations.lightning.FastguardCallback(sinks=[sink], **settings), sink


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_it_clips_once_in_place_of_lightning(tmp_path, caplog, algorithm):
    settings = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": algorithm}
    plain, guarded = Regression(), Regression()
    fit(tmp_path, plain, [], **settings)
    guarding, sink = callback()
    with caplog.at_level(logging.INFO, "fastguard"):
        trainer = fit(tmp_path, guarded, [guarding], **settings)
    assert_norms(sink, guarded.norms)
    assert all(record.clipped and record.gradients.max_val > 0.1 for record in sink.records)
    assert_same_parameters(plain, guarded, rtol=1e-5, atol=1e-6)
    assert trainer.gradient_clip_val == 0.1
    assert [r.levelname for r in caplog.records if "gradient_clip_val=0.1: the" in r.getMessage()] == ["INFO"]


def test_two_limits_are_refused(tmp_path):
    guarding, _ = callback(max_norm=1.0)
    with pytest.raises(ValueError, match=r"must be clipped once, got Trainer\(gradient_clip_val=0.5\)"):
        fit(tmp_path, Regression(), [guarding], gradient_clip_val=0.5)


def test_a_module_that_clips_is_told_of(tmp_path, caplog):
    class Clipping(Regression):
        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    guarding, _ = callback()
    with caplog.at_level(logging.WARNING, "fastguard"):
        fit(tmp_path, Clipping(), [guarding])
    assert any("Clipping.configure_gradient_clipping clips before" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("accumulation", [1, 4, 3])
def test_losses_are_those_of_optimizer_steps(tmp_path, accumulation):
    model = Regression()
    guarding, sink = callback(max_norm=1.0)
    fit(tmp_path, model, [guarding], accumulate_grad_batches=accumulation)
    parts = [model.losses[i : i + accumulation] for i in range(0, 8, accumulation)]
    assert [record.loss for record in sink.records] == pytest.approx([sum(p) / len(p) for p in parts], rel=1e-6)
    assert_norms(sink, model.norms)


def test_a_bad_batch_is_skipped(tmp_path):
    model = Regression()
    model.bad = 3
    guarding, sink = callback(max_norm=1.0)
    fit(tmp_path, model, [guarding])
    assert [record.skipped for record in sink.records] == [index == 3 for index in range(8)]
    assert model.witness.was_idle == [record.skipped for record in sink.records]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_its_figures_are_in_the_logger_and_the_metrics(tmp_path):
    guarding, sink = callback(max_norm=0.1)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = fit(tmp_path, Regression(), [guarding], logger=logger, log_every_n_steps=2, validate=True)
    rows = [row for row in logger.experiment.metrics if "fastguard/grad/norm" in row]
    rows = rows or [
        {key: float(value) for key, value in row.items() if value}
        for row in csv_rows(Path(logger.log_dir) / "metrics.csv")
        if row.get("fastguard/grad/norm")
    ]
    assert [row["step"] for row in rows] == [1, 3, 5, 7]
    assert [row["fastguard/grad/norm"] for row in rows] == pytest.approx([r.norm for r in sink.records][1::2], rel=1e-6)
    assert [row["fastguard/num_clipped"] for row in rows] == [2, 4, 6, 8]
    assert float(trainer.callback_metrics["fastguard/num_clipped"]) == 8
    assert sink.records[-1].val_loss == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-6)
    assert guarding.guard.history.has_ended


def with_scaler():
    """float16 with a GradScaler, which Lightning takes on the CPU only when it is handed over."""
    return {"plugins": [lightning.pytorch.plugins.MixedPrecision("16-mixed", "cpu")]}


def csv_rows(path):
    lines = path.read_text().splitlines()
    return [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]


class Game(Regression):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.told = []

    def training_step(self, batch, batch_idx):
        for index, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            loss = self.loss(batch) * (index + 1)
            for _ in range(2):  # accumulated by hand, as Lightning's documentation does it
                self.manual_backward(loss / 2, retain_graph=True)
            self.told.append((index, loss.item()))
            optimizer.step()

    def on_before_optimizer_step(self, optimizer):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(norm64(held) / self.scale())

    def configure_optimizers(self):
        first, last = self.layers[0].parameters(), self.layers[2].parameters()
        return [torch.optim.SGD(first, lr=0.01), torch.optim.Adam(last, lr=0.01)]


@pytest.mark.parametrize("scaled", [False, True])
def test_manual_optimization_with_two_optimizers(tmp_path, scaled):
    model = Game()
    guarding = fastguard.integrations.lightning.FastguardCallback(max_norm=0.5)
    trainer = fit(tmp_path, model, [guarding], logger=CSVLogger(tmp_path), **(with_scaler() if scaled else {}))
    for index, guard in enumerate(guarding.guards):
        guard.flush()
        recent = guard.history.recent
        assert [entry.norm for entry in recent] == pytest.approx(model.norms[index::2], rel=1e-5, nan_ok=True)
        losses = [loss for which, loss in model.told if which == index]
        assert [entry.loss for entry in recent] == pytest.approx(losses, rel=1e-6)
        assert f"fastguard/{index}/grad/norm" in trainer.callback_metrics


def test_sinks_of_several_optimizers_are_refused(tmp_path):
    guarding, _ = callback()
    with pytest.raises(ValueError, match="`sinks` must be given to each of 2 optimizers"):
        fit(tmp_path, Game(), [guarding])


def test_a_resumed_training_is_one_that_was_not_interrupted(tmp_path):
    from lightning.pytorch.callbacks import ModelCheckpoint

    def run(resume=None):
        guarding, sink = callback(clip=fastguard.Percentile(50.0, window=8, min_steps=2))
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=8, save_top_k=-1)
        model = Regression()
        fit(tmp_path, model, [saving, guarding], enable_checkpointing=True, max_epochs=2, resume=resume)
        return model, guarding.guard, sink

    whole, guard, _ = run()
    again, resumed, sink = run(tmp_path / "step=8.ckpt")
    assert [record.step for record in sink.records] == list(range(8, 16))
    assert gist(resumed) == gist(guard)
    assert_same_parameters(whole, again)


def test_a_second_fit_goes_on(tmp_path):
    guarding, sink = callback(clip=fastguard.Percentile(50.0, window=8, min_steps=2))
    model = Regression()
    trainer = fit(tmp_path, model, [guarding])
    first = guarding.guard
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, loader())
    assert guarding.guard is not first  # Lightning makes new optimizers
    assert [record.step for record in sink.records] == list(range(16))
    assert guarding.guard.history.num_steps == 16
    fit(tmp_path, model, [guarding])
    assert [record.step for record in sink.records][16:] == list(range(8))  # another trainer


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", None])
def test_half_precision(tmp_path, precision):
    model = Regression()
    guarding, sink = callback(max_norm=0.1)
    fit(tmp_path, model, [guarding], **({"precision": precision} if precision else with_scaler()))
    assert_norms(sink, model.norms)
    assert [record.loss for record in sink.records] == pytest.approx(model.losses, rel=1e-2)
