"""What holds for any backend, whatever it can do: one registry, clear errors, and training that goes on."""

import re

import pytest
import torch

import fastguard
from fastguard import BackendUnavailableError, kernels
from fastguard.kernels import registry, run_scale
from fastguard.kernels.reference import ReferenceBackend
from fastguard.kernels.registry import BACKENDS

REFERENCE = BACKENDS["reference"]


class Modest(ReferenceBackend):
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
    run_scale([x], 2.0, modest)
    assert x.tolist() == [6.0, 8.0]
    assert fastguard.activation_stats(x, backend=modest).max_val == 8.0
    assert fastguard.backends()[modest][:2] == (True, None)


def test_auto_passes_over_what_cannot_run(monkeypatch, caplog):
    ahead = {"absent": Absent(), "modest": Modest(), "reference": REFERENCE}
    monkeypatch.setattr(registry, "BACKENDS", ahead)
    registry.say_once.cache_clear()
    here = torch.device("cpu")
    assert registry.choose(here, "auto") is ahead["modest"]
    assert [r.getMessage().split(". ")[0] for r in caplog.records] == ["backend 'absent' cannot run: it is on holiday"]


def test_one_that_cannot_run_says_why_of_all(monkeypatch):
    monkeypatch.setitem(BACKENDS, "absent", Absent())
    with pytest.raises(BackendUnavailableError, match=r"'absent' cannot run here.*absent: it is on holiday"):
        kernels.tensor_stats([torch.ones(1)], backend="absent")
    with pytest.raises(ValueError, match=re.escape(f"must be one of [auto, {', '.join(BACKENDS)}], got 'abacus'")):
        kernels.tensor_stats([torch.ones(1)], backend="abacus")
