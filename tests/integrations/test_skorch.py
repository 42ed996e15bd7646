"""`FastguardCallback` in a real skorch net."""

import math
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import fastguard

from framework_helpers import assert_same_parameters, gist, norm64

skorch = pytest.importorskip("skorch", reason="skorch is not installed")
from skorch.callbacks import Callback  # noqa: E402

pytestmark = pytest.mark.slow


class Norms(Callback):
    """Norms in float64, and parameters after each batch."""

    def initialize(self):
        self.norms_ = []
        self.after_ = []
        return self

    def on_grad_computed(self, net, named_parameters, **others):
        self.norms_.append(norm64(p for _, p in named_parameters))

    def on_batch_end(self, net, training=None, **others):
        if training:
            self.after_.append([p.detach().clone() for p in net.module_.parameters()])


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


def data(bad=-1):
    """Sixteen samples; one may be NaN."""
    made = np.random.default_rng(0).standard_normal((16, 6)).astype("float32")
    y = made.sum(1, keepdims=True)
    if bad >= 0:
        made[bad] = math.nan
    return made, y


def net(**settings):
    """A net of batches of four, and of two epochs."""
    guarding = fastguard.integrations.skorch.FastguardCallback(**settings)
    return skorch.NeuralNetRegressor(
        Module,
        optimizer=torch.optim.Adam,
        lr=0.01,
        batch_size=4,
        max_epochs=2,
        train_split=None,
        callbacks=[("norms", Norms()), ("guard", guarding)],
        verbose=0,
    )


def parts(made):
    found = dict(made.callbacks_)
    found["guard"].guard_.flush()
    return found["norms"], found["guard"].guard_


def test_norms_losses_and_history():
    made = net(max_norm=0.5).fit(*data())
    norms, guard = parts(made)
    recent = guard.history.recent
    assert [entry.norm for entry in recent] == pytest.approx(norms.norms_, rel=1e-5)
    losses = [batch["train_loss"] for epoch in made.history for batch in epoch["batches"]]
    assert [entry.loss for entry in recent] == pytest.approx(losses, rel=1e-6)
    shown = [batch["fastguard/grad/norm"] for epoch in made.history for batch in epoch["batches"]]
    assert shown == [entry.norm for entry in recent]
    assert made.history[:, "fastguard/num_skipped"] == [0, 0]
    assert all(entry.clipped_norm == pytest.approx(0.5, rel=1e-4) for entry in recent)


def test_a_bad_batch_is_skipped():
    norms, guard = parts(net().fit(*data(bad=9)))
    assert [entry.skipped for entry in guard.history.recent] == [False, False, True, False] * 2
    assert all(map(torch.equal, norms.after_[1], norms.after_[2]))


def test_partial_fit_goes_on_with_the_same_guard():
    made = net(max_norm=0.5).partial_fit(*data())
    guard = made.optimizer_.guard
    made.partial_fit(*data())
    assert made.optimizer_.guard is guard
    assert [entry.step for entry in parts(made)[1].history.recent] == list(range(16))
    made.fit(*data())  # anew
    assert made.optimizer_.guard is not guard and parts(made)[1].history.num_steps == 8


def test_a_pickled_net_goes_on_where_it_was():
    whole = net(settings={"clip": fastguard.Percentile(50.0, window=8, min_steps=2)}).partial_fit(*data())
    again = pickle.loads(pickle.dumps(whole))
    for one in (whole, again):
        one.partial_fit(*data())
    assert gist(parts(again)[1]) == gist(parts(whole)[1])
    assert_same_parameters(whole.module_, again.module_)
