"""What others' mutation operators do to the training data; what is held out stays as it was."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .loop import Plan

Damage = Callable[[Plan, torch.Generator], None]


def _some(count: int, share: float, dice: torch.Generator) -> torch.Tensor:
    return torch.randperm(count, generator=dice)[: int(share * count)]


def wrong_labels(share: float) -> Damage:
    """So many labels are drawn anew."""

    def damage(plan: Plan, dice: torch.Generator) -> None:
        labels = plan.train[1].clone()
        chosen = _some(len(labels), share, dice)
        labels[chosen] = labels[torch.randint(len(labels), chosen.shape, generator=dice)]
        plan.train = (plan.train[0], labels)

    return damage


def one_label_as_another(plan: Plan, dice: torch.Generator) -> None:
    """All samples of the most frequent class get the label of the next one."""
    labels = plan.train[1].clone()
    order = torch.bincount(labels).argsort(descending=True)
    labels[labels == order[0]] = order[1]
    plan.train = (plan.train[0], labels)


def shuffled_labels(plan: Plan, dice: torch.Generator) -> None:
    """Each sample has another's label."""
    plan.train = (plan.train[0], plan.train[1][torch.randperm(len(plan.train[1]), generator=dice)])


def constant_labels(plan: Plan, dice: torch.Generator) -> None:
    """All samples have the same label."""
    plan.train = (plan.train[0], plan.train[1][:1].expand_as(plan.train[1]).clone())


def deleted(share: float) -> Damage:
    """So many samples are gone."""

    def damage(plan: Plan, dice: torch.Generator) -> None:
        kept = torch.randperm(len(plan.train[0]), generator=dice)[int(share * len(plan.train[0])) :]
        plan.train = tuple(tensor[kept] for tensor in plan.train)

    return damage


def unbalanced(share: float) -> Damage:
    """So much of every class but the first is gone."""

    def damage(plan: Plan, dice: torch.Generator) -> None:
        first = plan.train[1] == 0
        kept = first | (torch.rand(first.shape, generator=dice) > share)
        plan.train = tuple(tensor[kept] for tensor in plan.train)

    return damage


def noisy_inputs(size: float) -> Damage:
    """Noise of so many standard deviations on the inputs."""

    def damage(plan: Plan, dice: torch.Generator) -> None:
        inputs = plan.train[0]
        noise = size * inputs.std() * torch.randn(inputs.shape, generator=dice)
        plan.train = (inputs + noise, *plan.train[1:])

    return damage


def overlapping(plan: Plan, dice: torch.Generator) -> None:
    """Half of the samples stand twice, the second time with another label."""
    inputs, labels = plan.train
    chosen = _some(len(labels), 0.6, dice)
    other = (labels[chosen] + 1) % (int(labels.max()) + 1)
    plan.train = (torch.cat([inputs, inputs[chosen]]), torch.cat([labels, other]))


def scaled(factor: float, shift: float = 0.0) -> Damage:
    """Inputs as they come from the sensor: times `factor`, plus `shift`; held-out ones too."""

    def damage(plan: Plan, dice: torch.Generator) -> None:
        plan.train = (plan.train[0] * factor + shift, *plan.train[1:])
        plan.held_out = (plan.held_out[0] * factor + shift, *plan.held_out[1:])

    return damage


def one_feature_large(plan: Plan, dice: torch.Generator) -> None:
    """One feature is in other units: a hundred thousand times as large."""
    factors = torch.ones(plan.train[0].shape[1:])
    factors.view(-1)[0] = 1e5
    plan.train = (plan.train[0] * factors, *plan.train[1:])
    plan.held_out = (plan.held_out[0] * factors, *plan.held_out[1:])


def scaled_in_training(factor: float) -> Damage:
    """Inputs are scaled in training, and are not where it counts."""

    def damage(plan: Plan, dice: torch.Generator) -> None:
        plan.train = (plan.train[0] * factor, *plan.train[1:])

    return damage


def large_targets(factor: float, shift: float = 0.0) -> Damage:
    """Targets in units so small that they are large numbers."""

    def damage(plan: Plan, dice: torch.Generator) -> None:
        plan.train = (plan.train[0], plan.train[1] * factor + shift)
        plan.held_out = (plan.held_out[0], plan.held_out[1] * factor + shift)

    return damage


def outliers(share: float, factor: float) -> Damage:
    """So many of the targets are `factor` times too large."""

    def damage(plan: Plan, dice: torch.Generator) -> None:
        targets = plan.train[1].clone()
        chosen = _some(len(targets), share, dice)
        targets[chosen] *= factor
        plan.train = (plan.train[0], targets)

    return damage


def with_nan(share: float) -> Damage:
    """So many samples hold a NaN."""

    def damage(plan: Plan, dice: torch.Generator) -> None:
        inputs = plan.train[0].clone()
        chosen = _some(len(inputs), share, dice)
        inputs.flatten(1)[chosen, 0] = torch.nan
        plan.train = (inputs, *plan.train[1:])

    return damage


def sorted_by_class(plan: Plan, dice: torch.Generator) -> None:
    """The samples lie class by class, and are taken as they lie."""
    order = plan.train[1].argsort(stable=True)
    plan.train = tuple(tensor[order] for tensor in plan.train)
    plan.shuffles = False


def one_batch_again_and_again(plan: Plan, dice: torch.Generator) -> None:
    """Each batch of an epoch is its first one."""
    first = plan.batch_size
    times = len(plan.train[0]) // first
    plan.train = tuple(tensor[:first].repeat(times, *[1] * (tensor.ndim - 1)) for tensor in plan.train)
    plan.shuffles = False


DAMAGES: dict[str, Damage] = {
    "half-wrong-labels": wrong_labels(0.5),
    "most-wrong-labels": wrong_labels(0.8),
    "one-label-as-another": one_label_as_another,
    "shuffled-labels": shuffled_labels,
    "constant-labels": constant_labels,
    "most-deleted": deleted(0.96),
    "nearly-all-deleted": deleted(0.985),
    "very-unbalanced": unbalanced(0.985),
    "very-noisy-inputs": noisy_inputs(5.0),
    "overlapping": overlapping,
    "inputs-x1000": scaled(1000.0),
    "inputs-as-bytes": scaled(60.0, 120.0),
    "inputs-x0.0001": scaled(1e-4),
    "inputs-shifted": scaled(1.0, 100.0),
    "one-feature-large": one_feature_large,
    "scaled-in-training": scaled_in_training(30.0),
    "targets-x1000": large_targets(1e3),
    "targets-shifted": large_targets(1.0, 1000.0),
    "outliers": outliers(0.03, 100.0),
    "nan-inputs": with_nan(0.3),
    "sorted-by-class": sorted_by_class,
    "one-batch": one_batch_again_and_again,
}
