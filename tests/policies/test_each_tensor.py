"""Policies that clip tensors, units or elements each, against their definitions."""

import math
import random
from array import array

import pytest
import torch
from guard_helpers import assert_close, make_model, poison, snapshot, take_step
from torch import nn

import fastguard
from fastguard import AGC, AdaGC, Spikes, UnsupportedTensorError, Value
from fastguard.kernels import backends, cpu


def _wrap(model, clip, **settings):
    return fastguard.wrap(torch.optim.AdamW(model.parameters(), lr=0.1), model, clip=clip, check_every=0, **settings)


class TestAdaGC:
    def _reference(self, norms, warmup):
        """Algorithm 1 of the paper, but that zeros tell nothing: the limits before each step."""
        means = [0.0] * len(norms[0])
        told = []
        for step, row in enumerate(norms):
            told.append([1.05 * mean for mean in means])
            total = math.hypot(*row)
            for i, norm in enumerate(row):
                if not norm:
                    continue
                if step < warmup:
                    clipped = norm * min(1.0, 1.0 / total)
                    means[i] = clipped if not means[i] else min(means[i], clipped)
                else:
                    means[i] = 0.98 * means[i] + 0.02 * min(norm, 1.05 * means[i])
        return told

    def test_against_its_definition(self):
        generator = random.Random(0)
        norms = [[math.exp(generator.gauss(i, 0.3)) for i in range(3)] for _ in range(60)]
        policy, expected = AdaGC(warmup=20), self._reference(norms, 20)
        policy.begin("abc")
        for step, row in enumerate(norms):
            trigger, target = policy.limits()
            if step < 20:
                assert (trigger, target) == (1.0, 1.0)
            else:
                assert list(trigger) == pytest.approx(expected[step], rel=1e-12) and trigger is target
            policy.observe(array("d", row))

    @pytest.mark.skipif(not backends()["cpu"].available, reason=str(backends()["cpu"].reason))
    def test_python_and_the_extension_give_the_same_bits(self, monkeypatch):
        generator = random.Random(1)
        rows = [
            array("d", [generator.choice([0.0, -1.0, generator.expovariate(1)]) for _ in range(5)]) for _ in range(80)
        ]
        states = []
        for follow in (cpu.follow, None):
            monkeypatch.setattr(cpu, "follow", follow)
            policy = AdaGC(warmup=10)
            policy.begin("abcde")
            for row in rows:
                policy.observe(row)
            states.append(policy.state_dict())
        assert states[0] == states[1]

    def test_tensors_are_known_by_name(self):
        policy = AdaGC(warmup=2)
        policy.begin("ab")
        for _ in range(5):
            policy.observe(array("d", [0.1, 0.7]))
        kept = dict(zip("ab", policy.limits()[0], strict=True))
        policy.begin("cba")
        assert list(policy.limits()[0]) == [math.inf, kept["b"], kept["a"]]
        other = AdaGC(warmup=2)
        other.load_state_dict(policy.state_dict())
        other.begin("ab")
        assert list(other.limits()[0]) == [kept["a"], kept["b"]]

    def test_zeros_in_the_warm_up_freeze_nothing(self):
        policy = AdaGC(warmup=5)
        policy.begin("ab")
        for step in range(10):
            policy.observe(array("d", [0.0 if step < 8 else 0.3, 0.4]))
        assert policy.limits()[0][0] == math.inf and 0.3 < policy.limits()[0][1] < 0.5
        for _ in range(5):
            policy.observe(array("d", [0.3, 0.4]))
        assert policy.limits()[0][0] == pytest.approx(0.315)

    def test_a_spike_in_one_tensor_leaves_the_others_alone(self):
        model = make_model()
        optimizer = _wrap(model, AdaGC(50.0, warmup=3, max_norm=None))
        for step in range(12):
            take_step(model, optimizer, step, before_step=lambda s=step: s == 11 and model[0].weight.grad.mul_(1e3))
        last = optimizer.guard.last
        assert last.over == ("0.weight",) and last.clipped_norm < 50 * min(optimizer.guard.history.grad_norm)

    WRONG = (
        *(({"ratio": 1.0}, AdaGC), ({"keep": 1.0}, AdaGC), ({"warmup": 0}, AdaGC), ({"max_norm": 0.0}, AdaGC)),
        *(({"max_value": 0.0}, Value), ({"max_value": math.nan}, Value), ({"max_value": "1"}, Value)),
        *(({"window": 8}, Spikes), ({"ratio": 1.0}, Spikes), ({"k": 0.0}, Spikes), ({"max_norm": -1.0}, Spikes)),
    )

    @pytest.mark.parametrize(("settings", "cls"), WRONG, ids=str)
    def test_wrong_settings(self, settings, cls):
        with pytest.raises(ValueError, match=f"`{next(iter(settings))}` must be"):
            cls(**settings)


def _agc(parameters, clipping, eps, exclude=()):
    """The formula of the paper with timm's floors, unit by unit."""
    for name, p in parameters:
        if name in exclude:
            continue
        units = [(p.detach(), p.grad)] if p.ndim <= 1 else [(p.detach()[i], p.grad[i]) for i in range(len(p))]
        for weight, gradient in units:
            limit = clipping * max(float(weight.norm()), eps)
            if float(gradient.norm()) > limit:
                gradient.mul_(limit / max(float(gradient.norm()), 1e-6))


class TestAGC:
    @pytest.mark.parametrize("exclude", [(), ("2.weight", "2.bias")])
    def test_against_its_definition(self, exclude, backend):
        torch.manual_seed(0)
        model, plain = (nn.Sequential(nn.Conv1d(3, 4, 2), nn.Flatten(), nn.Linear(8, 2)) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        optimizer = _wrap(model, AGC(0.05, exclude=["2.*"] if exclude else ()), backend=backend)
        rival = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for step in range(4):
            x = torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(step))
            for m, o in ((model, optimizer), (plain, rival)):
                o.zero_grad()
                m(x).square().sum().backward()
                if o is rival:
                    _agc(plain.named_parameters(), 0.05, 1e-3, exclude)
                o.step()
            after = float(fastguard.tensor_stats([p.grad for p in model.parameters()]).total_norm())
            optimizer.guard.flush()
            last = optimizer.guard.last
            assert last.clipped_norm == pytest.approx(after, rel=1e-5) and last.trigger is None
            assert not set(last.over) & set(exclude) and (last.over or backend == "triton")
        assert_close(snapshot(model, optimizer), snapshot(plain, rival), rtol=1e-4, atol=1e-5)

    def test_a_tensor_of_zeros_moves(self):
        p = nn.Parameter(torch.zeros(3, 2))
        optimizer = fastguard.wrap(torch.optim.SGD([p], lr=1.0), clip=AGC(0.01))
        p.grad = torch.ones(3, 2)
        optimizer.step()
        assert p.norm(dim=1).tolist() == pytest.approx([1e-5] * 3)

    def test_units_below_their_limits_are_not_written(self):
        p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        optimizer = fastguard.wrap(torch.optim.SGD([p, q], lr=1.0), clip=AGC(0.5))
        p.grad, q.grad = torch.ones(3), torch.full((3,), 0.1)
        versions = p.grad._version, q.grad._version
        optimizer.step()
        assert p.grad._version > versions[0] and q.grad._version == versions[1]
        assert optimizer.guard.last.over == ("group0.param0",)


class TestValue:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_against_torch(self, dtype, backend):
        model, plain = make_model(dtype=dtype), make_model(dtype=dtype)
        optimizer, rival = _wrap(model, Value(0.05), backend=backend), torch.optim.AdamW(plain.parameters(), lr=0.1)
        for step in range(4):
            take_step(model, optimizer, step)
            take_step(plain, rival, step, before_step=lambda: nn.utils.clip_grad_value_(plain.parameters(), 0.05))
            for a, b in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(a.grad, b.grad) and torch.equal(a, b)
            last = optimizer.guard.last
            after = fastguard.tensor_stats([p.grad for p in model.parameters()]).total_norm()
            assert last.clipped_norm == pytest.approx(after, rel=1e-12) and last.trigger == 0.05

    def test_where_nothing_is_skipped_it_is_as_torch_has_it(self):
        model, plain = make_model(), make_model()
        optimizer = _wrap(model, Value(0.05), skip_nonfinite=False)
        rival = torch.optim.AdamW(plain.parameters(), lr=0.1)
        take_step(model, optimizer, 0, bad=math.inf)
        take_step(
            plain, rival, 0, bad=math.inf, before_step=lambda: nn.utils.clip_grad_value_(plain.parameters(), 0.05)
        )
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(a, b)

    def test_what_holds_no_larger_element_is_not_written(self):
        p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.complex64))
        optimizer = fastguard.wrap(torch.optim.SGD([p, q], lr=1.0), clip=Value(1.0))
        p.grad, q.grad = torch.ones(3), torch.tensor([3 - 4j, 0.5j])
        version = p.grad._version
        optimizer.step()
        assert p.grad._version == version and q.grad.tolist() == [1 - 1j, 0.5j]
        assert optimizer.guard.last.over == ("group0.param1",)

    def test_sparse_gradients_are_refused_in_words(self):
        model = make_model("embedding")
        optimizer = fastguard.wrap(torch.optim.SparseAdam(model.parameters(), lr=0.1), model, clip=Value(1e-3))
        with pytest.raises(UnsupportedTensorError, match="must be dense for a clip policy of elements or units"):
            take_step(model, optimizer, 0)


@pytest.mark.parametrize("clip", [Value(0.01), AGC(0.01)], ids=["value", "agc"])
def test_gradients_that_carry_a_loss_scale(clip):
    """What a GradScaler left scaled is clipped as if it had not."""
    found = []
    for scale in (1.0, 1024.0):
        model = make_model()
        optimizer = _wrap(model, clip)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append((snapshot(model), optimizer.guard.last.clip_coef))
    assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-6)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5) and found[0][1] < 1.0
    poison(model)
