"""The cases of `fastguard bench`, and those that only these measures need."""

from __future__ import annotations

from fastguard.commands.bench.cases import CASES as _CASES
from fastguard.commands.bench.cases import Case

CASES = {
    **_CASES,
    **{
        case.name: case
        for case in (
            Case("10000x1", "10 000 tensors × 1 float32", ((1,),) * 10_000),
            Case("1000x1", "1000 tensors × 1 float32", ((1,),) * 1000),
            Case("one-100m", "one tensor of 100M float32", ((100_000_000,),)),
        )
    },
}
