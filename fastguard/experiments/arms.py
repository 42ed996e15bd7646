"""Arms: named changes to a training, each of which changes one thing from outside, without the user's code.

An arm changes the process that it is applied in, and is never undone: apply it in a process of its own, a forked child
(`forked.py`) or a script started again (`fastguard try`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import model_changes as of_model
from . import step_changes as of_step
from .context import Context


@dataclass(frozen=True)
class Arm:
    """One change to a training.

    Attributes:
        name: what is changed, as a table shows it.
        text: the same as a clause that follows "with": "the learning rate divided by 10".
        apply: makes the change, from the next forward pass or step on.
        applies: returns why the change cannot be made, or would change nothing; None if it can.
        remedies: causes (`fastguard.diagnosis.CAUSES`) whose remedy this is.
        advice: what to change in the script if the arm helps.
        from_start: the change is only fair before the first step; later it would break trained weights.
        is_null: the arm is expected to harm; if it does not, the targets do not belong to the inputs.
        by_validation: only validation losses can tell, because the arm also changes what the training loss measures.
        prepare: makes a part of the change that has to be made before the script begins; None if there is none. In a
            training that runs already, the arm cannot be applied then.
    """

    name: str
    text: str
    apply: Callable[[Context], None]
    applies: Callable[[Context], str | None] = lambda context: None
    remedies: tuple[str, ...] = ()
    advice: str = ""
    from_start: bool = False
    is_null: bool = False
    by_validation: bool = False
    prepare: Callable[[], None] | None = None

    def why_not(self, context: Context) -> str | None:
        """Why the arm cannot be run here, as a clause; None if it can."""
        if (self.from_start or self.prepare is not None) and context.step:
            return "it has to start before the first step"
        return self.applies(context)


ARMS: dict[str, Arm] = {}


def _arm(name: str, text: str, apply: Callable[[Context], None], **more: Any) -> None:
    ARMS[name] = Arm(name, text, apply, **more)


def arms_for(causes: Iterable[str]) -> list[Arm]:
    """The arms that are a remedy of one of `causes`, in the order of the causes.

    >>> [arm.name for arm in arms_for(["learning-rate-too-low"])]
    ['lr x10']
    """
    return list(dict.fromkeys(arm for cause in causes for arm in ARMS.values() if cause in arm.remedies))


_arm(
    "lr x10",
    "the learning rate times 10",
    of_step.multiply_lr(lambda context: lambda step: 10.0),
    applies=of_step.has_lr,
    remedies=("learning-rate-too-low",),
    advice="Multiply the learning rate by 10.",
)
_arm(
    "lr x0.1",
    "the learning rate divided by 10",
    of_step.multiply_lr(lambda context: lambda step: 0.1),
    applies=of_step.has_lr,
    remedies=("learning-rate-too-high",),
    advice="Divide the learning rate by 10.",
)
_arm(
    "warm-up",
    "a linear warm-up",
    of_step.multiply_lr(of_step.warm_up),
    applies=of_step.has_lr,
    remedies=("learning-rate-too-high",),
    advice="Raise the learning rate linearly over the first steps.",
    from_start=True,
)
_arm(
    "max_norm x10",
    "the clip limit times 10",
    of_step.raise_limit,
    applies=of_step.has_limit,
    remedies=("clipped-away", "gradients-too-large-to-clip"),
    advice="Multiply max_norm by 10.",
)
_arm(
    "clipping",
    "gradients clipped at their median norm",
    of_step.clip_at_median,
    applies=of_step.may_clip,
    remedies=("exploding-gradients",),
    advice="Clip the gradients at their usual norm: fastguard.wrap(..., max_norm=...).",
)
_arm(
    "no weight decay",
    "no weight decay",
    of_step.stop_decay,
    applies=of_step.has_decay,
    remedies=("weight-decay-too-high",),
    advice="Set weight_decay=0.",
)
_arm(
    "default settings",
    "the optimizer's default betas, eps and momentum",
    of_step.set_defaults,
    applies=of_step.has_tuned,
    remedies=("wrong-optimizer-settings",),
    advice="Leave betas, eps and momentum at the optimizer's defaults.",
)
_arm(
    "gradients cleared",
    "the gradients cleared after each step",
    of_step.clear_gradients,
    applies=of_step.are_left,
    remedies=("missing-zero-grad",),
    advice="Call optimizer.zero_grad() after each step.",
)
_arm(
    "train mode",
    "the model in training mode",
    of_model.to_train_mode,
    applies=of_model.is_in_eval_mode,
    remedies=("normalisation-statistics",),
    advice="Call model.train() before training.",
)
_arm(
    "float32",
    "autocast off",
    of_model.leave_autocast,
    applies=of_model.in_autocast,
    remedies=("half-precision-overflow", "half-precision-underflow"),
    advice="Train in float32.",
)
_arm(
    "no dropout",
    "no dropout",
    of_model.without_dropout,
    applies=of_model.has_dropout,
    remedies=("dropout-too-high",),
    advice="Set dropout to 0.",
    by_validation=True,
)
_arm(
    "no final activation",
    "the model's last activation removed",
    of_model.remove_final_activation,
    applies=of_model.has_final_activation,
    remedies=("wrong-output-layer",),
    advice="Remove the last activation: the loss takes the plain output of the last layer.",
)
_arm(
    "default initialization",
    "PyTorch's default initialization",
    of_model.initialize,
    applies=of_model.can_initialize,
    remedies=("poor-initialisation",),
    advice="Leave the initialization to PyTorch: reset_parameters().",
    from_start=True,
)
_arm(
    "inputs standardized",
    "each input feature at mean 0 and standard deviation 1",
    of_model.standardize_inputs,
    applies=of_model.needs_model,
    remedies=("unnormalised-inputs",),
    advice="Standardize the inputs.",
    from_start=True,
)
_arm(
    "targets standardized",
    "the targets at mean 0 and standard deviation 1",
    of_model.standardize_targets,
    applies=of_model.has_odd_targets,
    remedies=("unnormalised-targets",),
    advice="Standardize the targets, and scale the predictions back.",
    from_start=True,
)
_arm(
    "batches shuffled",
    "the training data in random order",
    lambda context: None,
    applies=of_model.reads_in_order,
    advice="Pass shuffle=True to the DataLoader of the training data.",
    by_validation=True,
    prepare=of_model.shuffle_loaders,
)
_arm(
    "inputs permuted",
    "inputs permuted against targets",
    of_model.permute_inputs,
    applies=of_model.needs_model,
    remedies=("wrong-targets",),
    advice="Look at single samples with their targets as the model gets them.",
    is_null=True,
)
