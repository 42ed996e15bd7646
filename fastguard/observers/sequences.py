"""How the targets of a sequence lie against the tokens that the model embeds, and whether its outputs see them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from .graph import gradient_at, nodes_of
from .tensors import can_be_read

SHIFTS = (1, 2, 0, -1)  # places by which targets may be ahead of tokens; the first that fits counts
_SHARE = 0.95  # of equal ones in each batch
_LEAST_PLACES, _LEAST_BATCHES = 48, 3
_MAX_TOKENS, _MAX_EMBEDDINGS = 65536, 8
_MAX_OUTPUT = 1 << 22  # elements
_SHORTEST = 4
_NOTHING = 1e-12  # of the largest gradient: what a mask of large numbers leaves, where one of Inf leaves zero


class Layout(NamedTuple):
    """How the tokens of an embedding and the rows of the output lie."""

    number: int  # of the embedding, in the order of the forward pass
    is_turned: bool  # whether the tokens are [time, samples]
    by_time: bool  # whether the rows of the output are


class Embedded(NamedTuple):
    """The embeddings in the graph of an output."""

    nodes: Sequence[Any]  # in the order of the forward pass
    are_first: Sequence[bool]  # whether their tokens are the first input of the model
    top: int  # the number of the node that made the output; its hooks may not hold it
    place: int  # of the output among those that it made
    others: Sequence[Sequence[int]]  # the shapes of other tensors with a gradient that the model returned


class Sequences:
    """Compares targets with the tokens of the embeddings in the graph of the model's output, in a few training passes.

    In the third one, if the targets were tokens of other places in all, it goes backward from the outputs of one place
    to the embeddings, when their gradient arrives: which tokens do these outputs depend on? The derivative by all
    others is exactly zero. No hook of the script runs, and nothing draws random numbers.

    Cost: 1 us a node of the graph and 1 ms at each such pass. Once, as much as 0.8 of a backward pass: 0.1 s beside
    0.14 s for 16 samples of a transformer with 4 layers, 128 wide, of 64 positions (319 nodes, one core).
    """

    def __init__(self) -> None:
        # Shift, place and the last place that outputs there see, if that is known; empty if nothing fits
        self.found: tuple[int, ...] = ()
        self._num_batches = 0
        self._num_places: dict[tuple[Layout, int], int] = {}  # compared so far, for what fits in all batches
        self._are_first: set[int] = set()  # numbers of embeddings
        self._sees: dict[int, tuple[int, int]] = {}  # by shift

    def add(
        self,
        embedded: Embedded,
        gradient: torch.Tensor,
        targets: array[float],
        places: array[float],
        num_rows: int,
    ) -> None:
        """Takes the targets of the rows `places`, out of `num_rows` of the output, whose `gradient` has just come."""
        classes, rows = (torch.frombuffer(x, dtype=torch.float64).long() for x in (targets, places))
        fitting: dict[tuple[Layout, int], int] = {}
        for number, node in enumerate(embedded.nodes):
            tokens = _tokens_of(node)
            for layout, shift, num_equal, num in (
                () if tokens is None else _compare(number, tokens, classes, rows, num_rows)
            ):
                if num_equal >= _SHARE * num and (not self._num_batches or (layout, shift) in self._num_places):
                    fitting[layout, shift] = num + self._num_places.get((layout, shift), 0)
        self._num_places = fitting
        self._num_batches += 1
        self._are_first.update(number for number, is_first in enumerate(embedded.are_first) if is_first)
        shift, layouts = self._choose()
        if self._num_batches < _LEAST_BATCHES or not layouts:
            self.found = ()
            return
        if shift >= 0 and shift not in self._sees and _may_go_back(gradient):
            seen = [_last_seen(embedded, layout, gradient, rows, num_rows) for layout in layouts]
            known = [one for one in seen if one is not None]
            if len(known) == len(seen):  # of an autoencoder, the encoder sees all
                self._sees[shift] = min(known, key=lambda one: one[1] - one[0])
        self.found = (shift, *self._sees.get(shift, ()))

    def _choose(self) -> tuple[int, list[Layout]]:
        """The shift that counts, and the layouts that it fits in.

        The first input's own tokens are an autoencoder's targets; only those that a decoder embeds beside are told it.
        """
        known = [key for key, num in self._num_places.items() if num >= _LEAST_PLACES]
        for shift in SHIFTS:
            layouts = [layout for layout, one in known if one == shift]
            if shift == 0:
                layouts = [x for x in layouts if self._are_first and x.number not in self._are_first]
            if layouts:
                return shift, layouts
        return 0, []


def embeddings_of(
    output: torch.Tensor, given: Sequence[torch.Tensor], returned: Sequence[torch.Tensor] = ()
) -> Embedded | None:
    """The embeddings of sequences in the graph of an output; None if it has none.

    `given` are the inputs of the model, `returned` its outputs.
    """
    top: Any = output.grad_fn
    nodes = [node for node in nodes_of(output) if node.name() == "EmbeddingBackward0" and node is not top]
    nodes = [node for node in nodes if _SHORTEST <= math.prod(_shape_of(node)) <= _MAX_TOKENS]
    nodes = sorted(nodes, key=lambda node: node._sequence_nr())[:_MAX_EMBEDDINGS]
    tokens = map(_tokens_of, nodes)
    firsts = given[:1]
    are_first = [x is not None and any(x.shape == y.shape and bool((x == y).all()) for y in firsts) for x in tokens]
    others = [y.shape for y in returned if y.requires_grad and y is not output]
    return Embedded(nodes, are_first, top._sequence_nr(), output.output_nr, others) if nodes else None


def _shape_of(node: Any) -> tuple[int, int]:
    """The shape of the tokens of an embedding; [0, 0] if they have more than two dimensions."""
    shape = (1, *node._input_metadata[0].shape[:-1])
    return shape[-2:] if 2 <= len(shape) <= 3 else (0, 0)


def _tokens_of(node: Any) -> torch.Tensor | None:
    """The tokens of an embedding; None if they were saved in another way, or cannot be read here."""
    saved = node._raw_saved_indices
    tokens = saved.data if saved.unpack_hook is None else None
    return tokens.detach() if tokens is not None and can_be_read(tokens) else None


def _place_of(layout: Layout, shape: Sequence[int], rows: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, ...]:
    """Sample and place of each of the rows."""
    num_samples = shape[layout.is_turned]
    each = num_rows // num_samples
    return (rows % num_samples, rows // num_samples) if layout.by_time else (rows // each, rows % each)


def _compare(
    number: int, tokens: torch.Tensor, classes: torch.Tensor, rows: torch.Tensor, num_rows: int
) -> Iterator[tuple[Layout, int, int, int]]:
    """Layout, shift, number of equal ones and number compared, in each layout that fits, for each shift.

    Only places count at which the token of that shift is none of the others, so that repeated tokens say nothing.
    """
    table = tokens.view(-1, tokens.shape[-1])
    for is_turned in (False, True):
        x = table.T if is_turned else table
        each, rest = divmod(num_rows, len(x))
        if rest or each < _SHORTEST or not 0 <= x.shape[1] - each <= 1:
            continue
        for by_time in (False, True):
            layout = Layout(number, is_turned, by_time)
            sample, at = _place_of(layout, table.shape, rows, num_rows)
            inside = (at > 0) & (at + 2 < x.shape[1])
            sample, at = sample[inside], at[inside]
            around = {shift: x[sample, at + shift] for shift in SHIFTS}
            for shift, token in around.items():
                alone = torch.stack([token != other for key, other in around.items() if key != shift]).all(0)
                equal = (token == classes[inside])[alone]
                yield layout, shift, int(equal.sum()), len(equal)


def _may_go_back(gradient: torch.Tensor) -> bool:
    """Whether nothing beside would count or change the operations, and parameters are where they were."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    is_beside = torch._C._len_torch_dispatch_stack() or torch.is_autocast_enabled(gradient.device.type)
    return gradient.numel() <= _MAX_OUTPUT and not is_beside and not is_distributed


def _last_seen(
    embedded: Embedded, layout: Layout, gradient: torch.Tensor, rows: torch.Tensor, num_rows: int
) -> tuple[int, int] | None:
    """The middle place of the rows that have targets, and the last place that outputs there see, -1 for none.

    None if it is not known, or the model also returns [samples, width], as the code of an autoencoder, through which
    outputs may see all tokens. Rows without a target, as of a prefix that is no secret, have no gradient.
    """
    top, node = torch._C._current_autograd_node(), embedded.nodes[layout.number]
    shape = _shape_of(node)
    _, at = _place_of(layout, shape, rows, num_rows)
    place = int(at.median()) & ~1  # even, so that it is not the last one of a block of places
    num_samples, width = shape[layout.is_turned], gradient.numel() // num_rows
    each = num_rows // num_samples
    sizes = [(num_rows,), (each, num_samples) if layout.by_time else (num_samples, each)]
    dims = [
        d for d in range(gradient.dim()) if gradient.movedim(d, -1).shape[:-1] in sizes and gradient.shape[d] == width
    ]
    has_code = any(len(other) == 2 and other[0] == num_samples for other in embedded.others)
    if top is None or top._sequence_nr() != embedded.top or len(dims) != 1 or has_code:
        return None
    _, at = _place_of(layout, shape, torch.arange(num_rows), num_rows)
    is_elsewhere = (at != place).view(gradient.movedim(dims[0], -1).shape[:-1]).unsqueeze(dims[0])
    try:
        found = gradient_at(top, {embedded.place: gradient.masked_fill(is_elsewhere, 0.0)}, node)
    except Exception:  # a tensor that was changed or freed since, an operation that needs the engine
        return None
    if found is None or not bool(found.isfinite().all()):
        return None
    by_place = found.abs().amax(-1).view(shape).amax(1 if layout.is_turned else 0)
    seen = (by_place > _NOTHING * by_place.max()).nonzero()
    return place, int(seen.max()) if len(seen) else -1
