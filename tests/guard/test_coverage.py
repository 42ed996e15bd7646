"""Gradients that do not arrive, parameters that somebody overwrites, and how gradients turn from step to step."""

import copy
import logging
import math

import pytest
import torch
from guard_helpers import guarded_model, loss_at, make_model, notes_of, poison, take_step
from torch import nn

import fastguard
from fastguard.observers.sketches import sample


def guarded(model, make=torch.optim.AdamW, **settings):
    return fastguard.wrap(make(model.parameters(), lr=1e-2), model, **settings)


def found(optimizer):
    return fastguard.diagnosis.by_sign(optimizer.guard.report().findings)


class Other(torch.optim.Optimizer):
    """Takes its gradients from an attribute of the parameters."""

    attribute = "of_my_own"

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if hasattr(p, self.attribute):
                    p.add_(getattr(p, self.attribute), alpha=-group["lr"])


def take_away(optimizer):
    for p in optimizer.param_groups[0]["params"]:

        def hook(p):
            setattr(p, optimizer.attribute, p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(hook)


def forgotten(model, optimizer):
    for number in range(10):
        yield loss_at(model, number)
        optimizer.step()


def replaced(model, optimizer):
    model[0], model[2] = nn.Linear(6, 8), nn.Linear(8, 4)
    yield from usual(model, optimizer)


def usual(model, optimizer):
    for number in range(10):
        loss = loss_at(model, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def too_early(*, set_to_none):
    def loop(model, optimizer):
        for number in range(10):
            loss = loss_at(model, number)
            loss.backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.step()
            yield loss

    return loop


def in_backward(model, optimizer, only=None):
    for p in list(model.parameters())[:only]:
        inner = torch.optim.SGD([p], lr=1e-2)

        def hook(p, inner=inner):
            inner.step()
            inner.zero_grad()

        p.register_post_accumulate_grad_hook(hook)
    yield from usual(model, optimizer)


def elsewhere(model, optimizer):
    take_away(optimizer)
    yield from usual(model, optimizer)


LOOPS = {
    "no-backward": (torch.optim.AdamW, forgotten),
    "other-parameters": (torch.optim.AdamW, replaced),
    "cleared-before-step": (torch.optim.AdamW, too_early(set_to_none=True)),
    "cleared-before-step, zeros": (torch.optim.AdamW, too_early(set_to_none=False)),
    "step-in-backward": (torch.optim.AdamW, in_backward),
    "other-gradients": (Other, elsewhere),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("observes", [True, False])
def test_no_gradient_is_critical_within_ten_steps_and_says_why(name, observes, caplog):
    model = make_model()
    make, loop = LOOPS[name]
    optimizer = guarded(model, make)
    with caplog.at_level(logging.ERROR, "fastguard"):
        for loss in loop(model, optimizer):
            if observes and optimizer.guard.last is not None:
                optimizer.guard.observe(loss=loss)
        report = optimizer.guard.report()
        for _ in range(2):  # gradients that are there are delivered a step later
            optimizer.step()
    finding = next(finding for finding in report.findings if finding.rule == "no-gradient")
    assert report.status == finding.severity == "critical"
    assert finding.evidence["pattern"] == name.partition(",")[0] and report.causes[0].rule == "no-gradient-arrives"
    assert any("no-gradient" in record.getMessage() for record in caplog.records)


def test_some_that_step_in_the_backward_pass_are_named():
    model = make_model()
    optimizer = guarded(model)
    for _ in in_backward(model, optimizer, only=2):
        pass
    finding = found(optimizer)["unseen-updates"]
    assert (finding.severity, finding.layers) == ("warning", ("0.weight", "0.bias"))
    assert "missing-gradients" not in found(optimizer)
    assert optimizer.guard.report().causes[0].rule == "trained-elsewhere"


def test_what_another_guard_sees_is_not_missing():
    model = make_model()
    ends = fastguard.wrap(torch.optim.SGD(model[0].parameters(), lr=1e-2), model)
    other = fastguard.wrap(torch.optim.SGD(model[2].parameters(), lr=1e-2), model)
    for number in range(30):
        model.zero_grad()
        loss_at(model, number).backward()
        (ends, other)[number % 2].step()
    assert not found(ends).keys() & {"parameters-not-in-optimizer", "unseen-updates", "missing-gradients"}


class Routed(nn.Module):
    """Each batch goes to one of its experts."""

    def __init__(self, num):
        super().__init__()
        self.experts = nn.ModuleList(make_model(seed=i) for i in range(num))
        self.at = 0

    def forward(self, x):
        out = self.experts[self.at](x)
        return out


def route(model, optimizer, at, steps):
    for number in steps:
        model.at = at(number)
        loss = loss_at(model, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.guard.observe(loss=loss)


def test_one_that_never_is_chosen_is_no_parameter_that_is_cut_off():
    model = Routed(4)
    optimizer = guarded(model)
    route(model, optimizer, lambda step: step % 3, range(80))
    assert "missing-gradients" not in found(optimizer)
    route(model, optimizer, lambda step: 3 if step == 87 else step % 3, range(80, 90))  # a step that is in no sample
    assert "missing-gradients" not in found(optimizer)
    assert (optimizer.guard.history.model.num_seen, optimizer.guard.history.model.never_seen) == (16, ())


def test_a_clipper_that_bites_in_half_of_the_steps_is_noticed(caplog):
    def clipped(limit):
        model = make_model()
        optimizer = guarded(model, torch.optim.SGD)
        for number in range(70):
            optimizer.zero_grad()
            loss_at(model, number).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
        return optimizer

    norms = sorted(entry.norm for entry in clipped(1e9).guard.history.clean)
    limit = float(f"{norms[30]:.1e}")
    optimizer = clipped(limit)
    finding = found(optimizer)["already-clipped"]
    assert 10 <= finding.evidence["num_steps"] < 60 and finding.evidence["norm"] == pytest.approx(limit, rel=1e-2)
    assert optimizer.guard.history.equal_run < 10
    assert any("clip_grad_norm_" in record.getMessage() for record in caplog.records)


def watched_model(model, **settings):
    return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, **settings)


def run(model, optimizer, num_steps, between):
    for number in range(num_steps):
        take_step(model, optimizer, number)
        between(number)
    return notes_of(optimizer)


def nothing(number):
    pass


def changes(model):
    other = make_model(seed=3)
    first = model[0].weight

    def replace(number):
        first.data = first.data * 1.1

    @torch.no_grad()
    def copy_(number):
        first.copy_(other[0].weight)

    return {
        "data.mul_": lambda number: first.data.mul_(0.99),
        "copy_": copy_,
        "data": replace,
        "NaN": lambda number: number == 3 and first.data.fill_(math.nan),
    }


@pytest.mark.parametrize("change", changes(make_model()))
def test_a_changed_parameter_is_named(change):
    model = make_model()
    notes = run(model, watched_model(model, skip_nonfinite=False), 16, changes(model)[change])
    assert notes.overwritten == ("0.weight",)


def _innocent(kind):
    """A model, and changes between steps that do not overwrite its parameters."""
    model, average = make_model(), make_model(seed=3)
    anchors = [torch.randn_like(p) for p in model.parameters()]
    if kind == "reparametrised":
        model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2] = nn.utils.parametrizations.spectral_norm(model[2])
        model[4].weight = model[3].weight

    @torch.no_grad()
    def between(number):
        if kind == "swapped and put back":
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.state_dict())
            model.load_state_dict(own)
        elif kind == "averaged as schedule-free does":  # which goes back within rounding
            for p, z in zip(model.parameters(), anchors, strict=True):
                p.lerp_(z, 1 - 1 / 0.9)
                p.lerp_(z, 0.1)
        elif kind == "reparametrised":
            model(torch.ones(2, 6))

    return model, between


@pytest.mark.parametrize(
    "kind", ["nothing", "swapped and put back", "averaged as schedule-free does", "reparametrised"]
)
def test_what_is_no_overwriting(kind):
    model, between = _innocent(kind)
    optimizer = watched_model(model)
    if kind == "nothing":
        model.load_state_dict(make_model(seed=9).state_dict())  # before the first step: a start
    notes = run(model, optimizer, 40, between)
    assert notes.overwritten == ()


def test_another_guards_optimizer_may_hold_the_same_parameters():
    model = make_model()
    optimizer, other = watched_model(model), watched_model(model[0])
    notes = run(model, optimizer, 24, lambda number: take_step(model, other, number))
    assert notes.overwritten == ()
    stranger = torch.optim.SGD(model[2].parameters(), lr=0.1)  # not guarded
    notes = run(model, optimizer, 40, lambda number: take_step(model, stranger, number))
    assert set(notes.overwritten) == {"2.weight", "2.bias"}


@pytest.mark.parametrize("settings", [{}, {"max_norm": 0.01}])
def test_cosines_are_those_of_the_gradients(settings):
    model, optimizer = guarded_model(**settings)
    expected, before = [], None
    for number in range(21):
        optimizer.zero_grad()
        loss_at(model, number).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        if before is not None:
            expected.append(float(torch.cosine_similarity(gradient, before, dim=0)))
        before = gradient
        optimizer.step()
    optimizer.guard.flush()
    found = optimizer.guard.history.grad_cosines
    assert [step for step, _ in found] == list(range(1, 21))
    assert [cosine for _, cosine in found] == pytest.approx(expected, abs=1e-5)


def test_steps_without_a_usable_gradient_have_no_cosine():
    model, optimizer = guarded_model()
    for number in range(12):
        optimizer.zero_grad()
        loss_at(model, number).backward()
        if number == 3:
            poison(model)
        elif number == 6:
            for p in model.parameters():
                p.grad.zero_()
        elif number == 9:
            model[0].weight.grad = None
        optimizer.step()
    optimizer.guard.flush()
    steps = [step for step, _ in optimizer.guard.history.grad_cosines]
    assert steps == [1, 2, 5, 8, 10, 11]  # at 10, of what there was at 9


@pytest.mark.parametrize("kind", ["sparse", "bfloat16", "float8"])
def test_what_cannot_be_sketched_is_left_out(kind):
    model = make_model("embedding" if kind == "sparse" else "mlp")
    if kind == "bfloat16":
        model = model.to(torch.bfloat16)
    if kind == "float8":
        model[2].base = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)
    optimizer = watched_model(model)
    for number in range(24):
        take_step(model, optimizer, number)
    notes = notes_of(optimizer)
    assert not len(optimizer.guard._run.failures) and notes.overwritten == ()
    assert len(optimizer.guard.history.grad_cosines) == (0 if kind == "sparse" else 20)


def test_memory_that_was_freed_is_not_read():
    """As sharded training frees it: what is looked at beside the gradients must not end the process."""
    model = nn.Linear(64, 64)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model)
    flat = torch.randn(64 * 64 + 64)
    model.weight.grad, model.bias.grad = flat[: 64 * 64].view(64, 64), flat[64 * 64 :]
    for _ in range(5):
        optimizer.step()
    flat.untyped_storage().resize_(0)
    for _ in range(3):
        with pytest.raises(fastguard.UnsupportedTensorError, match="freed or cut short"):
            optimizer.step()
    model.weight.grad = model.bias.grad = None
    model.weight.data.untyped_storage().resize_(0)
    optimizer.step()
    optimizer.step()
    assert not notes_of(optimizer).overwritten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_samples_are_evenly_over_memory_and_exact(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(numel).to(dtype) for numel in (1, 3, 1023, 1024, 1025, 5000)]
    tensors.append(torch.tensor([math.nan, math.inf, -math.inf, -0.0, 6e-8, 1e-7, 6e4]).to(dtype))
    tensors.append(torch.randn(2, 3, 5, 5).to(dtype).to(memory_format=torch.channels_last))
    for number in (4, 1024):
        found = sample(tensors, number)
        counts = [min(number, x.numel()) for x in tensors]
        parts = [torch.as_strided(x, (n,), (x.numel() // n,)).double() for x, n in zip(tensors, counts)]
        assert found is not None
        assert str([*memoryview(found).cast("d")]) == str(torch.cat(parts).tolist())
