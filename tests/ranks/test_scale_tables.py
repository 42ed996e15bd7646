"""The tables of docs/scale.md are those of the cost model, and the model is what the page says."""

from __future__ import annotations

import math

import pytest

from fastguard.ranks import exchange, ranks

scale = pytest.importorskip("benchmarks.scale", reason="benchmarks/ is not beside these tests", exc_type=ImportError)
SMALL, NDR, ETHERNET = scale.NETWORKS


def test_the_page_has_the_tables_of_the_model() -> None:
    assert not scale.readme.update(scale.DOCUMENT, {}, scale.TABLES, check=True), "run python -m benchmarks.scale"


def test_the_model_sends_what_the_wire_sends() -> None:
    assert scale.HEADER == exchange.NUM_COLUMNS + 7
    assert (3, len(exchange._ADDED) + 3) == scale.ROW
    assert (scale.ROW[0] + 2 * len(ranks._ALIKE), scale.ROW[1] + len(ranks._ADDED)) == scale.REDUCED


def test_hops_and_bytes_by_hand() -> None:
    assert scale.gather_us(NDR, 8, 0) == pytest.approx(6.6 + 7 * 1.0)
    assert scale.gather_us(NDR, 16, 0) == pytest.approx(6.6 + 14 * 1.0 + 2.7)
    assert scale.gather_us(NDR, 16, 1000) - scale.gather_us(NDR, 16, 0) == pytest.approx(15 * 1000 / 25e3)
    assert scale.reduce_us(NDR, 1024, 0) == pytest.approx(6.8 + 2 * (7 * 1.0 + math.log2(128) * 5.0))
    assert scale.reduce_us(ETHERNET, 8, 0) == scale.reduce_us(NDR, 8, 0)  # one node has no network
    large = scale.reduce_us(NDR, 1024, 1e8) - scale.reduce_us(NDR, 1024, 0)
    assert large == pytest.approx(2e8 / 25e3, rel=0.01)
