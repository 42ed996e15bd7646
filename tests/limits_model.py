"""Where the rules on model, optimizer and gradients begin and end: runs, and what each sign says of them."""

import math

from fastguard.records.samples import WeightStats

from made_runs import (
    activity,
    batch,
    batches_run,
    ended,
    falling_losses,
    flat_losses,
    flipped,
    layered,
    linear_layers,
    passed,
    run,
    settings,
    validated,
    weights_run,
    with_activities,
)
from records import make_bad_record, make_batch, make_record

FLAT, FALLING = flat_losses(100), falling_losses(100)
LEARNT = falling_losses(200, pace=20.0)
LOST = [*falling_losses(100), *flat_losses(100, level=2.0)]
HALF_LEARNT = [2.3] * 10 + [1.45] * 90
MET = [max(0.0, 1.0 - step / 50) for step in range(120)]
WEIGHTS = tuple(f"{place}.weight" for place in range(8))
BESIDE = ("router.weight", *(f"experts.{i}.weight" for i in range(7)))
BIASES = [f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")]
LEFT = {"num_left_gradients": 20, "num_watched_backwards": 20}
OVERWRITTEN = {"overwritten": ["a"]}
DROPS = {"dropout": {"drop": 0.3}}


def fades(factor, num=8, losses=None, names=WEIGHTS):
    """A run whose gradients fall off from layer to layer."""
    losses = flat_losses(120) if losses is None else losses
    return layered(len(losses), lambda step, place: factor ** (num - 1 - place), losses, names[:num])


def faded(factor, num_stood, pace, later=1.0, is_over=False):
    """A run whose loss stood for a while, as its gradients fell off from layer to layer, and then fell."""
    losses = [*flat_losses(num_stood, 10.0), *falling_losses(300 - num_stood, start=10.0, floor=0.2, pace=pace)]
    early = min(num_stood, 100)
    history = layered(300, lambda s, p: (factor if s < early else later) ** (7 - p), losses, WEIGHTS)
    history.has_ended = is_over
    return history


def zeros(places, losses, names=BESIDE, since=5):
    return layered(len(losses), lambda s, p: 0.0 if s > since and p in places else 1.0, losses, names=names)


def act(losses=None, **fields):
    modules = (activity(**fields),)
    return run(losses or FALLING, change=lambda step: {} if step % 20 else {"activations": modules})


def frozen(names, losses=None, all_names="abcdefghij", **notes):
    known = {"initialization": dict.fromkeys(all_names, (0.1, 0.1)), **notes}
    return run(losses or FALLING, names=list(all_names), without_gradient=list(names), **known)


def without(names, losses=None, all_names="abcde"):
    return run(losses or FALLING, names=list(all_names), not_in_optimizer=list(names))


def begun(*ratios, losses=None, **notes):
    """A run whose layers began with so many times the usual spread."""
    known = {f"{i}.weight": (0.1 * ratio, 0.1) for i, ratio in enumerate(ratios)}
    return run(losses or falling_losses(20), initialization=known, names=[*known, "head.weight"], **notes)


def gpt2(norm, residual):
    """Of width 64, where He's spread is 0.18 and ten times 0.02 does not reach it at the ends of branches."""
    known = {f"{i}.in": (0.0199, 0.177) for i in range(8)} | {f"{i}.out": (residual, 0.177) for i in range(8)}
    return run(falling_losses(20), initialization=known, module_kinds={"Linear": 16, norm: 9})


def updates(ratio, losses=None, num_steps=140, **notes):
    at = ratio if callable(ratio) else lambda step: ratio
    return weights_run(lambda step, name: at(step), losses, num_steps=num_steps, **notes)


def decay(value, losses=None, kind="Adam", **more):
    return run(losses or flat_losses(60), optimizer_settings=settings(kind, weight_decay=value), **more)


def odd(losses=None, **given):
    return run(losses or flat_losses(160), optimizer_settings=settings(**given))


def linear(*ops, losses=None):
    return run(losses or flat_losses(60), loss_ops=[f"{op}Backward0" for op in ops])


def evaluated(num_steps, since=-1, with_grad=False, **notes):
    """A run whose passes are in training mode up to step `since`, one after it in eval mode, or all with autograd."""
    train, evaluate = make_batch(), make_batch(training=False, with_grad=with_grad)

    def looks(s):
        is_seen = s % 10 == 0 and (with_grad or s <= since)
        return {"batches": (train if s <= since else evaluate,)} if is_seen or s == since + 1 else {}

    return run(falling_losses(num_steps), change=looks, **{**DROPS, **notes})


def validating(training, **notes):
    return batches_run(FALLING, batch(), passed(training=training), val_losses=validated(100), **notes)


def apart(pair, level=4.0, num_steps=100):
    values = validated(num_steps, level=level) if level else None
    return run(falling_losses(num_steps), val_losses=values, norm_statistics={"n": pair, "m": (0, 1)})


def not_finite(num_bad):
    names = ["a.weight", "b.weight", "c.weight"]
    history = flipped(at=())
    history.add(make_bad_record(130, names[:num_bad], names, loss=0.4))
    return history


def stuck_and_dead(dead):
    """Large updates, with units that have died."""
    weights = (WeightStats("layer.weight", 64, 4.0, 0.5, 2.0, 1.0, 8.0),)
    sampled = {"weights": weights, "activations": (activity("act", dead=dead),)}
    return run(falling_losses(120), change=lambda s: {} if s % 20 else sampled, lrs=[0.1] * 120)


def repaired():
    sampled = {step: (WeightStats("w", 8, 1.0, 0.1, 0.2, num_nonfinite=int(step == 20)),) for step in range(0, 60, 20)}
    return run(falling_losses(60), change=lambda step: {"weights": sampled[step]} if step in sampled else {})


def large_and_whole():
    history = flipped(at=())
    history.add(make_record(130, 1e9, loss=0.4, lr=1e-3))
    return history


LIMITS = {
    "gradients-not-cleared": [
        (run(FALLING, num_left_gradients=4, num_watched_backwards=4), "warning"),
        (run(FALLING, num_left_gradients=3, num_watched_backwards=3), None),
        (run(FALLING, num_left_gradients=18, num_watched_backwards=20), None),
        (run(FALLING, num_left_gradients=0, num_watched_backwards=20), None),
        (run(FALLING), None),
        (run([1.0] * 100 + [10.0 * 1.05**step for step in range(100)], **LEFT), "critical"),
        (run([1.0] * 200, **LEFT), "warning"),
    ],
    "no-gradient": [
        (run(flat_losses(10), [0.0] * 10), "critical"),
        (run(flat_losses(9), [0.0] * 9), None),
        (run(flat_losses(50), [0.0] * 49 + [1e-9]), None),
        (run([0.0] * 50, [0.0] * 50), None),  # a hinge loss with nothing left to gain
        (run(flat_losses(50), [*[0.0] * 20, math.nan, *[0.0] * 29]), None),
    ],
    "odd-optimizer-settings": [
        (odd(eps=9e-4), None),
        (odd(eps=1e-3), "warning"),
        (odd(kind="Adafactor", eps=1e-3), None),  # its eps is of another kind
        (odd(betas=(0.99, 0.999)), "warning"),
        (odd(betas=(0.0, 0.99)), None),  # as of a GAN
        (odd(betas=(0.9, 0.999995)), "warning"),
        (odd(kind="SGD", momentum=0.98), None),
        (odd(falling_losses(200), eps=0.1), "info"),
        (odd(flat_losses(149), eps=0.1), "info"),
        (odd([*falling_losses(100, floor=0.01), *flat_losses(100, level=4.0)], eps=0.1), "warning"),  # lost again
        *((odd(falling_losses(200), betas=(0.9, second)), said) for second, said in ((0.1, "warning"), (0.5, None))),
        (odd(falling_losses(200), kind="SGD", momentum=0.996), "warning"),
        (odd(falling_losses(200), kind="SGD", momentum=0.994), "info"),
    ],
    "weights-overwritten": [
        (run(falling_losses(120), **OVERWRITTEN), "info"),
        *((run(flat_losses(num), **OVERWRITTEN), said) for num, said in ((39, "info"), (60, "info"), (200, "warning"))),
    ],
    "validation-in-training-mode": [
        (validating(True, **DROPS), "warning"),
        (validating(True, module_kinds={"BatchNorm2d": 1}), "warning"),
        (validating(True, module_kinds={"Linear": 1, "LayerNorm": 1}, names=["a"]), None),
        (validating(True, dropout={"drop": 0.0}), None),
        (validating(True), None),  # it is not known what the model is made of
        (validating(False, **DROPS), None),
        (batches_run(FALLING, batch(), passed(training=True), **DROPS), None),  # no validation losses
        (run(FALLING, passes_in_training_mode=[(30, 4, 0, 1), (60, 4, 4, 0)]), "warning"),
        (run(FALLING, passes_in_training_mode=[(30, 2, 0, 3), (60, 2, 2, 0)]), "warning"),
        (run(FALLING, passes_in_training_mode=[(30, 2, 0, 3), (60, 2, 2, 2)]), None),  # as of two teachers
        (run(FALLING, passes_in_training_mode=[(30, 8, 0, 30), (60, 8, 1, 30)]), None),
        (run(FALLING, passes_in_training_mode=[(30, 3, 0, 30), (60, 3, 0, 30), (90, 3, 0, 0)]), None),
        (run(FALLING, passes_in_training_mode=[(30, 8, 0, 30), (60, 8, 0, 2), (90, 8, 0, 0)]), None),
        (run(FALLING, passes_in_training_mode=[(30, 4, 0, 30), (60, 4, 4, 30)], objective="game"), None),
        *(
            (run(FALLING, passes_in_training_mode=[(30, 1, 0, gap), *[(60, 1, 1, gap)] * num], loss_kind=kind), said)
            for kind, gap, num, said in (
                ("cross-entropy", 30, 2, "warning"),
                ("cross-entropy", 30, 1, None),
                ("cross-entropy", 1, 2, None),  # asked at every step
                ("squared error", 30, 2, None),  # pictures from noise, perhaps
            )
        ),
    ],
    "training-in-eval-mode": [
        (evaluated(40, with_grad=True), "warning"),
        (evaluated(30, with_grad=True), None),  # three passes
        (evaluated(40, with_grad=True, dropout={"drop": 0.0}), None),
        (evaluated(40), None),  # validation
        (evaluated(520, since=250), "warning"),  # in training mode never again
        (evaluated(520, since=280), None),
        (evaluated(260, since=9), "warning"),
        (evaluated(250, since=9), None),
    ],
    "layers-without-activation": [
        (linear("MseLoss", "Addmm", "Addmm"), "info"),
        (linear("MseLoss", "Addmm", "T", "View", "Addmm"), "info"),  # a change of shape is no activation
        (linear("MseLoss", "Addmm", "Relu", "Addmm"), None),
        (linear("MseLoss", "Addmm", "NativeLayerNorm", "Addmm"), None),
        (linear("MseLoss", "Addmm"), None),
        (linear("MseLoss", "Addmm", "Addmm", losses=flat_losses(80)), "warning"),
        (linear("MseLoss", "Addmm", "Addmm", losses=HALF_LEARNT), "warning"),
        (linear("MseLoss", "Addmm", "Addmm", losses=[2.3] * 10 + [1.3] * 90), "info"),
        (linear_layers([(200, 20), (100, 5)]), "warning"),  # 10 to 20 to 5
        (linear_layers([(30, 3), (30, 10)]), "info"),  # 10 to 3 to 10: a code
        (linear_layers([(200, 20), (400, 20), (100, 5)], ("NllLoss", "Addmm", "Addmm", "Relu", "Addmm")), "info"),
    ],
    "running-statistics-apart": [
        (apart((2.5, 1.0)), "warning"),
        (apart((0.2, 0.1)), "warning"),
        (apart((0.45, 1.9)), None),
        (apart((2.5, 1.0), 0.4), "info"),  # validation does not suffer
        (apart((3.0, 1.0), 0.0), "info"),
        (apart((3.0, 1.0), 0.0, num_steps=29), None),
    ],
    "vanishing-layers": [
        (layered(100, lambda step, place: 1e-9 if place % 2 else 1.0, FLAT, names=BIASES), None),  # biases do not count
        (layered(100, lambda step, place: 10.0 ** (0.7 * (place - 8)), falling_losses(100, pace=20)), "info"),
        (layered(100, lambda step, place: 10.0 ** (0.7 * (place - 8)), FLAT), "warning"),
        (fades(0.5), "warning"),  # to 1/64 over six layers
        (fades(0.5, 6), None),  # to 1/16 over four
        (fades(0.3, 5), "warning"),
        (fades(0.3, 4), None),
        (fades(0.2, 4), "warning"),
        (fades(0.2, 4, falling_losses(120, pace=20.0)), None),
        (fades(0.01, 3), None),  # too few to tell
        (fades(0.5, losses=flat_losses(99)), None),
        (layered(120, lambda step, place: 0.005 if place < 2 else 1.0, flat_losses(120), WEIGHTS), None),  # one layer
        (faded(0.3, 120, 20.0), "info"),  # all is learnt in the end
        (faded(0.7, 120, 100.0), None),
        (faded(0.3, 40, 60.0), None),
        (faded(0.3, 80, 100.0, is_over=True), "info"),
        (faded(0.3, 80, 100.0), None),
    ],
    "zero-gradient-tensors": [
        (layered(120, lambda step, place: 0.0 if step >= 50 else 1.0, MET), None),  # a hinge loss that is met
        (layered(120, lambda step, place: 0.0 if step >= 50 else 1.0, flat_losses(120)), "warning"),
        (layered(200, lambda s, p: 0.0 if s > 40 and s % 10 == 0 else 1.0, flat_losses(200)), None),  # now and then
        (zeros((3, 4), falling_losses(150)), "info"),  # experts that are not chosen, and it learns
        (zeros((3, 4), falling_losses(90)), "info"),  # too early to say
        (zeros((3, 4), flat_losses(150)), "warning"),
        (zeros((0, 1), falling_losses(150)), "info"),  # from the first layer on, and it learns
        (zeros((1,), flat_losses(120), BIASES, 30), None),  # what pulls one way and the other adds up to nothing
        (zeros((0,), flat_losses(120), BIASES, 30), "warning"),
    ],
    "zero-gradients": [
        (layered(120, lambda step, place: 0.0 if step >= 50 else 1.0, MET), None),
        (layered(120, lambda step, place: 0.0 if step >= 50 else 1.0, flat_losses(120)), "warning"),
        (zeros((2, 3, 4, 5, 6), falling_losses(150)), "info"),
        (zeros((2, 3, 4, 5, 6), flat_losses(150)), "warning"),
    ],
    "dead-units": [
        (act(dead=0.4), None),
        (act(dead=0.6), "info"),
        (act(dead=0.8), "info"),  # the loss falls all the same
        (act(FLAT, dead=0.8), "warning"),
        (act(dead=0.97), "warning"),
        (with_activities(activity(dead=1.0), since=80), None),  # one sample
        (with_activities(activity(zero=0.95, units=0)), None),
        (with_activities(activity(zero=1.0, units=0)), True),
    ],
    "lone-element": [
        (flipped(), "warning"),
        (flipped(largest=50.0), None),  # not far enough out
        (flipped(at=(100, 105, 110)), "warning"),
        (flipped(at=(90, 95, 100, 105)), None),  # too often for chance
        (flipped(at=(19,)), None),  # nothing to compare with
        (flipped(at=(20,)), "warning"),
        (flipped(numel=40), None),  # a few numbers can be one-sided
        (flipped(loss=lambda step, loss: 10 * loss if step == 100 else loss), None),  # the batch, or weights before it
        (flipped(loss=lambda step, loss: 2e3 * loss if 60 < step < 70 else loss), None),  # after an explosion
        (large_and_whole(), None),
        (not_finite(1), True),
        (not_finite(2), None),
    ],
    "non-finite-weights": [(repaired(), None)],
    "update-ratio-high": [
        (updates(lambda step: 0.9 if step == 0 else 0.01, lrs=[1e-2] * 10 + [1e-3] * 130), None),  # a hot start
        (updates(lambda step: 0.9 if step == 0 else 0.01), "info"),
        (updates(lambda step: 0.3 if step == 0 else 0.03), None),  # early steps of Adam are large
        (updates(5.0, initialization={"a.weight": (1e-5, 0.1), "b.weight": (1e-5, 0.1)}), None),
        (updates(lambda step: 0.2 if step == 40 else 0.01, num_steps=900), True),  # it outlasts the window
        (updates(0.6), "info"),
        (updates(0.6, flat_losses(60), 60), "info"),
        (updates(0.6, falling_losses(200, pace=400.0), 200), "info"),  # little was gained yet, and more is being gained
        (ended(updates(0.6, flat_losses(60), 60)), "warning"),
        (updates(0.6, flat_losses(140)), "warning"),
        (updates(0.6, falling_losses(140, noise=0.8)), "warning"),  # restless
        (stuck_and_dead(0.6), "warning"),
        (stuck_and_dead(0.4), "info"),
    ],
    "update-ratio-low": [
        (updates(3e-5), None),  # the loss falls
        (updates(3e-5, flat_losses(140)), "warning"),
        (updates(3e-5, flat_losses(140), lrs=[1e-5 * (s + 1) for s in range(140)]), None),  # a warm-up
    ],
    "parameters-not-in-optimizer": [
        (without("abc"), "warning"),
        (without("abcd"), "info"),
        (without("ab", all_names="ab"), "critical"),
        (without("a", all_names="a"), "info"),
        (without("abcd", flat_losses(120)), "warning"),
        (run(FALLING, names=["a"], num_untrained=1), "warning"),  # of another module, which the loss depends on
    ],
    "frozen-parameters": [
        *((frozen(names), "warning") for names in ("e", "a", "ab", "abc", "ac", "fghij")),
        *((frozen(names), "info") for names in ("abcd", "abcde", "efghij")),
        (frozen("abcdef", flat_losses(120)), "warning"),
        (frozen("b", falling_losses(99)), "info"),
        (frozen("b", initialization={"a": (0.1, 0.1)}), "info"),  # a mask, say
        (frozen("b", falling_losses(300, pace=20.0)), "info"),
    ],
    "missing-gradients": [
        (run(FALLING, names=["v", "w", "x", "y"]), "info"),
        (run(FALLING, names=["a.weight", "w"], learning_modules=["a"]), "warning"),  # the way to it is cut off
        (run(FALLING, names=["a.weight", "w"], learning_modules=["b"]), "info"),
        (run(FALLING, names=["a.weight", "w"], learning_modules=["b", "a"]), "info"),  # an output that is not used
        (run(flat_losses(100), names=["w", "b.weight"]), "warning"),
        (run(flat_losses(100), names=["w", "eps"]), "info"),
    ],
    "poor-initialisation": [
        *((begun(ratio, ratio, ratio), None) for ratio in (0.4, 1.5)),
        (begun(2.5, 2.5, 1.0), "warning"),
        (begun(9.0, 1.0, 1.0), "warning"),
        (begun(0.05, 1.0, 1.0), None),  # the end of a residual branch
        (begun(0.01, 1.0, 1.0), "info"),
        *((begun(ratio, ratio, 1.0), said) for ratio, said in ((0.04, "info"), (0.01, "warning"))),
        (begun(0.04, 0.04, 1.0, losses=flat_losses(60)), "warning"),
        (begun(1.0, 0.01, 1.0, losses=flat_losses(200)), "warning"),
        (begun(1.0, 0.01, 1.0, losses=flat_losses(199)), "info"),
        (
            run(flat_losses(60), initialization={"0.w": (0.1, 0.1), "w": (1e-3, 0.1)}, names=["0.w", "w"]),
            True,
        ),
        (begun(0.0, 0.0, 1.0, losses=flat_losses(60)), "critical"),
        (begun(0.0, 0.0, 1.0, 1.0, losses=flat_losses(60)), None),  # half of them: the ends of residual branches
        (begun(0.0, 0.0, 0.0, losses=falling_losses(200, pace=10.0)), None),  # a linear model may begin so
        (gpt2("LayerNorm", 0.02 / 8**0.5), None),
        (gpt2("ReLU", 0.02 / 8**0.5), True),
        (gpt2("RMSNorm", 0.0005), True),
        (run(FLAT[:20], initialization={"r.weight_hh_l0": (0.16, 0.1)}, module_kinds={"RNN": 1}), "warning"),
        (run(FLAT[:20], initialization={"r.weight_hh_l0": (0.16, 0.1)}, module_kinds={"LSTM": 1}), "info"),
        (run(falling_losses(20), initialization={"rnn.weight_ih_l0": (0.16, 0.1), "head.weight": (0.04, 0.1)}), None),
    ],
    "large-weight-decay": [
        (decay(0.05), "info"),
        (decay(0.04), None),
        (decay(0.05, kind="SGD"), "info"),
        (decay(0.9, kind="AdamW"), None),
        (decay(1.0, kind="AdamW"), "info"),
        (decay(0.5, flat_losses(120), "SignDescent"), None),  # an unknown kind counts as decoupled
        *((decay(value, falling_losses(200)), said) for value, said in ((0.5, "warning"), (0.49, "info"))),
        (decay(0.4, flat_losses(99)), "info"),
        (decay(0.4, flat_losses(100)), "warning"),
        (ended(decay(0.4, flat_losses(39))), "info"),
        (ended(decay(0.4, flat_losses(40))), "warning"),
        (decay(0.4, [2.3] * 10 + [0.95] * 90), "warning"),
        (decay(0.4, [2.3] * 10 + [0.9] * 90), "info"),
        (decay(1.0, HALF_LEARNT, "AdamW"), "warning"),
        (decay(0.05, [2.3] * 10 + [2.0] * 90), "info"),
    ],
}
