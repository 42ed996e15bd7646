"""Looks at some forward passes of the whole model: what goes in, what comes out, which modules it calls last."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .. import kernels
from ..activations.outputs import Call, inputs_of, leaves
from ..activations.selection import unwrapped
from ..stats.batches import BatchSample
from ..stats.failures import Failures
from .facts import kind_of, leaves_of
from .loss_gradient import LossGradient
from .norm_statistics import Compare, NormStatistics
from .quiet_hooks import hook_quietly, unhook
from .transient import Transient

_EARLY, _LATE, _NUM_EARLY = 20, 100, 50  # from one look to the next; and how many there are of the former
_NUM_FIRST = 3  # training passes in a row that are looked at
_COMPARED = (5, 10, 25)  # looks, at the passes after which running statistics are compared with a batch's
_MAX_WAITING = 4  # samples of one record
_MAX_ELEMENTS = 4096
_MAX_FEATURES = 2048
_MIN_ROWS = 32
_MAX_ROW = 65536  # elements of one row of the output, which is to be seen whole
_NUM_DIGESTED = 512
_NUM_MODULES = _NUM_OPERATIONS = 3
_HALVES = (torch.bfloat16, torch.float16)
_READ_AS_THEY_ARE = (torch.float64, torch.float32, *_HALVES)
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4}  # of the sum of a row
_IN_HALVES = 2e-2
_WHAT = "batch sampler"


class BatchWatch(Transient):
    """A forward hook on the whole model. It looks at the first three training passes, then at the first one in twenty
    steps, after fifty looks in a hundred; as often at the first pass in eval mode, or without autograd, after training.

    Nothing is read but tensors on the CPU: for others the host would have to wait. A pass that is traced, compiled
    whole, recomputed for the backward pass or inside a transform of torch.func is not looked at.

    Attributes:
        found: samples that wait for a record.
        is_paused: nothing is looked at.
        first: what the first pass called.
        loss: what the gradient of the output says.
        norms: how running statistics stand to a batch's.

    Cost: 2 us a pass, 6 where others have hooks on the model; 0.1 ms where it looks, of at most 4096 elements of input
    and output.
    """

    def __init__(
        self,
        model: nn.Module,
        place: Callable[[], int | None],
        awake: Callable[[], None],
        failures: Failures,
        device: str,
    ) -> None:
        self._model = weakref.ref(model)
        self._inner = weakref.ref(unwrapped(model))
        self._place, self._awake, self._failures = place, awake, failures
        self._num_taken = 0
        self._not_before = 0  # steps: an accumulated gradient takes many passes, an actor many without a gradient
        self._is_evaluation_due = False
        self._no_evaluation_before = 0
        self.found: list[BatchSample] = []
        self.is_paused = False
        self.first = FirstPass(model, device, failures)
        self.loss = LossGradient(failures)
        self.norms = NormStatistics(model, failures)
        self._handle, hooks = hook_quietly(model, self, self._is_awaited)
        self._hooks = None if hooks is None else weakref.ref(hooks)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        is_training = module.training and torch.is_grad_enabled()
        if self._is_due(is_training):
            self._look(module, args, kwargs, output, is_training)

    def _is_awaited(self) -> bool:
        """Whether to look at a pass that is made now."""
        model = self._model()
        return model is not None and self._is_due(model.training and torch.is_grad_enabled())

    def _is_due(self, is_training: bool) -> bool:
        """Whether to look at such a pass, where it is made now. The same however often it is asked."""
        try:
            step = self._place()
        except ReferenceError:  # the guard is going, and so is this hook
            return False
        if step is None:
            return False
        if is_training:
            self._is_evaluation_due = True
            return self._num_taken < _NUM_FIRST or step >= self._not_before
        return self._is_evaluation_due and step >= self._no_evaluation_before

    def _look(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, is_training: bool
    ) -> None:
        if self.is_paused or module is not self._model():  # a replica of DataParallel's is another
            return
        if torch._C._current_graph_task_id() != -1 or torch._C._is_tracing():
            return
        with_grad = torch.is_grad_enabled()
        with self._failures.kept(_WHAT, "That pass was not looked at."), torch.no_grad():
            if not self._count(is_training):
                return
            self.first.end(output)
            inner = self._inner()
            mode = bool(module.training if inner is None else inner.training)
            sample = sample_of(args, kwargs, output, mode, with_grad)
            if is_training:
                self.loss.watch(output, [x for x in inputs_of(Call(args, kwargs)) if _can_be_read(x)][:4])
                if self._num_taken in _COMPARED:
                    self.norms.arm()
            if sample is not None:
                self.found.append(sample)
                self._awake()

    def _count(self, is_training: bool) -> bool:
        """Counts a pass that is due as looked at; whether there is room for what is seen."""
        step = self._place()
        if step is None or len(self.found) >= _MAX_WAITING:
            return False
        if is_training:
            self._num_taken += 1
            self._not_before = step + self._interval
        else:
            self._is_evaluation_due = False
            self._no_evaluation_before = step + self._interval
        return True

    @property
    def _interval(self) -> int:
        return _EARLY if self._num_taken < _NUM_EARLY else _LATE

    def take(self) -> tuple[BatchSample, ...]:
        """What waits for a record, once."""
        found, self.found = tuple(self.found), []
        return found

    def state(self) -> list[int]:
        """Where it stands between two looks."""
        due = int(self._is_evaluation_due)
        return [self._num_taken, 0, self._not_before, self._no_evaluation_before, due]  # the 0 was a count of passes

    def load(self, state: Sequence[int]) -> None:
        """Goes on from `state`."""
        self._num_taken, _, self._not_before, self._no_evaluation_before, due = state
        self._is_evaluation_due = bool(due)
        self.loss.is_late = self._num_taken > 0

    def close(self) -> None:
        """Takes the hooks away."""
        self.first.close()
        self.norms.close()
        handle, self._handle = self._handle, None
        if handle is not None:
            unhook(self._model(), handle, None if self._hooks is None else self._hooks())

    @property
    def __name__(self) -> str:
        raise AttributeError("a model under guard has hooks that cannot be scripted: call `guard.detach()` before")


class FirstPass:
    """What the first forward pass called last, and under which autocast.

    Hooks on the modules without children are there during that pass only.

    Attributes:
        facts: what was found.
    """

    def __init__(self, model: nn.Module, device: str, failures: Failures) -> None:
        self.facts: dict[str, Any] = {}
        self._device = device if torch.amp.is_autocast_available(device) else ""
        self._failures = failures
        self._called: deque[str] = deque(maxlen=_NUM_MODULES)
        self._autocast = ""
        self._handles: list[Any] = []
        self._start: Any = model.register_forward_pre_hook(_FirstPassHook(self.begin))

    def begin(self, model: nn.Module) -> None:
        """Watches the modules of `model`."""
        with self._failures.kept(_WHAT, "Which modules the first pass called last is not known."):
            self._release()
            self._called.clear()
            self._autocast = _autocast(self._device)
            if not list(model.children()):
                self.see(model)
                return
            seen = _FirstPassHook(self.see)
            for leaf in leaves_of(model):
                if isinstance(leaf, torch.jit.ScriptModule):  # takes none
                    continue
                self._handles.append(leaf.register_forward_hook(seen))

    def see(self, module: nn.Module) -> None:
        """A module without children was called."""
        with self._failures.kept(_WHAT, "Which modules the first pass called last is not known."):
            self._called.append(kind_of(module))
            self._autocast = self._autocast or _autocast(self._device)

    def end(self, output: Any) -> None:
        """The pass is over; the first one that is."""
        if self._start is None:
            return
        self.close()
        self.facts = {
            "last_modules": list(reversed(self._called)),
            "last_operations": _operations(output),
            "autocast": self._autocast,
        }

    def close(self) -> None:
        """Takes all hooks away."""
        start, self._start = self._start, None
        if start is not None:
            start.remove()
        self._release()

    def _release(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()


class _FirstPassHook(Transient):
    """A hook during the first pass, or ahead of it: tells that of the module."""

    def __init__(self, tell: Callable[[nn.Module], None]) -> None:
        self._tell = weakref.WeakMethod(tell)

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if torch.compiler.is_compiling():
            return
        tell = self._tell()
        if tell is not None and not torch._C._is_tracing():
            tell(module)


def sample_of(args: Any, kwargs: dict[str, Any], output: Any, training: bool, with_grad: bool) -> BatchSample | None:
    """What one pass was given and returned; None where no tensors are found that can be read here."""
    given = [x for x in inputs_of(Call(args, kwargs)) if _can_be_read(x)]
    given = [x for x in given if x.dim()] or given  # a number beside them is none of the data
    returned = [x for _, x in leaves(output) if _can_be_read(x) and (x.is_floating_point() or x.is_complex())]
    if not given or not returned:
        return None
    x = next((x for x in given if x.is_floating_point() or x.is_complex()), given[0])
    y = next((y for y in returned if y.dim()), returned[0])
    inputs, outputs = _table(x), _table(y)
    if not inputs.numel() or not outputs.numel():
        return None
    values = _floats(inputs), _floats(outputs)
    of_inputs, of_outputs = map(kernels.activation_stats, values)
    is_finite = not (of_outputs.num_nans or of_outputs.num_infs)
    is_unit = is_finite and of_outputs.min_val >= 0.0 and of_outputs.max_val <= 1.0
    width = y.shape[-1] if y.dim() > 1 else 1
    return BatchSample(
        training=training,
        with_grad=with_grad,
        num_samples=given[0].shape[0] if given[0].dim() else 1,
        input_abs_max=of_inputs.abs_max,
        input_mean=of_inputs.mean,
        input_std=of_inputs.std,
        input_num_nonfinite=of_inputs.num_nans + of_inputs.num_infs,
        input_is_integer=not (x.is_floating_point() or x.is_complex()),
        input_constant_share=_constant_share(values[0]),
        input_digest=_digest(inputs, x),
        output_abs_max=of_outputs.abs_max,
        output_min=of_outputs.min_val,
        output_max=of_outputs.max_val,
        output_mean=of_outputs.mean,
        output_std=of_outputs.std,
        output_num_nonfinite=of_outputs.num_nans + of_outputs.num_infs,
        output_width=width,
        output_spread=_spread(values[1], is_finite),
        output_is_unit=is_unit,
        output_rows_sum_to_one=is_unit and 1 < width <= _MAX_ROW and _rows_sum_to_one(y.detach()),
    )


def _can_be_read(x: torch.Tensor) -> bool:
    """Whether the values of `x` are here, in memory with strides."""
    if not x.is_cpu or x.layout is not torch.strided or x.is_nested or is_traceable_wrapper_subclass(x):
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x) or isinstance(x, torch._subclasses.FakeTensor):
        return False
    return not kernels.lacks_memory(x)


def _table(x: torch.Tensor) -> torch.Tensor:
    """Samples by features, [n, f] with n · f <= 4096 and f <= 2048: a strided sample of `x`, whose first dimension is
    that of the samples. One sample counts as its rows."""
    x = x.detach().as_subclass(torch.Tensor)
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.dim() > 2 and x.shape[0] == 1:
        x = x[0]
    if x.dim() < 2:
        x = x.reshape(-1, 1)
    num_features = math.prod(x.shape[1:])
    if x.numel() > _MAX_ELEMENTS or num_features > _MAX_FEATURES:
        most_rows = max(_MIN_ROWS, _MAX_ELEMENTS // max(1, num_features))
        x = x[:: -(-x.shape[0] // most_rows)]
        most_features = min(_MAX_FEATURES, _MAX_ELEMENTS // x.shape[0])
        for dim in range(x.dim() - 1, 0, -1):
            step = -(-num_features // most_features)
            if step > 1:
                size = x.shape[dim]
                x = x[(slice(None),) * dim + (slice(None, None, min(step, size)),)]
                num_features = math.prod(x.shape[1:])
    return x.flatten(1)


def _floats(table: torch.Tensor) -> torch.Tensor:
    return table if table.dtype in _READ_AS_THEY_ARE else table.double()


def _constant_share(table: torch.Tensor) -> float:
    """Share of the columns that are the same all along; NaN of a single row."""
    if len(table) < 2:
        return math.nan
    if not (table[0] == table[1]).any():
        return 0.0
    return float((table == table[:1]).all(0).sum()) / table.shape[1]


def _spread(table: torch.Tensor, is_finite: bool) -> float:
    """Mean over the columns of the standard deviation along each, but for those with NaN or Inf; NaN of one row."""
    if len(table) < 2:
        return math.nan
    if not is_finite:
        table = table[:, table.isfinite().all(0)]
    if table.dtype in _HALVES:
        table = table.float()
    away = table - table[:1]  # exactly zero where all rows are the same
    lengths = torch.linalg.vector_norm(away - away.mean(0), dim=0)
    return float(lengths.mean()) / math.sqrt(len(table)) if len(lengths) else math.nan


def _rows_sum_to_one(y: torch.Tensor) -> bool:
    """Whether all along the last dimension adds up to 1, within rounding; of at most 4096 elements, or one row."""
    for dim in range(y.dim() - 1):
        num_rows = math.prod(y.shape[:-1])
        most = max(1, _MAX_ELEMENTS // y.shape[-1])
        y = y[(slice(None),) * dim + (slice(None, None, max(1, min(y.shape[dim], -(-num_rows // most)))),)]
    off = (y.double().sum(-1) - 1.0).abs().max()
    return float(off) <= _ROUNDING.get(y.dtype, _IN_HALVES)


def _digest(table: torch.Tensor, x: torch.Tensor) -> int:
    """63 bits of some of the elements in `table`, of all features in turn, and of the shape of `x`."""
    flat = table.reshape(-1)
    stride = -(-len(flat) // _NUM_DIGESTED)
    while math.gcd(stride, table.shape[-1]) > 1:  # else the same few features of each sample, which may be constant
        stride += 1
    flat = flat[::stride].contiguous()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(whole).to(torch.int64)
    found = int((bits * _factors()[: len(bits)]).sum())
    for size in x.shape:
        found = found * 1_000_003 + size
    return found & (2**63 - 1)


_known_factors: list[torch.Tensor] = []


def _factors() -> torch.Tensor:
    """Odd numbers of 64 bits that follow no pattern: Weyl's sequence through a mixing function."""
    if not _known_factors:
        mask = 2**64 - 1
        numbers = []
        for i in range(1, _NUM_DIGESTED + 1):
            z = i * 0x9E3779B97F4A7C15 & mask
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
            z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
            z = (z ^ z >> 31) | 1
            numbers.append(z - 2**64 if z >= 2**63 else z)
        _known_factors.append(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
    return _known_factors[0]


def _autocast(device: str) -> str:
    """The dtype of autocast on such devices; empty where there is none now, or where `device` is."""
    if not device or not torch.is_autocast_enabled(device):
        return ""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def _operations(output: Any) -> list[str]:
    """Names of what autograd recorded last, the last one first."""
    floating = [y for _, y in leaves(output) if y.is_floating_point()]
    y = next((y for y in floating if y.dim()), floating[0] if floating else None)
    node: Any = None if y is None else y.grad_fn
    found: list[str] = []
    while node is not None and len(found) < _NUM_OPERATIONS:
        found.append(node.name().partition("Backward")[0].rpartition("::")[2])
        before = [n for n, _ in node.next_functions if n is not None]
        node = next((n for n in before if n.name() not in _NO_OPERATION), None)
    return found


_NO_OPERATION = ("torch::autograd::AccumulateGrad", "TBackward0", "TransposeBackward0")


def _leave_to_python() -> None:
    """Has dynamo not compile the hooks by themselves, where it compiles what stands around them."""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return
    leave = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for kind in (BatchWatch, _FirstPassHook, Compare):
        frames.set_code_exec_strategy(kind.__call__.__code__, leave)


_leave_to_python()
