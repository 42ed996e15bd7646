"""Runs a test unguarded and in all guarded modes: what it gives has to be the same, down to the last bit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_everything import MODES, guarding
from guard_helpers import assert_identical

GUARDED = tuple(name for name, settings in MODES.items() if settings is not None)

# What ordinary runs compare; slow ones compare in all modes.
_QUICK = ("max_norm=1e9",)
_SLOW_ONLY = {"test_optimizer_states_as_torch"}  # ordinary runs have no time for them


def in_all_modes(test: Callable[..., Any]) -> Callable[..., None]:
    """A test that returns what came of it: tensors, numbers, texts, and lists and dicts of such.

    One that has an argument `thorough` may do less where that is False. The slow tests are run with True.
    """
    signature = inspect.signature(test)

    @functools.wraps(test)
    def compared(*args: Any, modes: tuple[str, ...], thorough: bool, **kwargs: Any) -> None:
        if "thorough" in signature.parameters:
            kwargs["thorough"] = thorough
        with guarding(None):
            expected = _seeded(test, *args, **kwargs)
        assert expected is not None, "the test must return what came of it"
        for mode in modes:
            problem = _problem(test, MODES[mode], expected, *args, **kwargs)
            if problem is not None:
                raise AssertionError(f"guarded, mode {mode!r}: {problem}") from problem

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
