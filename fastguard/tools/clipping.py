"""Drop-in replacements for torch's clipping functions."""

from __future__ import annotations

import functools
import math
import sys
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

# Imported by name, so that a program may assign ours to torch's name without a loop.
from torch.nn.utils import clip_grad_norm_ as _torch_clip_grad_norm_
from torch.nn.utils import get_total_norm as _torch_get_total_norm

from .. import kernels
from ..errors import UnsupportedTensorError
from ..ranks.exchange import as_everywhere, gradients_over_ranks, measured, norm_over_ranks, tensors_over_ranks
from ..ranks.shards import has_other_ranks, is_sharded, locals_of
from ..records import TensorStats

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def _served(tensors: list[Any]) -> bool:
    """Whether the one-pass kernels give what torch would: plain floating tensors, or DTensors of such.

    Other subclasses than DTensor, sparse, meta and integer tensors have rules of their own: torch's.
    """
    return all(
        (type(t) is torch.Tensor or type(t) is torch.nn.Parameter or is_sharded(t))
        and t.layout is torch.strided
        and not t.is_meta
        and (t.is_floating_point() or t.is_complex())
        for t in tensors
    )


def _result(
    norm: float, dtypes: Iterable[torch.dtype], tensors: Sequence[torch.Tensor], mesh: Any = None
) -> torch.Tensor:
    """`norm` as torch returns it: 0-dim, real, of the promoted dtype of the tensors; with `mesh` a DTensor there.

    Deviation: where that dtype cannot hold a finite norm (float16 above 65504), it is returned as float32.
    """
    dtype = functools.reduce(torch.promote_types, dtypes)
    if dtype.is_complex:
        dtype = dtype.to_real()
    if math.isfinite(norm) and norm > torch.finfo(dtype).max:
        dtype = torch.float32 if dtype.itemsize < 4 else dtype
        norm = norm if norm <= torch.finfo(dtype).max else math.inf
    result = torch.scalar_tensor(norm, dtype=dtype, device=tensors[0].device if tensors else "cpu")
    return result if mesh is None else as_everywhere(result, mesh)


def _check_finite(norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite ({norm}), so it cannot "
            "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def _norm(
    tensors: list[Any], norm_type: float, backend: str, holders: list[Any] | None = None
) -> tuple[float, Iterable[torch.dtype], Any] | None:
    """The norm and the dtypes of `tensors`, over the ranks of `holders`, and a mesh; None for what torch has to do."""
    is_shared = any(map(is_sharded, holders or ()))  # though none of `tensors` may be, or there may be none here
    if norm_type != 2.0 or not (tensors or is_shared):
        return None
    quick = None if is_shared else kernels.plain_stats(tensors, backend)
    if quick is not None:
        table, total, dtypes = quick
        return TensorStats(table, None, total).total().norm, dtypes, None
    pieces = tensors_over_ranks(tensors, backend) if holders is None else None
    if pieces is not None:
        return norm_over_ranks(pieces), pieces.dtypes, pieces.mesh
    if not _served(tensors):
        return None
    if is_shared or any(map(is_sharded, tensors)):
        pieces = measured(tensors, holders or tensors, backend)
        return norm_over_ranks(pieces), pieces.dtypes or {h.dtype for h in holders or ()}, pieces.mesh
    table, fold = kernels.run_stats(tensors, backend)
    return TensorStats(table, None, fold).total().norm, {t.dtype for t in tensors}, None


def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """The norm of all `tensors` as one vector; a drop-in for `torch.nn.utils.get_total_norm`.

    The 2-norm of plain tensors comes from the one-pass kernels and is accurate to 1e-6 for every dtype. Other orders,
    sparse tensors and tensor subclasses other than DTensor are left to torch. For DTensors it is the norm of the whole
    tensors, a replicated DTensor, by one gather of ten numbers a rank; as in torch, replicas are assumed to be equal.

    Args:
        tensors: a tensor, or an iterable of them.
        norm_type: order of the norm; `inf` for the largest magnitude.
        error_if_nonfinite: raise if the result is NaN or Inf.
        foreach: accepted for compatibility.

    Returns:
        0-dim tensor, with torch's dtype and device. Deviations: float32 if float16 cannot hold a finite norm; the
        accurate norm if dtypes are mixed, not one of norms that are each rounded to their tensor's dtype.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.

    Cost: one read of every element; synchronises if the tensors are on an accelerator.

    >>> get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)
    """
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    norm_type = float(norm_type)
    found = _norm(tensors, norm_type, kernels.resolve_backend("auto"))
    if found is None:
        return _torch_get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    norm, dtypes, mesh = found
    _check_finite(norm, norm_type, error_if_nonfinite)
    return _result(norm, dtypes, tensors, mesh)


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clips the gradients of `parameters` in place; a drop-in for `torch.nn.utils.clip_grad_norm_`.

    coefficient = min(1, max_norm / (norm + 1e-6)). Memory is written only if the coefficient is not 1. You may assign
    it to `torch.nn.utils.clip_grad_norm_`, for code that calls it there.

    Args:
        parameters: a tensor, or an iterable of them; those without a gradient are left out.
        max_norm: the largest norm: any real number, also NumPy's, a `Fraction` or a tensor of one element.
        norm_type: order of the norm; see `get_total_norm`. Every rank clips its part of a DTensor by the whole norm.
        error_if_nonfinite: raise if the norm is NaN or Inf; the gradients are then untouched.
        foreach: accepted for compatibility.

    Returns:
        The norm before clipping, as from `get_total_norm`. Deviations: the coefficient comes from the accurate norm,
        not from a rounded one; float16 gradients of zeros clipped to 0 stay zeros, where torch makes them NaN.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set.
        TypeError: flat parameters of FSDP1 on several ranks, which do not say whose they are.

    Cost: one read of every gradient; one more read and write if they are clipped. Synchronises on an accelerator.

    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([3.0, 4.0])
    >>> clip_grad_norm_([p], max_norm=1.0), p.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    else:
        is_holder = isinstance(parameters, (torch.nn.Module, torch.optim.Optimizer))
        if is_holder and not isinstance(parameters, torch.nn.ParameterList):
            remedy = "Write clip_grad_norm_(model.parameters(), max_norm)."
            raise TypeError(f"`parameters` must be tensors, got a {type(parameters).__name__}. {remedy}")
        is_generator = isinstance(parameters, types.GeneratorType)
        parameters = list(parameters)
        if is_generator and not parameters:
            warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=2)
    is_sharded_first = bool(parameters) and is_sharded(parameters[0])
    if not is_sharded_first and _FSDP1 in sys.modules and has_other_ranks():
        is_flat = any(getattr(p, "_fsdp_flattened", False) for p in parameters)
        # Its own clip_grad_norm_ calls torch's, in whose place ours may stand, where nothing is sharded.
        if is_flat and sys._getframe(1).f_globals.get("__name__") != _FSDP1:
            remedy = "Use model.clip_grad_norm_(max_norm), or fastguard.wrap(optimizer, model, max_norm=max_norm)."
            raise TypeError(f"`parameters` must not be the flat ones of FullyShardedDataParallel. {remedy}")
    norm_type = float(norm_type)
    backend = kernels.resolve_backend("auto")
    if norm_type == 2.0:
        clipped = None
        if not is_sharded_first:  # which would be found out at the first sixteen
            clipped = kernels.clip_gradients(parameters, float(max_norm), backend, finite_only=error_if_nonfinite)
        if clipped is not None:
            _check_finite(clipped[0], norm_type, error_if_nonfinite)
            return _result(*clipped, ())
        pieces = gradients_over_ranks(parameters, backend)
        if pieces is not None:
            norm = norm_over_ranks(pieces)
            _clip(pieces.local, norm, max_norm, error_if_nonfinite, backend)
            return _result(norm, pieces.dtypes, pieces.local, pieces.mesh)
    gradients = kernels.collect_gradients([parameters])[0]
    found = _norm(gradients, norm_type, backend, [*parameters, *gradients])
    if found is None:
        return _torch_clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm, dtypes, mesh = found
    _clip(locals_of(gradients), norm, max_norm, error_if_nonfinite, backend)
    return _result(norm, dtypes, gradients or parameters, mesh)


def _clip(tensors: list[torch.Tensor], norm: float, max_norm: float, error_if_nonfinite: bool, backend: str) -> None:
    _check_finite(norm, 2.0, error_if_nonfinite)
    coefficient = float(max_norm) / (norm + 1e-6)
    if not coefficient >= 1.0:  # NaN too: torch multiplies by it, so the gradients do not pass for clipped
        kernels.run_scale(tensors, coefficient, backend)


def clip_gradients(gradients: Any, max_norm: float = 1.0) -> tuple[Any, float]:
    """The gradients clipped to a total 2-norm, as new arrays, and the norm before.

    clipped = gradient · min(1, max_norm / (norm + 1e-6)), as in torch. A NaN anywhere makes every element NaN; an Inf
    becomes NaN, and all else 0.

    Args:
        gradients: a list, tuple or dict of torch tensors or NumPy arrays, or a single one, of any floating or complex
            dtype, shape and layout. None stands for a missing one.
        max_norm: the largest norm, >= 0.

    Returns:
        (clipped, norm): the same container of new arrays, with type, dtype, shape and device kept; tensors are
        detached. The norm is a float.

    Raises:
        UnsupportedTensorError: something that is not an array of these dtypes.
        ValueError: `max_norm` is negative or NaN.

    Cost: one copy of the arrays, one read of it, one more read and write if it is clipped; synchronises on an
    accelerator.

    >>> clip_gradients([torch.tensor([3.0, 4.0])], max_norm=1.0)
    ([tensor([0.6000, 0.8000])], 5.0)
    """
    if isinstance(max_norm, bool) or not float(max_norm) >= 0:
        raise ValueError(f"`max_norm` must be >= 0, got {max_norm!r}. `float('inf')` clips nothing.")
    if isinstance(gradients, dict):
        clipped, norm = clip_gradients(list(gradients.values()), max_norm)
        return dict(zip(gradients, clipped, strict=True)), norm
    if isinstance(gradients, torch.Tensor) or hasattr(gradients, "__array_interface__"):
        clipped, norm = clip_gradients([gradients], max_norm)
        return clipped[0], norm
    if not isinstance(gradients, Iterable):
        raise TypeError(f"`gradients` must be tensors or arrays, got {type(gradients).__name__}. Pass a list of them.")
    copies = [(None, None) if g is None else _copy(g, i) for i, g in enumerate(gradients)]
    writable = [tensor for _, tensor in copies if tensor is not None]
    backend = kernels.resolve_backend("auto")
    try:
        table, fold = kernels.run_stats(writable, backend)
        norm = TensorStats(table, None, fold).total_norm()
        _clip(writable, norm, max_norm, False, backend)
    except UnsupportedTensorError as error:
        place = [i for i, (_, tensor) in enumerate(copies) if tensor is not None][error.index]
        raise UnsupportedTensorError(place, error.problem, f"gradients[{place}]") from None
    result = [copied for copied, _ in copies]
    return (tuple(result) if isinstance(gradients, tuple) else result), norm


def _copy(gradient: Any, index: int) -> tuple[Any, torch.Tensor]:
    """A copy of one array, and a tensor over the copy's memory."""
    problem = f"must be a torch.Tensor or a numpy.ndarray, got {type(gradient).__name__}"
    if hasattr(gradient, "to_local"):
        problem = "must be whole, got a DTensor. Use fastguard.clip_grad_norm_"
    elif isinstance(gradient, torch.Tensor):
        copied = gradient.detach().clone()
        return copied, copied
    elif hasattr(gradient, "__array_interface__") and hasattr(gradient, "__setitem__"):
        array = gradient.copy()  # has no negative strides and is writable, whatever the original is
        try:
            return array, torch.as_tensor(array, device="cpu")
        except (TypeError, ValueError) as error:
            problem = f"must be of a dtype that torch has: {error}"
    raise UnsupportedTensorError(index, problem, f"gradients[{index}]")
