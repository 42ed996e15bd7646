"""`FastguardCallback` in a real Learner."""

import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import fastguard

from framework_helpers import Witness, assert_norms

pytest.importorskip("fastai", reason="fastai is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # fastai compiles some of its layers with torch.jit.script
    from fastai.callback.training import GradientAccumulation
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.optimizer import Adam, OptimWrapper

from fastguard.integrations.fastai import FastguardCallback

pytestmark = pytest.mark.slow


class Kept:
    """The losses of the batches in training."""

    def __init__(self):
        self.losses = []

    def __call__(self, output, target):
        loss = nn.functional.mse_loss(output, target)
        if torch.is_grad_enabled():
            self.losses.append(float(loss.detach()))
        return loss


def learner(bad=-1, opt=torch.optim.AdamW, cbs=(), guarded=True, **settings):
    torch.manual_seed(0)
    samples = [(torch.randn(6), torch.randn(1)) for _ in range(32)]
    if bad >= 0:
        samples[4 * bad][0][0] = math.nan
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    loaders = DataLoaders(DataLoader(samples, bs=4), DataLoader([(torch.ones(6), torch.ones(1))] * 4, bs=4))
    made = [FastguardCallback(**settings)] if guarded else []
    opt_func = partial(OptimWrapper, opt=opt) if opt is not Adam else Adam
    learn = Learner(loaders, model, Kept(), opt_func, cbs=[*made, *cbs])
    learn.no_logging().__enter__()
    return learn


def test_norms_losses_and_validation():
    sink = fastguard.MemorySink()
    learn = learner(max_norm=0.1, sinks=[sink])
    learn.create_opt()
    witness = Witness(learn.opt.opt)
    learn.fit(1, 1e-3)
    assert_norms(sink, witness.norms)
    assert len(sink.records) == 8 and sum(record.clipped for record in sink.records) == 8
    assert [record.loss for record in sink.records] == pytest.approx(learn.loss_func.losses, rel=1e-6)
    with torch.no_grad():
        expected = nn.functional.mse_loss(learn.model(torch.ones(1, 6)), torch.ones(1, 1))
    assert sink.records[-1].val_loss == pytest.approx(float(expected), rel=1e-5)


def test_accumulated_losses_are_averaged():
    sink = fastguard.MemorySink()
    learn = learner(sinks=[sink], cbs=[GradientAccumulation(8)])
    learn.fit(1, 1e-3)
    losses = learn.loss_func.losses
    assert [record.loss for record in sink.records] == pytest.approx(
        [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)], rel=1e-6
    )


def test_a_bad_batch_is_skipped():
    learn = learner(bad=3)
    learn.fit(1, 1e-3)
    guard = learn.fastguard.guard
    assert guard.history.num_skipped == 1 and all(p.isfinite().all() for p in learn.model.parameters())


def test_a_second_fit_goes_on():
    learn = learner(max_norm=1.0)
    learn.fit(1, 1e-3)
    first = learn.fastguard.guard
    learn.fit(1, 1e-3)
    assert learn.fastguard.guard is first and first.last.step == 15
    assert pickle.loads(pickle.dumps(learn.fastguard)).settings == {"max_norm": 1.0}


def test_an_optimizer_of_fastai_is_refused():
    with pytest.raises(TypeError, match=r"`opt_func` must make an OptimWrapper of .*, got Optimizer\."):
        learner(opt=Adam).fit(1, 1e-3)
