"""What holds for any backend, whatever it can do: one registry, clear errors, and training that goes on."""

import re

import pytest
import torch

import fastguard
from fastguard import BackendUnavailableError, kernels
from fastguard.kernels import registry
from fastguard.kernels.backend import Backend
from fastguard.kernels.registry import BACKENDS

REFERENCE = BACKENDS["reference"]


class Modest(Backend):
    """No more than it takes."""

    name = "modest"

    def tensor_stats(self, tensors, unscale=1.0):
        return REFERENCE.tensor_stats(tensors, unscale)

    def scale_(self, tensors, factor):
        REFERENCE.scale_(tensors, factor)


class Absent(Modest):
    """Cannot run."""

    name = "absent"

    def unavailable(self):
        return "it is on holiday"


@pytest.fixture
def modest(monkeypatch):
    monkeypatch.setitem(BACKENDS, "modest", Modest())
    registry.say_once.cache_clear()
    return "modest"


def test_a_new_backend_serves_what_it_can(modest):
    x = torch.tensor([3.0, 4.0])
    assert fastguard.tensor_stats([x], backend=modest)[0].norm == 5.0
    fastguard.scale_([x], 2.0, backend=modest)
    assert x.tolist() == [6.0, 8.0]
    assert fastguard.backends()[modest] == (True, None, "No more than it takes.")


@pytest.mark.parametrize("function", ["activation_stats", "channel_stats"])
def test_what_it_cannot_do_is_a_clear_error(modest, function):
    with pytest.raises(BackendUnavailableError, match=r"`backend` 'modest' has no \w+\. Leave it \"auto\""):
        getattr(fastguard, function)(torch.ones(2, 3), backend=modest)


def test_a_monitor_goes_on_with_plain_torch_and_says_so_once(modest, caplog):
    model, memory = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), fastguard.MemorySink()
    monitor = fastguard.ActivationMonitor(model, every=1, backend=modest)
    optimizer = fastguard.wrap(
        torch.optim.SGD(model.parameters(), lr=0.1), model, activations=monitor, backend=modest, sinks=[memory]
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    optimizer.guard.flush()
    assert any(module.stats.total_elements for record in memory.records for module in record.activations)
    said = [r.getMessage() for r in caplog.records if "modest" in r.getMessage()]
    assert len(said) == len(set(said)) and all("Plain torch does it" in line for line in said) and said


def test_auto_passes_over_what_cannot_run_or_cannot_do_it(monkeypatch, caplog):
    ahead = {"absent": Absent(), "modest": Modest(), "reference": REFERENCE}
    monkeypatch.setattr(registry, "BACKENDS", ahead)
    registry.say_once.cache_clear()
    here = torch.device("cpu")
    assert registry.choose(here, "auto") is ahead["modest"]
    assert registry.choose(here, "auto", "activation") is REFERENCE
    assert [r.getMessage().split(". ")[0] for r in caplog.records] == ["backend 'absent' cannot run: it is on holiday"]


def test_one_that_cannot_run_says_why_of_all(monkeypatch):
    monkeypatch.setitem(BACKENDS, "absent", Absent())
    with pytest.raises(BackendUnavailableError, match=r"'absent' cannot run here.*absent: it is on holiday"):
        kernels.tensor_stats([torch.ones(1)], backend="absent")
    with pytest.raises(ValueError, match=re.escape(f"must be one of [auto, {', '.join(BACKENDS)}], got 'abacus'")):
        kernels.tensor_stats([torch.ones(1)], backend="abacus")
