"""What replicas of a model were found to differ in: facts that no record shows, as plain dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._text import count
from ..stats import values

_COUNTS = ("step", "num_tensors", "num_ranks")


def differences_of(plain: Any) -> tuple[dict[str, Any], ...]:
    """A list of differences as they were told; a MisfitError for anything else.

    Each has the step, what differs ("gradients" or "weights"), the name of the first tensor, how many there are, of how
    many ranks, and the ranks that are odd: fewer than half; none where it is not known which are.
    """
    reads: dict[str, Any] = {**dict.fromkeys(_COUNTS, values.count), "what": values.text, "name": values.text}
    return values.dicts({**reads, "ranks": lambda ranks: values.each(values.count, ranks)}, plain)


def sentence(event: Mapping[str, Any]) -> str:
    """A difference in words.

    >>> sentence({"step": 20, "what": "weights", "name": "a", "num_tensors": 2, "num_ranks": 4, "ranks": [3]})
    'at step 20 the weights of 2 tensors, first a, were not the same on all of 4 ranks: rank 3 has others'
    """
    tensors = count(event["num_tensors"], "tensor")
    said = (
        f"at step {event['step']} the {event['what']} of {tensors}, first {event['name']}, were not the same on all of "
    )
    odd = ", ".join(map(str, event["ranks"]))
    which = f": rank {odd} has others" if len(event["ranks"]) == 1 else f": ranks {odd} have others" if odd else ""
    return f"{said}{event['num_ranks']} ranks{which}"
