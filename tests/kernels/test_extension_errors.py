"""The extension turns C++ exceptions into Python's, and lets Python's own through as they are."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fastguard.kernels import cpu
from fastguard.kernels.registry import BACKENDS

CPU = BACKENDS["cpu"]
pytestmark = pytest.mark.skipif(CPU.unavailable() is not None, reason=f"no C++ kernels: {CPU.unavailable()}")


class Unreadable:
    def __iter__(self) -> Iterator[object]:
        raise ZeroDivisionError("on iteration")


ERRORS: dict[str, tuple[type[Exception], str, Callable[[Any], object]]] = {
    "of Python": (ZeroDivisionError, "on iteration", lambda C: C.magnitude_counts(Unreadable(), 1)),
    "of an attribute": (AttributeError, "grad", lambda C: C.collect_gradients([[5]])),
    "of a type within": (TypeError, "a list of parameters", lambda C: C.collect_gradients([()])),
    "of a value": (ValueError, "as many numbers", lambda C: C.dot(bytearray(8), bytearray(16))),
    "of an index": (IndexError, "^0$", lambda C: C.scale_([torch.ones(1).expand(3)], 2.0, 1)),
    "of a missing argument": (TypeError, "argument", lambda C: C.dot(bytearray(8))),
    "of a list": (TypeError, "argument", lambda C: C.collect_gradients(())),
    "of bytes": (TypeError, "argument", lambda C: C.dot(b"", bytearray())),
    "of a number": (TypeError, "argument", lambda C: C.sketch([], 1.5)),
    "of a text": (UnicodeEncodeError, "surrogates", lambda C: C.select_isa("\ud800")),
    "of a method": (TypeError, "argument", lambda C: C.ShardPlan().tensor_stats(5, 1)),
    "of a clip's list": (TypeError, "a list of parameters", lambda C: C.clip_gradients((), 1, 1.0, False)),
    "of a clip's norm": (TypeError, "real number", lambda C: C.clip_gradients([], 1, "1", False)),
    "of a clip's arguments": (TypeError, "takes 4 arguments", lambda C: C.clip_gradients([])),
}


@pytest.mark.parametrize("name", ERRORS)
def test_type_and_text(name: str) -> None:
    kind, text, call = ERRORS[name]
    with pytest.raises(kind, match=text) as caught:
        call(cpu._C)
    assert caught.type is kind


def test_errors_leak_no_reference() -> None:
    table = bytearray(8)
    tensors = [torch.ones(1).expand(3)]

    def fail() -> None:
        for call in (lambda: cpu._C.dot(table, bytearray(16)), lambda: cpu._C.scale_(tensors, 2.0, 1)):
            with pytest.raises((ValueError, IndexError)):
                call()

    fail()
    gc.collect()
    before = sys.getrefcount(table), sys.getrefcount(tensors), sys.getrefcount(tensors[0])
    for _ in range(20):
        fail()
    gc.collect()
    assert (sys.getrefcount(table), sys.getrefcount(tensors), sys.getrefcount(tensors[0])) == before
