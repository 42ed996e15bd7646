"""Runs a test unguarded and in all guarded modes: what it gives has to be the same, down to the last bit."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from guard_everything import MODES, guarding
from guard_helpers import assert_identical

GUARDED = tuple(name for name, settings in MODES.items() if settings is not None)
SKIPPING = ("idle", "max_norm=1e9", "watched")


class Difference(NamedTuple):
    """What is not the same guarded, and why that is right.

    Attributes:
        says: a regular expression; the comparison or an error in the test must say so.
        reason: where it is documented, and why.
        modes: in which of `MODES`; default all that are guarded.
    """

    says: str
    reason: str
    modes: tuple[str, ...] = GUARDED


# By name of the test.
DIFFERENCES: dict[str, Difference] = {
    "test_fused_kernels_refuse_meta_tensors": Difference(
        "'UnsupportedTensorError: .*meta or fake tensor.* is not \"RuntimeError: `fused=True` requires",
        "the guard reads the gradients before torch's kernels could refuse their parameters, and refuses them itself",
    ),
    "test_a_scaled_step_without_any_gradient": Difference(
        r"\[1\]: <class 'NoneType'> is not <class 'str'>",
        "a GradScaler takes a guarded optimizer for one that unscales by itself, so that it hides no skipped step from "
        "the guard: `step` goes through, as for torch's fused optimizers, and `update` raises",
    ),
    "test_float16_gradients_are_not_unscaled": Difference(
        r"\[1\]: <class 'NoneType'> is not <class 'str'>",
        "for the same reason `step` takes float16 gradients, which the guard unscales, as torch's fused optimizers do",
    ),
    "test_gradients_that_go_bad_after_they_were_unscaled": Difference(
        "the parameters were kept",
        "README: a step with NaN in its gradients is skipped, whoever has put it there",
        SKIPPING,
    ),
}

# What ordinary runs compare; slow ones compare in all modes.
_QUICK = ("max_norm=1e9",)
_SLOW_ONLY = {
    "test_optimizer_states_as_torch",
    "test_schedulers_as_torch",
}  # files for which ordinary runs have no time


def in_all_modes(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that returns what came of it: tensors, numbers, texts, and lists and dicts of such.

    One that has an argument `thorough` may do less where that is False. The slow tests are run with True.
    """
    signature = inspect.signature(test)
    difference = DIFFERENCES.get(test.__name__)

    @functools.wraps(test)
    def compared(*args: Any, modes: tuple[str, ...], thorough: bool, **kwargs: Any) -> None:
        if "thorough" in signature.parameters:
            kwargs["thorough"] = thorough
        with guarding(None):
            expected = _seeded(test, *args, **kwargs)
        assert expected is not None, "the test must return what came of it"
        for mode in modes:
            problem = _problem(test, MODES[mode], expected, *args, **kwargs)
            if difference is None or mode not in difference.modes:
                if problem is not None:
                    raise AssertionError(f"guarded, mode {mode!r}: {problem}") from problem
            else:
                assert problem is not None, f"mode {mode!r} does not differ any more; take it out of `DIFFERENCES`"
                assert re.search(difference.says, str(problem)), f"mode {mode!r} differs otherwise: {problem}"

    efforts = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("modes", "thorough")]
    given = [p for p in signature.parameters.values() if p.name != "thorough"]
    compared.__signature__ = signature.replace(parameters=[*given, *efforts])  # type: ignore[attr-defined]
    quick = pytest.param(_QUICK, False, id="quick")
    slow = pytest.param(GUARDED, True, id="all-modes", marks=pytest.mark.slow)
    efforts_here = [slow] if test.__module__ in _SLOW_ONLY else [quick, slow]
    return pytest.mark.parametrize(("modes", "thorough"), efforts_here)(compared)


def _seeded(test: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(20240)
    return test(*args, **kwargs)


def _problem(
    test: Callable[..., Any], settings: dict[str, Any] | None, expected: Any, *args: Any, **kwargs: Any
) -> Exception | None:
    try:
        with guarding(settings) as guards:
            got = _seeded(test, *args, **kwargs)
        assert guards, "no optimizer was guarded"
        assert_identical(got, expected)
    except Exception as error:
        return error
    return None


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call gives, or type and message of its error."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
