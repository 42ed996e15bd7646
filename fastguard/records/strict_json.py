"""JSON that every parser accepts. NaN and Inf are the strings "NaN", "Infinity" and "-Infinity". Python's own `json`
writes a bare `NaN`, which is not JSON."""

from __future__ import annotations

import json
import math
from array import array
from collections import deque
from typing import Any

_LARGEST = 2**1023
_FROM_TEXT = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
loads = json.loads
_encoder = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=lambda value: encode_float(float(value)))


def encode_float(value: float) -> float | str:
    """`value`, or its name if it is not finite."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def decode_float(value: Any) -> Any:
    """A float for "NaN", "Infinity" and "-Infinity"; anything else as it is."""
    return _FROM_TEXT.get(value, value) if isinstance(value, str) else value


def encode(value: Any) -> Any:
    """`value` with strings for NaN and Inf, lists for tuples, deques and arrays, and floats for numbers of NumPy and
    torch; of an object with `to_dict` or `state`, what that returns.

    An int beyond the range of floats becomes "Infinity" or "-Infinity".

    >>> encode({"grad/norm": float("nan"), "lr": 0.1})
    {'grad/norm': 'NaN', 'lr': 0.1}
    """
    if isinstance(value, float):
        return encode_float(value)
    if isinstance(value, dict):
        return {encode_float(key) if isinstance(key, float) else key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque, array)):
        return [encode(item) for item in value]
    if isinstance(value, int) and not -_LARGEST < value < _LARGEST:  # too long for Python to write, others to read
        return "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "to_dict"):
        return encode(value.to_dict())
    return value.state() if hasattr(value, "state") else encode_float(float(value))


def decode(value: Any) -> Any:
    """The inverse of `encode`, but for tuples: each value "NaN", "Infinity" or "-Infinity" becomes a float."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return decode_float(value)


def dumps(value: Any) -> str:
    """`value` as one line of strict, ASCII-only JSON.

    Cost: one pass of the C encoder; a value with NaN or Inf needs another in Python.

    >>> dumps({"loss": float("inf")})
    '{"loss":"Infinity"}'
    """
    try:
        return _encoder.encode(value)
    except ValueError:  # a NaN, an Inf or too many digits somewhere
        return _encoder.encode(encode(value))
