"""What is held against what a guard recorded in a framework: norms in float64, parameters before and after a step."""

import math

import torch

NORM = 1e-5  # relative, of a recorded norm against float64


def norm64(parameters):
    """Norm of the gradients that lie there now, in float64."""
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))


def batches(num, bad=-1):
    """Inputs and targets, the same each time; one batch may hold a NaN."""
    torch.manual_seed(1)
    made = [(torch.randn(4, 6), torch.randn(4, 1)) for _ in range(num)]
    if bad >= 0:
        made[bad][0][0, 0] = math.nan
    return made


class Witness:
    """Looks at an optimizer's gradients and parameters right before and after each step, ahead of any guard."""

    def __init__(self, optimizer):
        self.norms = []
        self.was_idle = []
        self._before = []
        optimizer.register_step_pre_hook(self._look)
        optimizer.register_step_post_hook(self._compare)

    @staticmethod
    def _of(optimizer):
        return [p for group in optimizer.param_groups for p in group["params"]]

    def _look(self, optimizer, *_):
        self.norms.append(norm64(self._of(optimizer)))
        self._before = [tensor.detach().clone() for tensor in self._all(optimizer)]

    def _compare(self, optimizer, *_):
        after = self._all(optimizer)
        same = len(after) == len(self._before)
        self.was_idle.append(same and all(map(torch.equal, self._before, after)))

    def _all(self, optimizer):
        states = [value for state in optimizer.state.values() for value in state.values()]
        return self._of(optimizer) + [value for value in states if isinstance(value, torch.Tensor)]


def assert_norms(sink, norms):
    """Holds what was recorded against `norms`, NaN against NaN."""
    recorded = [record.norm for record in sink.records]
    assert len(recorded) == len(norms) > 0
    torch.testing.assert_close(
        torch.tensor(recorded, dtype=torch.float64),
        torch.tensor(norms, dtype=torch.float64),
        rtol=NORM,
        atol=0.0,
        equal_nan=True,
    )


def gist(guard):
    """What a resumed run must have in common with one that was never interrupted: all but times."""
    guard.flush()
    history = guard.history
    return {
        "step": guard._run.step,
        "clip": None if guard.clip is None else guard.clip.state_dict(),
        "counts": [history.num_steps, history.num_clipped, history.num_skipped, history.num_nonfinite],
        "recent": [(e.step, e.norm, e.clip_coef, e.skipped, e.loss, e.lr) for e in history.recent],
    }


def assert_same_parameters(a, b, **tolerance):
    """Bit for bit, unless a tolerance is given."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, **(tolerance or {"rtol": 0.0, "atol": 0.0}))
