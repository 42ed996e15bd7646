"""What can go wrong, by name. Every message says what is required, what was given, where, and the remedy."""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from ._text import did_you_mean, listed, prose

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class FastguardError(Exception):
    """Base of every error that fastguard raises on its own account. Pickling keeps its message and attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception would call the class with the message, which is not what subclasses take.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


def missing_package(user: str, packages: str, error: ImportError, extra: str = "") -> ImportError:
    """The error for a package that `user` needs: what to install, and why importing it failed if it is installed.

    Args:
        extra: the extra of fastguard that has the packages, where it is not named after them.

    >>> print(missing_package("TensorBoardSink", "tensorboard", ModuleNotFoundError()))
    TensorBoardSink needs tensorboard: pip install 'fastguard[tensorboard]'
    """
    why = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
    return ImportError(f"{user} needs {packages}: pip install 'fastguard[{extra or packages}]'{why}")


class UnsupportedTensorError(FastguardError, TypeError):
    """A tensor that no kernel can read; raised instead of a wrong number.

    Attributes:
        index: position in the list that was given; 0 if it was a single tensor.
        problem: what is wrong, without the name of the tensor.
    """

    def __init__(self, index: int, problem: str, name: str | None = None, where: str | None = None) -> None:
        self.index = index
        self.problem = problem
        where = where or f"tensors[{index}]"
        super().__init__(prose(f"`{name or where}` {problem} - at {where}"))


class BackendUnavailableError(FastguardError, RuntimeError):
    """A backend that was asked for by name and cannot run here."""


class NotGuardedError(FastguardError, AttributeError):
    """An optimizer has no guard and needs one."""


class AlreadyGuardedError(FastguardError, RuntimeError):
    """An optimizer that `fastguard.wrap` has already guarded."""


class RecoveryFailedError(FastguardError, RuntimeError):
    """A run kept going wrong after rollbacks, and was restored to its best snapshot.

    Attributes:
        rollbacks: the rollbacks in words, oldest first.
        reason: what went wrong last.
        step: the step to which parameters, buffers and optimizer state were restored; None without a snapshot.
        findings: summaries of the diagnosis.
    """

    def __init__(self, rollbacks: Sequence[str], reason: str, step: int | None, findings: Sequence[str]) -> None:
        self.rollbacks, self.reason, self.step, self.findings = list(rollbacks), reason, step, list(findings)
        where = "Nothing could be put back." if step is None else f"The run was put back to step {step}, its best."
        super().__init__(
            prose(
                f"the run did not recover: {reason}, after {len(self.rollbacks)} rollbacks. {where} "
                f"{' '.join(f'{done}.' for done in self.rollbacks[-3:])} "
                f"Diagnosis: {' '.join(self.findings[:3]) or 'nothing else is known to be wrong.'} "
                "Change something before going on: the learning rate, the data of these steps, or the precision."
            )
        )


class NonFiniteGradientsError(FastguardError, RuntimeError):
    """Too many steps in a row were skipped because their gradients held NaN or Inf.

    A `PolicySkipsError` is one too: some of them were skipped by the clip policy.

    Attributes:
        steps: numbers of the skipped steps, oldest first.
        tensors: names of the tensors that held NaN or Inf, in backward order within a step, first seen first.
    """

    def __init__(self, steps: Sequence[int], tensors: Sequence[str]) -> None:
        self.steps = list(steps)
        self.tensors = list(tensors)
        super().__init__(
            f"{len(self.steps)} steps in a row (steps {self.steps[0]} to {self.steps[-1]}) had gradients that are not "
            f"finite and were skipped; tensors that held NaN or Inf: "
            f"{listed(self.tensors, 8) or 'none, only their norm overflowed'}. "
            "The parameters are as they were before the first of these steps. Lower the learning rate, look at the "
            "data of these steps, or raise `max_consecutive_skips` if so many skips are expected."
        )


class PolicySkipsError(NonFiniteGradientsError):
    """Too many steps in a row were skipped, some of them by the clip policy, with gradients that were finite.

    Attributes:
        steps, tensors: as in `NonFiniteGradientsError`.
        by_policy: numbers of the steps that the clip policy skipped.
    """

    def __init__(self, steps: Sequence[int], tensors: Sequence[str], by_policy: Sequence[int], policy: str) -> None:
        self.steps, self.tensors, self.by_policy = list(steps), list(tensors), list(by_policy)
        others = len(self.steps) - len(self.by_policy)
        rest = f", {others} for gradients that are not finite ({listed(self.tensors, 8)})" if others else ""
        RuntimeError.__init__(
            self,
            f"{len(self.steps)} steps in a row (steps {self.steps[0]} to {self.steps[-1]}) were skipped: "
            f"{len(self.by_policy)} by the clip policy {policy}, whose trigger their finite norms were above{rest}. "
            "The parameters are as they were before the first of these steps. Take a policy that scales instead "
            "(Spikes), or raise `max_consecutive_skips` if so many skips are expected.",
        )


def write_limit(value: Any) -> str:
    """What to write for a limit that was passed in another argument's place; "" if `value` is not a limit.

    >>> write_limit(1.0), write_limit("1.0")
    ('Write max_norm=1.0.', '')
    """
    if callable(getattr(value, "limits", None)):
        return f"Write clip={value.__name__}()." if isinstance(value, type) else f"Write clip={value!r}."
    return f"Write max_norm={value!r}." if isinstance(value, (int, float)) and not isinstance(value, bool) else ""


def explained(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """`function` with TypeErrors that say what to write where an argument has an unknown name or none at all."""
    known = inspect.signature(function).parameters
    by_position = [one.name for one in known.values() if one.kind is one.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def checked(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        for name in kwargs.keys() - known.keys():
            raise TypeError(f"`{function.__name__}` has no argument `{name}`. {did_you_mean(name, known)}")
        for extra in args[len(by_position) :]:
            remedy = write_limit(extra) or "Give the others by name."
            raise TypeError(f"`{function.__name__}` takes only {listed(by_position)} without a name. {remedy}")
        return function(*args, **kwargs)

    return checked
