"""The smaller learning rate after a rollback, which no scheduler sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recovery_helpers import make, ruin, train, wrapped

import fastguard

slow = pytest.mark.slow

SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 / (1.0 + 0.01 * step)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=150),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=3, factor=0.9),
}


class _Recording(torch.optim.AdamW):
    """Writes down which learning rates its step really has."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.used: list[float] = []

    def step(self, closure: Any = None) -> Any:
        self.used.append(float(self.param_groups[0]["lr"]))
        return super().step(closure)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step", "ignore:.*lr_scheduler.step.*before.*")
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("tensor", [False, pytest.param(True, marks=slow)])
def test_no_schedule_sees_the_slower_learning_rate(name: str, tensor: bool) -> None:
    model, other = make(), make()
    lr: Any = torch.tensor(0.01) if tensor else 0.01
    optimizer = wrapped(
        model,
        fastguard.Recovery(every=10, patience=3, quarantine=3, ramp=10),
        make_optimizer=lambda params: _Recording(params, lr=lr.clone() if tensor else lr),
    )
    plain = torch.optim.AdamW(other.parameters(), lr=lr.clone() if tensor else lr)
    schedulers = SCHEDULES[name](optimizer), SCHEDULES[name](plain)
    seen, used = [], optimizer.used
    for step in range(80):
        if step in (40, 55):
            ruin(model)
        train(model, optimizer, [step])
        plain.step()
        for one in schedulers:
            one.step(*([1.0 + (step // 20) * 0.1] if name == "ReduceLROnPlateau" else []))
        seen.append(float(optimizer.param_groups[0]["lr"]))
        assert seen[-1] == float(plain.param_groups[0]["lr"])
    assert len(optimizer.guard.recoveries) == 2
    slow = [u / s for u, s in zip(used[1:], [seen[i] for i, e in enumerate(_taken(optimizer)) if e][: len(used) - 1])]
    assert min(slow) < 0.8 and used[-1] == pytest.approx(seen[-2], rel=1e-6)


def _taken(optimizer: Any) -> list[bool]:
    optimizer.guard.flush()
    return [not e.skipped for e in optimizer.guard.history.recent]


def test_the_learning_rate_is_back_where_a_step_raises() -> None:
    model = make()

    class Raising(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise OSError("no")
            return super().step(closure)

    guarded = wrapped(model, make_optimizer=lambda params: Raising(params, lr=0.05))
    guarded.guard._rescue.ladder.cut = 0.5
    train(model, guarded, range(3))
    Raising.fail = True
    with pytest.raises(OSError, match="no"):
        train(model, guarded, [3])
    assert guarded.param_groups[0]["lr"] == 0.05
