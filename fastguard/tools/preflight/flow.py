"""Which inputs reach which outputs: derivatives that are exactly zero, or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..batches import first_tensor, mapped, tensors_in
from ..bench import Bench


@dataclass(frozen=True)
class Flow:
    """What the derivatives of one output say.

    Attributes:
        across_samples: the share of other samples that the first one's output depends on; None if not known.
        is_causal: whether outputs depend on their own position, and on no later one; None if that is not known.
    """

    across_samples: float | None = None
    is_causal: bool | None = None


def follow(bench: Bench, inputs: Any) -> Flow:
    """Differentiates an output by all inputs, in evaluation mode; for integers, by the outputs of embeddings."""
    shapes = [t.shape for t in tensors_in(inputs)]
    embedded: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if args[0].shape not in shapes:  # of positions, not of inputs
            return output
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    with bench.put_back(), torch.enable_grad():
        bench.model.eval()
        hooks = [m.register_forward_hook(note) for m in bench.model.modules() if isinstance(m, nn.Embedding)]
        try:
            given = mapped(lambda t: t.clone().requires_grad_(t.is_floating_point()), inputs)
            output = first_tensor(bench.output(given), floating=True)
            leaves = embedded or [t for t in tensors_in(given) if t.requires_grad]
            if output is None or not output.requires_grad or not leaves or output.dim() < 2:
                return Flow()
            of_first = _reached(output[0], leaves)
            shares = [
                float(g[1:].reshape(len(g) - 1, -1).any(1).double().mean())
                for g in of_first
                if len(g) == len(output) > 1
            ]
            length = leaves[0].shape[1] if leaves[0].dim() > 1 else 0
            dim = next((d for d in (1, 2) if output.dim() == 3 and output.shape[d] == length > 2), None)
            is_causal: bool | None = None
            if dim is not None:
                middle = length // 2
                of_middle = [g for g in _reached(output.select(dim, middle), leaves) if g.shape[1] == length]
                if any(bool(g[:, middle].any()) for g in of_middle):  # else the model itself shifts its inputs
                    is_causal = not any(bool(g[:, middle + 1 :].any()) for g in of_middle)
            return Flow(max(shares, default=None), is_causal)
        except Exception:  # a model that cannot be run in evaluation mode, or differentiated by its inputs
            return Flow()
        finally:
            for hook in hooks:
                hook.remove()


def _reached(part: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Where the derivative of a mixture of `part` by each leaf is not zero."""
    weights = torch.linspace(0.5, 1.5, part.numel(), device=part.device, dtype=part.dtype).view_as(part)
    found = torch.autograd.grad((part * weights).sum(), leaves, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(leaf) != 0 if g is None else g != 0 for g, leaf in zip(found, leaves)]
