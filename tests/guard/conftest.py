"""Puts this folder on the path, where the tests in device/ find `guard_helpers` too; and shared fixtures."""

from __future__ import annotations

import pytest

from fastguard.kernels import cpu


@pytest.fixture(params=["extension", "reference"])
def loss_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reference":
        monkeypatch.setattr(cpu, "kind_of_loss", None)
    elif cpu.kind_of_loss is None:
        pytest.skip("no extension")
