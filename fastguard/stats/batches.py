"""What went into a model and what came out of it in one forward pass, sampled. Vocabulary, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import values


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One forward pass of the whole model: the first floating-point tensor that it was given (the first tensor, if none
    is) and the first one that it returned (one with dimensions goes first).

    All figures are of a strided sample of at most 4096 elements of each, NaN and Inf left out; NaN stands for what
    cannot be told, such as the spread of a batch of one.

    Attributes:
        training, with_grad: whether the model was in training mode; whether autograd was on.
        num_samples: leading dimension of the first tensor that the model was given.
        input_abs_max, input_mean, input_std: of the input; the population's standard deviation.
        input_num_nonfinite: NaN and Inf among the elements looked at.
        input_is_integer: it holds integers, or truth values: tokens, labels, bytes.
        input_constant_share: share of the features that are the same in all samples.
        input_digest: 63 bits of the elements looked at. Equal batches have equal ones.
        output_abs_max, output_min, output_max, output_mean, output_std, output_num_nonfinite: of the output.
        output_width: its last dimension; 1 if it has one or none.
        output_spread: mean over features of the standard deviation over samples; 0 is the same answer to every input.
        output_is_unit: all of it lies within [0, 1].
        output_rows_sum_to_one: all along the last dimension adds up to 1, and there is more than one.
    """

    training: bool
    with_grad: bool
    num_samples: int
    input_abs_max: float
    input_mean: float
    input_std: float
    input_num_nonfinite: int
    input_is_integer: bool
    input_constant_share: float
    input_digest: int
    output_abs_max: float
    output_min: float
    output_max: float
    output_mean: float
    output_std: float
    output_num_nonfinite: int
    output_width: int
    output_spread: float
    output_is_unit: bool
    output_rows_sum_to_one: bool

    def to_dict(self) -> dict[str, Any]:
        """Every field, as plain types."""
        return {name: getattr(self, name) for name in _NAMES}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> BatchSample:
        """The inverse of `to_dict`, after JSON too; keys that it does not know are left out.

        Raises:
            MisfitError: a key is missing, or its value is of another kind.
        """
        return cls(**values.named(cls, values.mapping(plain), _NAMES))


_NAMES = tuple(f.name for f in dataclasses.fields(BatchSample))
