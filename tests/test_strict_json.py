"""Logs and reports are JSON that every parser takes, and still show NaN and Inf."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastguard.records import strict_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3).filter(lambda t: "N" not in t),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(PLAIN)
def test_round_trip(value):
    text = strict_json.dumps(value)
    assert "\n" not in text and text.isascii()
    assert repr(strict_json.decode(json.loads(text))) == repr(value)


@pytest.mark.parametrize(
    ("value", "text"), [(math.nan, '"NaN"'), (math.inf, '"Infinity"'), (-math.inf, '"-Infinity"'), (0.1, "0.1")]
)
@pytest.mark.parametrize("wrap", ["%s", "[1,%s]", '{"a":[%s]}'])
def test_nonfinite_values_are_named_wherever_they_stand(value, text, wrap):
    nested = {"%s": value, "[1,%s]": (1, value), '{"a":[%s]}': {"a": [value]}}[wrap]
    assert strict_json.dumps(nested) == wrap % text


def test_what_is_no_number_is_refused():
    with pytest.raises(TypeError):
        strict_json.dumps({"a": object()})
