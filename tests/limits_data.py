"""Where the rules on data, targets and outputs begin and end: runs, and what each sign says of them."""

import math

from made_runs import (
    batch,
    batches_run,
    chance_losses,
    ended,
    falling_losses,
    flat_losses,
    passed,
    run,
    validated,
)

LINEAR = "AddmmBackward0"
CROSS = ("NllLossBackward0", "LogSoftmaxBackward0")
BINARY = {"target_range": [0.0, 1.0]}
LEARNT = falling_losses(200, start=1.0, floor=0.01, pace=10.0)
CLASS = {"num_targets": 256, "num_target_classes": 1, "target_top_share": 1.0, "target_batch_top_share": 1.0,
         "loss_kind": "cross-entropy"}  # fmt: skip


def squared(losses=None, *, first=1.0, **notes):
    """A run whose loss is a squared error: its first value is what that would have been."""
    losses = flat_losses(100, level=first) if losses is None else losses
    usual = {"target_mean": 0.0, "target_std": 1.0, "target_range": [-2.0, 2.0], "target_binary_share": 0.0}
    return run([first, *losses], loss_kind="squared error", **{"squared_losses": [first], **usual, **notes})


def sees(losses=None, *, then=None, **fields):
    """A run that looks at these training batches, and then at other passes."""
    losses = falling_losses(100) if losses is None else losses
    return batches_run(losses, batch(**fields), *([passed(**then)] if then else []))


def noted(losses=None, made=None, **notes):
    return batches_run(falling_losses(100) if losses is None else losses, made or batch(), **notes)


def once(losses=None, **fields):
    """One batch, that of step 40, is as given."""
    made = lambda step: batch(**({"input_abs_max": 2.5} | (fields if step == 40 else {})))(step)  # noqa: E731
    return batches_run(falling_losses(100) if losses is None else losses, made)


def sorted_run(num_samples=8, losses=None, **notes):
    known = {"num_targets": 64, "num_target_classes": 3, "target_top_share": 0.4, "target_batch_top_share": 1.0}
    return batches_run(losses or COMES_LATER, batch(num_samples=num_samples), **{**known, **notes})


def answered(losses=None, fields=None, **notes):
    known = {"loss_kind": "cross-entropy", "target_in_inputs": 1.0, **notes}
    return batches_run(losses or flat_losses(60), batch(**(fields or {})), **known)


def shifted(*found):
    return run(flat_losses(12), loss_kind="cross-entropy", target_shift=found)


def unrelated(losses=None, **notes):
    return run(losses or flat_losses(220), **{"loss_kind": "cross-entropy", "target_dependence": 0.0, **notes})


def tried(losses=None, **changes):
    """Inputs were permuted, after 100 steps, to no effect."""
    note = {"step": 100, "arm": "inputs permuted", "causes": ["wrong-targets"], "verdict": "no difference"}
    note |= {"effect": -0.001, "t": -1.0, "num_steps": 40, "ratio": 2.0, "text": "Tried: no clear difference."}
    return run(losses or [*[2.9] * 20, *flat_losses(180)], experiments=[{**note, **changes}])


def uneven(losses=None, share=0.91, **notes):
    return run(losses or flat_losses(60), num_targets=128, target_top_share=share, **{"num_target_classes": 3, **notes})


def ended_in(layer, low=-1.0, high=1.0, losses=None, **notes):
    """A model that ends in this module, and its outputs."""
    made = batch(output_min=low, output_max=high, output_abs_max=max(-low, high))
    return batches_run(losses or flat_losses(100), made, last_modules=[layer, "Linear"], **notes)


def takes(*ops):
    return run(falling_losses(20), loss_ops=[f"{op}Backward0" for op in ops])


def regression(losses, *, first, mean=0.0, std=1.0, width=1, **notes):
    """A squared error of targets that are known."""
    known = {"target_mean": mean, "target_std": std, "loss_kind": "squared error", "squared_losses": [first]}
    return batches_run([first, *losses], batch(output_width=width), **{**known, **notes})


def spoilt(at, num_bad):
    """Large targets, and losses that are NaN for a while."""
    losses = [400.0 * loss for loss in falling_losses(60 if at == 5 else 150, start=1.0, floor=0.0, pace=20.0)]
    first, losses[at : at + num_bad] = losses[0], [math.nan] * num_bad
    norms = [math.nan if math.isnan(loss) else 1.0 for loss in losses]
    return run(losses, norms, loss_kind="squared error", squared_losses=[first], target_mean=0.0, target_std=20.0)


def follows(val_loss):
    return run(falling_losses(220), val_losses={59: 2.3, 119: val_loss}, target_dependence=0.0)


COMES_LATER = [max(0.4, 1.0 - 0.1 * step) for step in range(20)] + [3.0, 2.0, *flat_losses(80, level=1.2)]
RANKING = ("AddBackward0", "MeanBackward0", "SoftplusBackward0", "SubBackward0")
ABSOLUTE = ("MeanBackward0", "DivBackward0", "AbsBackward0", "SubBackward0")

LIMITS = {
    "input-scale": [
        (sees(flat_losses(60), input_mean=0.0, input_std=9.9), None),
        (sees(flat_losses(60), input_mean=0.0, input_std=10.1), "warning"),
        (sees(flat_losses(60), input_mean=200.0, input_std=0.0), "warning"),
        (sees(flat_losses(60), input_mean=0.0, input_std=1.1e-3), None),
        (sees(flat_losses(60), input_mean=0.0, input_std=1e-4), "warning"),
        (sees(flat_losses(60), input_mean=0.0, input_std=0.0), None),  # nothing but zeros, as of a padded batch
        (sees(flat_losses(60), input_mean=9e3, input_std=9e3, input_is_integer=True), None),  # tokens
        (sees(flat_losses(60), input_std=math.nan, input_num_nonfinite=3), None),
        (sees(flat_losses(60), input_mean=math.nan, input_std=math.nan), None),  # an empty batch
        (sees(falling_losses(200), input_std=40.0), "info"),
        (sees(falling_losses(60), input_std=51.0, input_mean=0.0), "warning"),
        (sees(falling_losses(59), input_std=51.0, input_mean=0.0), "info"),
        (noted(falling_losses(60), batch(input_std=1e3, input_mean=0.0), module_kinds={"BatchNorm1d": 1}), "info"),
        (sees([2.0] * 10 + [1e6] * 60, input_std=1e4, input_mean=0.0), "critical"),
        (sees(flat_losses(59), input_std=40.0, input_mean=0.0), "info"),
        (sees([2.3] * 10 + [1.65] * 90, input_std=40.0, input_mean=0.0), "warning"),
        (sees([2.3] * 10 + [1.55] * 90, input_std=40.0, input_mean=0.0), "info"),
    ],
    "same-inputs": [
        (sees(input_digest=7), "info"),  # perhaps the whole set
        (noted(made=batch(input_digest=7), steps_per_epoch=1), "info"),
        (noted(made=batch(input_digest=7), steps_per_epoch=2), "warning"),
        (noted(falling_losses(50), batch(input_digest=7), steps_per_epoch=2), None),
        (noted(made=batch(input_digest=7), val_losses=validated(100, level=30.0)), "warning"),
        (noted(made=batch(input_digest=7), val_losses=validated(100, level=1.0)), "info"),
        (sees(input_constant_share=1.0), "warning"),
        (sees(input_constant_share=0.9), None),  # as the border of most pictures
        (sees(input_constant_share=1.0, num_samples=1), None),
    ],
    "validation-inputs-differ": [
        *(
            (batches_run(falling_losses(100), batch(), passed(**then), val_losses=validated(100, level=level)), said)
            for then, level, said in (
                ({"input_mean": 0.9}, 9.0, None),
                ({"input_mean": 1.1}, 9.0, "warning"),
                ({"input_mean": 1.1}, 0.3, "info"),
                ({"input_std": 2.4}, 9.0, None),
                ({"input_std": 2.6}, 9.0, "warning"),
                ({"input_std": 0.39}, 9.0, "warning"),
                ({"input_mean": 5.0, "input_is_integer": True}, 9.0, None),
                ({"input_std": 0.0}, 9.0, None),
            )
        ),
        *(
            (batches_run(falling_losses(100), batch(), passed(**then), loss_kind=kind), said)
            for then, kind, said in (
                ({"input_std": 3.8}, "cross-entropy", "warning"),
                ({"input_std": 3.7}, "cross-entropy", "info"),
                ({"input_mean": 2.1}, "cross-entropy", "warning"),
                ({"input_mean": 1.9}, "cross-entropy", "info"),
                ({"input_std": 3.8}, "squared error", "info"),
            )
        ),
    ],
    "one-target": [
        (run(falling_losses(20), num_targets=32, num_target_classes=1), "warning"),
        (run(falling_losses(20), num_targets=31, num_target_classes=1), None),
        (run(falling_losses(20), num_targets=900, num_target_classes=2), None),
        (squared(target_mean=3.0, target_std=0.0, target_range=[3.0, 3.0]), "warning"),
        (squared(target_mean=3.0, target_std=0.01, target_range=[2.9, 3.1]), None),
        (run(falling_losses(20)), None),
        (run(falling_losses(60), num_targets=200, num_target_classes=1, loss_ops=["MseLossBackward0", LINEAR]), None),
        (run(falling_losses(20), **CLASS, loss_ops=["NegBackward0", "SumBackward0", "LogSigmoidBackward0"]), None),
        (run(falling_losses(20), **CLASS, loss_ops=["NllLossBackward0", "CatBackward0"]), None),  # InfoNCE
        (noted(COMES_LATER, batch(output_width=4), **CLASS), None),  # others follow
        (noted(falling_losses(100, pace=5.0, floor=1e-4, noise=0.0), batch(output_width=4), **CLASS), "warning"),
    ],
    "sorted-targets": [
        (sorted_run(4), "warning"),
        (sorted_run(3), None),  # three of one class are no wonder
        (sorted_run(num_targets=63), None),
        (sorted_run(target_batch_top_share=0.81), "warning"),
        (sorted_run(target_batch_top_share=0.79), None),
        (sorted_run(target_top_share=0.76), None),  # uneven-targets
        (sorted_run(target_batch_top_share=None), None),  # as of an old log
        (noted(falling_losses(120), batch(), **CLASS), None),  # no other class comes
        (noted(COMES_LATER, batch(output_width=4), **CLASS), "warning"),
        (sorted_run(losses=falling_losses(120), num_target_classes=3, target_top_share=0.45), "warning"),
        (sorted_run(losses=falling_losses(120), num_target_classes=2, target_top_share=0.45), None),
    ],
    "answer-in-inputs": [
        (answered(), "warning"),
        (answered(target_in_inputs=0.999), None),
        (answered(target_in_inputs=None), None),  # as of an old log
        (answered(loss_kind=""), None),
        (answered(loss_kind="squared error"), None),  # not proved
        (answered(fields={"input_is_integer": True}), "info"),  # an autoencoder's
        (answered([2.3] * 10 + [0.1] * 90, {"input_is_integer": True}), "warning"),
        (answered([2.3] * 10 + [0.1] * 90, {"input_is_integer": True}, target_shift=[1, 6, 6]), None),  # copying
    ],
    "answer-seen": [
        (shifted(1, 6, 7), "warning"),
        (shifted(1, 6, 6), None),
        (shifted(1), None),  # not known
        (shifted(), None),
        (shifted(2, 6, 8), "warning"),
        (shifted(2, 6, 7), None),
    ],
    "unrelated-targets": [
        (unrelated(target_dependence=1.6), "warning"),
        (unrelated(target_dependence=1.7), None),
        (unrelated(target_dependence=None), None),  # as of an old log
        (unrelated(loss_kind="squared error", loss_ops=["MeanBackward0", "GatherBackward0"]), None),  # of actions
        (unrelated(loss_kind="squared error", loss_ops=["L1LossBackward0"]), "warning"),
        (unrelated(objective="reward"), None),
        (unrelated(flat_losses(199)), "info"),
        (unrelated(flat_losses(200)), "warning"),
        (unrelated(falling_losses(220)), "info"),
        (noted(flat_losses(220), batch(input_is_integer=True), target_dependence=0.0), None),  # tokens
        *((follows(level), said) for level, said in ((1.0, None), (2.2, "warning"), (9.0, "warning"))),
    ],
    "inputs-without-effect": [
        (tried(), "warning"),
        (tried(verdict="helps", t=9.0), "warning"),
        (tried(verdict="harms", t=-3.1), None),
        (tried(step=99), None),
        (tried(arm="lr x10"), None),
        (tried(falling_losses(200)), None),
        (tried(flat_losses(200)), None),  # nothing is learnt
        (tried(effect=0.0), None),  # nothing was permuted
    ],
    "uneven-targets": [
        (uneven(), "warning"),
        (uneven(falling_losses(200, pace=20.0)), "info"),
        (uneven(flat_losses(49)), "info"),
        (uneven([2.3] * 10 + [1.65] * 90), "warning"),
        (uneven([2.3] * 10 + [1.55] * 90), "info"),
        (uneven(share=0.9), None),
        (uneven(share=0.95, has_loss_weights=True), "info"),
        (uneven(LEARNT, share=0.94), "info"),
        (uneven(LEARNT, share=0.95), "warning"),
        (uneven(flat_losses(60, level=0.2), share=0.95, target_entropy=0.5), "info"),  # the rare ones, too
        (uneven(flat_losses(60, level=0.3), share=0.95, target_entropy=0.5), "warning"),
        (uneven(share=1.0, num_target_classes=1), None),  # one-target
        (uneven(falling_losses(100), share=0.85, num_target_classes=9), "warning"),  # of many classes
        (uneven(falling_losses(100), share=0.79, num_target_classes=9), None),
    ],
    "target-scale": [
        (squared(target_std=9.9), None),
        (squared(target_std=10.1), "warning"),
        (squared(target_mean=-20.0, target_std=0.1), "warning"),
        (squared(flat_losses(30), target_std=10.1), "info"),
        (squared(target_std=10.1, loss_ops_beside=["ExpBackward0", "MinimumBackward0"]), None),  # of a critic
        (squared(LEARNT, target_std=10.1), "info"),
        *((squared(LEARNT, target_std=std), said) for std, said in ((99.0, "info"), (101.0, "warning"))),
        (squared(LEARNT, target_mean=99.0, squared_losses=[7.0]), None),  # it never was a squared error
        *((spoilt(*bad), said) for bad, said in (((5, 9), "info"), ((5, 10), "warning"), ((100, 20), "info"))),
    ],
    "loss-against-targets": [
        (squared(**BINARY, target_binary_share=0.99), "warning"),
        (squared(**BINARY, target_binary_share=0.98), None),
        (squared(target_binary_share=1.0), None),  # of one batch: another's went from -2 to 2
        (squared(flat_losses(30), **BINARY, target_binary_share=1.0), "info"),
        (squared(LEARNT, **BINARY, target_binary_share=1.0), "info"),
        (squared(**BINARY, target_binary_share=1.0, target_std=0.0), None),  # one-target
        (run([1.0, -0.1], loss_kind="cross-entropy"), "warning"),
        (run([1.0, -0.1], loss_kind="cross-entropy", loss_ops=["SubBackward0", "NllLossBackward0"]), None),
        (run([1.0, -0.1], loss_kind="binary cross-entropy"), "warning"),
        (run([1.0, -1e-4], loss_kind="cross-entropy"), None),  # rounding
        (run([1.0, -0.1], loss_kind="cross-entropy", loss_ops=["MeanBackward0", "MulBackward0"]), None),  # an advantage
        (run([1.0, -5.0], loss_kind="negative log-likelihood"), None),
        (run([1010.0] * 20, loss_ops=ABSOLUTE), "warning"),
        (run([990.0] * 20, loss_ops=ABSOLUTE), None),
        (run([1010.0] * 20, loss_ops=["MeanBackward0", "AbsBackward0", "SubBackward0"]), None),  # not relative
    ],
    "broadcast-targets": [
        (takes("MseLoss", "Expand", "Addmm"), "warning"),
        (takes("Mean", "Abs", "Sub", "Expand"), "warning"),
        (takes("MseLoss", "Addmm"), None),
        (run(flat_losses(20), loss_ops=["MseLossBackward0", "ExpandBackward0"], objective="reward"), "warning"),
        (run(flat_losses(20), loss_ops=["SumBackward1", "SmoothL1LossBackward0", "ExpandBackward0"]), None),
        (run(falling_losses(20), loss_ops=["MeanBackward0", "SubBackward0"], is_paired=True), "warning"),
        (takes("MseLoss", "View", "Expand"), None),
        (takes("Add", "Expand"), None),
        (takes("MseLoss"), None),
        (squared(flat_losses(20), first=1.1, squared_losses=[1.0], target_std=0.0), "warning"),
        (squared(flat_losses(20), first=1.04, squared_losses=[1.0], target_std=0.0), None),
        (squared(flat_losses(20), first=1.1, squared_losses=[1.0], target_std=0.1), None),
    ],
    "targets-beyond-output": [
        *(
            (squared(target_range=[low, high], last_modules=[layer]), said)
            for layer, low, high, said in (
                ("Sigmoid", 0.0, 1.0, None),
                ("Sigmoid", 0.0, 1.03, "warning"),
                ("Sigmoid", -1.0, 1.0, "warning"),
                ("Tanh", -1.0, 1.0, None),
                ("Tanh", -1.0, 2.0, "warning"),
                ("ReLU", 0.0, 1e6, None),
                ("ReLU", -1.0, 1.0, "warning"),
                ("Linear", -9.0, 9.0, None),
            )
        ),
        (squared(target_range=[-1.0, 1.0], last_operations=["Relu", "Addmm"]), "warning"),  # a function, no module
    ],
    "output-against-loss": [
        (takes("NllLoss", "LogSoftmax", "Addmm"), None),
        (takes("NllLoss", "LogSoftmax", "Relu", "Addmm"), "warning"),
        (takes("NllLoss", "LogSoftmax", "Elu", "Mm"), None),
        (takes("NllLoss", "LogSoftmax", "Mean", "Relu"), None),  # pooled, as SqueezeNet ends
        (takes("Mul", "NllLoss", "LogSoftmax", "Relu", "Addmm"), "warning"),  # the loss is weighted
        (takes("NllLoss", "LogSoftmax", "Mul", "Tanh"), None),  # capped logits, times a temperature
        (run(falling_losses(20), loss_ops=["NllLossBackward0"], softmax_over_batch=True), "warning"),
        (run(falling_losses(20), loss_ops=["MulBackward0"], softmax_over_batch=True), None),  # no loss of classes
        (takes("BinaryCrossEntropyWithLogits", "Sigmoid"), "warning"),
        (takes("BinaryCrossEntropyWithLogits", "Addmm"), None),
        (takes("BinaryCrossEntropy", "Sigmoid", "Addmm"), None),
        (takes("BinaryCrossEntropy", "View", "Sigmoid", "Sigmoid"), "warning"),
        (takes("Mean", "Div", "Where", "CtcLoss", "Permute", "LogSoftmax", "Addmm"), None),
        (takes("Mean", "Div", "CtcLoss", "Permute", "Softmax", "Addmm"), "warning"),
        (takes("BinaryCrossEntropy", "Addmm"), "warning"),
        (takes("BinaryCrossEntropy"), None),
        (takes("NllLoss", "Addmm"), "warning"),
        (takes("NllLoss", "Log", "Softmax"), None),
        (takes("MseLoss", "Sigmoid", "Addmm"), None),
    ],
    "output-not-as-the-loss-asks": [
        (noted(made=batch(output_rows_sum_to_one=True), loss_kind="cross-entropy"), "warning"),
        (noted(loss_kind="cross-entropy"), None),
        (noted(made=batch(output_is_unit=True), loss_kind="binary cross-entropy with logits"), "warning"),
        (noted(loss_kind="binary cross-entropy with logits"), None),
        (noted(made=batch(output_is_unit=True), loss_kind="binary cross-entropy"), None),
        (noted(made=batch(output_max=1.5), loss_kind="negative log-likelihood"), "warning"),
        (noted(made=batch(output_max=-0.01), loss_kind="negative log-likelihood"), None),
        (noted(made=batch(output_is_unit=True, output_rows_sum_to_one=True), loss_kind="squared error"), None),
    ],
    "bounded-output": [
        (ended_in("Sigmoid", 0.985, 1.0), "warning"),  # at an end of its range
        (ended_in("Sigmoid", 0.0, 0.015), "warning"),
        (ended_in("Sigmoid", 0.0, 1.0), "info"),
        (ended_in("Tanh", -1.0, -0.985), "warning"),
        (ended_in("ReLU", 0.0, 3.0), "info"),
        (ended_in("LeakyReLU", -0.1, 3.0), "info"),
        (ended_in("LogSoftmax"), None),  # for nll_loss
        (ended_in("Sigmoid", loss_ops=["BinaryCrossEntropyBackward0"]), None),
        (ended_in("ReLU", losses=flat_losses(59)), None),
        (ended_in("Sigmoid", losses=falling_losses(100, pace=20.0)), None),
        (ended_in("Sigmoid", losses=flat_losses(119)), "info"),
        (ended_in("Sigmoid", losses=flat_losses(120)), "warning"),
        (ended_in("Sigmoid", losses=[2.3] * 10 + [1.9] * 110), "warning"),
        (ended_in("Sigmoid", losses=[2.3] * 10 + [1.8] * 110), "info"),
        (ended_in("Sigmoid", losses=[2.3] * 10 + [1.1] * 110), None),
    ],
    "same-output-for-all": [
        (sees(flat_losses(60), output_spread=0.0), "info"),
        (sees(flat_losses(220), output_spread=0.0), "warning"),
        (ended(sees(flat_losses(60), output_spread=0.0)), "warning"),
        (sees(flat_losses(60), output_spread=1e-3), None),
        (sees(flat_losses(60), output_spread=0.0, input_constant_share=1.0), None),  # one answer to one input
        (sees(flat_losses(60), output_spread=0.0, num_samples=1), None),
        (sees(flat_losses(60), output_spread=math.nan), None),
        (sees(falling_losses(220), then={"num_samples": 100, "output_spread": 1e-4}), "warning"),  # in eval mode
        (sees(falling_losses(220), then={"num_samples": 100, "output_spread": 1e-2}), None),
        (sees(falling_losses(220), then={"num_samples": 8, "output_spread": 1e-4}), None),  # a few may be alike
        (sees(falling_losses(220), output_spread=0.0), "info"),  # the loss is of another output
    ],
    "loss-at-chance": [
        (run([2.0, 1.0, *[math.log(2.0)] * 220], loss_ops=RANKING), "warning"),
        (run([2.0, 1.0, *[0.4] * 220], loss_ops=RANKING), None),
        (run([2.0, 1.0, *[math.log(2.0)] * 220], loss_ops=["MeanBackward0", "ReluBackward0"]), None),
        (noted(chance_losses(100)), "warning"),
        (noted(chance_losses(99)), None),
        (noted(chance_losses(199), batch(num_samples=8)), None),  # few samples
        (noted(chance_losses(200), batch(num_samples=8)), "warning"),
        (noted([*falling_losses(200, start=1.386, floor=1.36, noise=0.001)], batch()), None),  # it still falls
        (noted(chance_losses(250, 5)), None),
        (noted(falling_losses(150, start=1.386, floor=1.2)), None),
        (noted(chance_losses(250), loss_kind="cross-entropy"), "warning"),
        *((run(flat_losses(num, level=level, noise=0.01), loss_ops=[f"{op}Backward0" for op in ops]), said)
          for num, level, ops, said in ((250, 0.7, ("Neg", "Mean", "Log", "Sigmoid"), "warning"),
                                        (250, 0.69, ("BinaryCrossEntropyWithLogits",), "warning"),
                                        (250, 0.6, ("BinaryCrossEntropyWithLogits",), None),
                                        (199, 0.69, ("BinaryCrossEntropyWithLogits",), None),
                                        (250, 0.69, ("MseLoss",), None))),
        *((regression(flat_losses(519, level, 0.0), first=level, std=2.0), said) for level, said in (
            (4.0, "warning"), (3.65, "warning"), (3.5, None), (4.75, "warning"), (4.9, None))),
        (regression(flat_losses(119, 4.0, 0.0), first=4.0, std=2.0, squared_losses=[9.0]), None),
        (regression(flat_losses(119, 4.0, 0.0), first=4.0, std=2.0, loss_kind="absolute error"), None),
        (regression([*[4.0] * 40, *[2.0] * 60, *[4.0] * 100], first=4.0, std=2.0), None),  # it was lower once
        (regression([1.15 - 0.0008 * step for step in range(250)], first=26.0, mean=5.0), None),  # it passes by
        *((noted(flat_losses(200, 1.5, 0.02), batch(output_width=10), loss_kind="cross-entropy", target_entropy=entropy,
                 num_targets=num), said) for entropy, num, said in ((1.5, 600, "warning"), (1.5, 500, None),
                                                                    (1.8, 600, None))),
    ],
    "label-noise": [(run(falling_losses(400), val_losses={s: 4.0 + s / 100 for s in range(20, 400, 20)}), "warning")],
}  # fmt: skip
