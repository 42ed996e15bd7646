"""`FastguardHandler` in a real Engine."""

import pytest
import torch
from torch import nn

import fastguard

from framework_helpers import Witness, assert_norms, assert_same_parameters, batches, gist

ignite = pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
from ignite.engine import Events, create_supervised_trainer  # noqa: E402
from ignite.handlers import Checkpoint, DiskSaver  # noqa: E402

pytestmark = pytest.mark.slow


class Run:
    """A supervised trainer with a guarded optimizer."""

    def __init__(self, *, accumulation=1, **settings):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.witness, self.sink = Witness(self.optimizer), fastguard.MemorySink()
        self.trainer = create_supervised_trainer(
            self.model, self.optimizer, nn.functional.mse_loss, gradient_accumulation_steps=accumulation
        )
        self.handler = fastguard.integrations.ignite.FastguardHandler(
            self.optimizer, self.model, sinks=[self.sink], **settings
        )
        self.handler.attach(self.trainer)
        self.losses = []
        self.seen = []
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: self.losses.append(engine.state.output)
        )
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED(every=accumulation), lambda engine: self.seen.append(dict(engine.state.metrics))
        )


def test_losses_norms_and_metrics():
    run = Run(accumulation=3, max_norm=0.1)
    run.trainer.run(batches(9), max_epochs=1)
    assert_norms(run.sink, run.witness.norms)
    losses = [sum(run.losses[i : i + 3]) / 3 for i in range(0, 9, 3)]
    assert [record.loss for record in run.sink.records] == pytest.approx(losses, rel=1e-6)
    assert [row["fastguard/grad/norm"] for row in run.seen] == [record.norm for record in run.sink.records]
    assert run.seen[-1]["fastguard/num_clipped"] == 3
    guard, ends = run.handler.guard, []
    assert guard.history.has_ended
    run.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: ends.append(guard.history.has_ended))
    run.trainer.run(batches(3), max_epochs=2)
    assert ends == [False] and guard.history.has_ended


def test_a_bad_batch_is_skipped():
    run = Run()
    run.trainer.run(batches(6, bad=2), max_epochs=1)
    assert [record.skipped for record in run.sink.records] == run.witness.was_idle == [i == 2 for i in range(6)]


def test_a_resumed_training_is_one_that_was_not_interrupted(tmp_path):
    data = batches(4)

    def run(resume):
        one = Run(clip=fastguard.Percentile(50.0, window=8, min_steps=2))
        parts = {"model": one.model, "optimizer": one.optimizer, "trainer": one.trainer, "guard": one.handler}
        if resume is None:
            saver = Checkpoint(parts, DiskSaver(str(tmp_path), require_empty=False), global_step_transform=lambda *_: 1)
            one.trainer.add_event_handler(Events.EPOCH_COMPLETED(once=1), saver)
        else:
            Checkpoint.load_objects(parts, torch.load(resume, weights_only=True))
        one.trainer.run(data, max_epochs=2)
        return one

    whole = run(None)
    resumed = run(next(tmp_path.glob("*.pt")))
    assert [record.step for record in resumed.sink.records] == [4, 5, 6, 7]
    assert gist(resumed.handler.guard) == gist(whole.handler.guard)
    assert_same_parameters(whole.model, resumed.model)
