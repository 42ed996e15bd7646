"""Sees the losses of a script that says nothing about them, and tells them to the guards: `backward` takes the loss.

A validation loss is what the same function returns while no gradients are recorded, or after `model.eval()`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _current_graph_task_id as graph_task

from ..observers.observer import unwrapped
from ..step import Guard

# The functions that torch's loss functions and modules call, and the position of their argument `reduction`.
_FUNCTIONS: dict[str, tuple[Any, int]] = {
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), (torch._C._nn, 2)),
    **dict.fromkeys(("soft_margin_loss", "multilabel_margin_loss"), (torch._C._nn, 2)),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "binary_cross_entropy"), (torch._C._nn, 3)),
    "multi_margin_loss": (torch._C._nn, 5),
    "binary_cross_entropy_with_logits": (torch, 4),
    "ctc_loss": (torch, 5),
}
_MEAN = 1  # of `reduction`
_NUM_LEARNT = 3  # backward passes that show which function the loss comes from
_TOLERANCE = 0.02  # of the ratio between the loss and what that function returned


class Patches:
    """Replaces attributes, and restores those that no other code has replaced since."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        made = functools.wraps(original)(make(original))
        setattr(owner, name, made)
        self._made.append((owner, name, original, made))

    def around(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Has `call` called, with the original before the arguments."""
        self.replace(owner, name, lambda original: lambda *args, **kwargs: call(original, *args, **kwargs))

    def restore(self) -> None:
        for owner, name, original, made in reversed(self._made):
            if getattr(owner, name) is made:
                setattr(owner, name, original)
        self._made = []


class ScriptLosses:
    """Tells `guards` their losses. Errors of its own go to `kept` and never to the script.

    A step's loss is the mean of the losses that `backward` was called on since the step before; their sum if each was
    divided by their number. It is told at the next backward pass, to all guards that have stepped since the last one.

    Cost of a backward pass: one Python frame, about 1 us; no sync. The first three passes read the loss, which syncs.
    """

    def __init__(self, kept: Callable[[str, Exception], None]) -> None:
        self.guards: list[Guard] = []  # receive the losses. Call `changed` after a change
        self.newest: Any = None  # the newest loss with its graph, while `keeps_newest` is set
        self.keeps_newest = False
        self.scaler: Any = None  # the newest GradScaler that has scaled a loss
        self.num_scaler_skips = 0  # number of steps that a GradScaler has skipped
        self.when_idle: Callable[[], None] | None = None  # called once at the next backward pass, outside of any step
        self._kept = kept
        self._patches, self._primitives = Patches(), Patches()
        self._listeners: dict[str, Callable[..., Any]] = {}
        self._single: Guard | None = None
        self._is_over = False
        self._is_plain = False  # whether one guard waits for one loss, and nothing else is due
        self._seen: dict[int, int] = {}  # steps of each guard when it was last told a loss
        self._step = -1  # the same, of the single guard
        self._total: Any = 0.0  # of the losses since the last step
        self._count = 0
        self._divisor: float | None = None
        self._num_accumulated = 1
        self._scaled: tuple[Any, Any] | None = None
        self._calls: list[tuple[str, Any]] = []  # of loss functions since the last backward pass, while learning
        self._samples: list[tuple[str, float] | None] | None = []  # None once it is learnt
        self._function: Any = None  # the loss function, and the loss over what it returns
        self._has_eval = self._is_armed = False
        self._blind: Any = None  # the sampler of a model whose passes it does not see
        self._width = 0  # the last dimension of what the loss function takes
        self._val_total: Any = 0.0
        self._val_count = self._val_calls = 0
        self._val_has_grad = False

    def start(self) -> None:
        self._patches.replace(torch.autograd, "backward", self._watching)
        self._patches.around(torch.amp.GradScaler, "scale", self._scale)
        self._patches.around(torch.amp.GradScaler, "update", self._update)
        self._patches.around(torch.nn.Module, "eval", self._evaluate)
        self._listen(_FUNCTIONS)

    def stop(self) -> None:
        self._is_over, self._is_plain = True, False  # for a script that has kept what replaces a function
        self._patches.restore()
        self._primitives.restore()

    def finish(self) -> None:
        self._settle()
        self._tell_validation()

    def changed(self) -> None:
        """Call it after a change of `guards`."""
        self._single = self.guards[0] if len(self.guards) == 1 and self._is_told(self.guards[0]) else None
        self._is_plain = False

    def add(self, guard: Guard) -> None:
        """Takes a guard whose first step is about to be taken."""
        if self.newest is not None:
            guard._facts.record_loss_graph(self.newest)
        guard._is_loss_new = False
        self.guards = [*(one for one in self.guards if one._run.living_optimizers()), guard]
        self._seen[id(guard)] = guard._run.step
        self.changed()

    def _safely(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """What `call` returns; None if it raises, which is kept."""
        try:
            return call(*args)
        except Exception as error:
            self._kept(what, error)

    def _watching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        tensor = torch.Tensor

        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            guard: Any = self._single
            is_usual = self._is_plain and grad_tensors is None and type(tensors) is tensor and graph_task() == -1
            if is_usual and guard._run.step != self._step:  # one pass a step
                original(tensors, grad_tensors, *args, **kwargs)
                try:
                    self._step = guard._run.step
                    guard.observe(self._total)
                    self._total = tensors.item() if tensors.is_cpu else tensors.detach()
                except Exception as error:
                    self._kept("losses", error)
                return
            is_outer = not self._is_over and graph_task() == -1  # not where activations are computed again
            loss = self._safely("losses", self._begin, tensors) if is_outer else None
            original(tensors, grad_tensors, *args, **kwargs)
            if is_outer:
                self._safely("losses", self._take, loss)

        return backward

    def _begin(self, tensors: Any) -> torch.Tensor | None:
        """Tells the last step its loss. Returns the new one, as it was before a GradScaler scaled it."""
        if self.when_idle is not None:
            self.keeps_newest, call, self.when_idle = False, self.when_idle, None
            call()
        self._settle()
        loss = tensors if isinstance(tensors, torch.Tensor) or len(tensors) != 1 else tensors[0]
        if type(loss) is not torch.Tensor or loss.numel() != 1 or loss.is_complex():
            loss = None
        else:
            scaled, self._scaled = self._scaled, None
            loss = scaled[1] if scaled is not None and scaled[0]() is loss else loss
        if self._val_has_grad and not self._is_any_training():
            self._forget_validation()  # training in eval mode
        self._tell_validation()
        if self._is_armed:
            self._is_armed = False
            self._listen([])
        if loss is not None and (self._count or self._num_accumulated > 1):
            self._divisor = _divisor_of(loss)
        return loss

    def _take(self, loss: torch.Tensor | None) -> None:
        calls, self._calls = self._calls, []
        if loss is None:
            return
        number = loss.item() if loss.is_cpu else loss.detach().reshape(())
        self._total = number if not self._count else self._total + number
        self._count += 1
        self.newest = loss if self.keeps_newest else None
        if self._samples is not None:
            self._learn(float(number), calls)
        is_alone = self._single is not None and self._count == 1 and self._num_accumulated == 1
        is_learning = self._samples is not None or self.keeps_newest
        self._is_plain = is_alone and not is_learning and self.scaler is None and not self._is_over
        if self._is_plain:
            self._step = self._seen[id(self._single)]

    def _settle(self) -> None:
        """Tells the loss to the guards that have stepped since the last pass."""
        if self._single is not None:
            self._seen[id(self._single)] = max(self._step, self._seen[id(self._single)])
        stepped = [guard for guard in self.guards if guard._run.step != self._seen[id(guard)]]
        if not stepped or not self._count:
            return
        divisor, count = self._divisor, self._count
        known = self._function or (self._samples[-1] if self._samples else None)
        ratio = 1.0 if known is None else known[1]
        if count > 1 and (divisor == count or abs(ratio * count - 1.0) <= _TOLERANCE):
            self._num_accumulated = divisor = count
        is_sum = count > 1 and divisor is None and known is not None and abs(ratio - 1.0) <= _TOLERANCE
        factor = self._num_accumulated if divisor == self._num_accumulated else 1
        loss = self._total * factor if count == 1 else self._total * factor / count
        self._count, self._divisor = 0, None
        for guard in stepped:
            self._seen[id(guard)] = guard._run.step
            guard._run.has_scaler = guard._run.has_scaler or self.scaler is not None
            if is_sum and count != guard._ledger.history.model.num_summed:
                guard._ledger.history.note_model(num_summed=count)
            if self._is_told(guard):
                guard.observe(loss=loss)

    def _is_told(self, guard: Guard) -> bool:
        """Whether the loss of a step is told. That of LBFGS, which has several, is what its closure returns."""
        return all(member.can_skip for member in guard._run.members)

    def _scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if scaled is not outputs and isinstance(scaled, torch.Tensor):
            self.scaler, self._is_plain = scaler, False
            self._scaled = weakref.ref(scaled), outputs
        return scaled

    def _update(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if scaler.is_enabled():
            self._safely("losses", self._settle)
            self.num_scaler_skips += self._count > 0
            self._count = 0  # losses of a step that the scaler has skipped
        return original(scaler, *args, **kwargs)

    # Validation losses.

    def _evaluate(self, original: Callable[..., Any], module: torch.nn.Module) -> Any:
        self._safely("validation losses", self._begin_evaluation, module)
        return original(module)

    def _begin_evaluation(self, module: torch.nn.Module) -> None:
        """If a guarded model goes into eval mode, the loss function is listened to only then from now on."""
        if not set(self._models()).intersection(module.modules()):
            return
        self._has_eval = True
        if self._function is not None and not self._is_armed:
            self._is_armed, self._is_plain = True, False
            self._listen([self._function[0]])

    def _models(self) -> list[torch.nn.Module]:
        return [unwrapped(guard.model) for guard in self.guards if guard.model is not None]

    def _listen(self, names: Any) -> None:
        """Listens to these loss functions, and no others but that of a model whose passes are not seen."""
        self._primitives.restore()
        names = names or ([] if self._blind is None else [self._function[0]])
        for name in names:
            owner, at = _FUNCTIONS[name]
            self._primitives.replace(owner, name, functools.partial(self._listening, name, at))

    def _listening(self, name: str, at: int, original: Callable[..., Any]) -> Callable[..., Any]:
        if name in self._listeners:
            return self._listeners[name]

        def listened(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if type(result) is torch.Tensor and result.requires_grad and self._blind is not None and graph_task() == -1:
                self._safely("batches", self._blind.meet, args[0])
            if type(result) is torch.Tensor and not (
                self._samples is None and not self._is_armed and result.requires_grad  # of a step
            ):
                self._safely("validation losses", self._meet, name, at, args, kwargs, result)
            return result

        torch.jit._builtins._register_builtin(listened, f"aten::{name}")  # for torch.jit.script: it looks them up by id
        self._listeners[name] = listened
        return listened

    def _is_any_training(self) -> bool:
        models = self._models()
        return not models or any(model.training for model in models)

    def _meet(self, name: str, at: int, args: Any, kwargs: Any, result: torch.Tensor) -> None:
        if graph_task() != -1 or torch._C._functorch.is_functorch_wrapped_tensor(result):
            return
        number = args[1].numel()
        reduction = args[at] if len(args) > at else kwargs.get("reduction", _MEAN)
        with torch.no_grad():
            total: Any = result.detach().double().sum() * (number if reduction == _MEAN else 1)
        total = total.item() if total.is_cpu else total
        if self._samples is not None:
            if result.requires_grad:
                self._width = args[0].shape[-1] if args[0].dim() > 1 else 1
                self._calls.append((name, total / max(number, 1)))
        elif name == self._function[0] and not (result.requires_grad and self._is_any_training()):
            self._val_total, self._val_count = self._val_total + total, self._val_count + number
            # A single call in train mode is no evaluation: a teacher's loss, say, or one that is only printed.
            self._val_calls += 1 if self._is_any_training() else 2
            self._val_has_grad = self._val_has_grad or result.requires_grad
            self._is_plain = False

    def _learn(self, loss: float, calls: list[tuple[str, Any]]) -> None:
        """Compares the loss of a pass with what the loss functions returned since the pass before."""
        samples: Any = self._samples
        alone = calls[0] if len(calls) == 1 else None
        samples.append(None if alone is None or not float(alone[1]) else (alone[0], loss / float(alone[1])))
        if len(samples) < _NUM_LEARNT or not self.guards:
            return
        self._samples = None
        found = samples[-_NUM_LEARNT:]
        if None not in found and len({name for name, _ in found}) == 1:
            name, ratio = found[-1]
            if all(abs(other - ratio) <= _TOLERANCE * abs(ratio) for _, other in found):
                self._function = name, ratio
        batches = self.guards[0]._observers.batches
        is_known = self._function is not None and len(self.guards) == 1
        if is_known and batches is not None and batches.output_width != self._width:
            self._blind = batches
            batches.begin_to_meet()
        self._listen([] if self._function is None or self._has_eval else [self._function[0]])

    def _tell_validation(self) -> None:
        if self._function is not None and self._val_count and self._val_calls > 1:
            loss = self._function[1] * self._num_accumulated * self._val_total / self._val_count
            for guard in self.guards:
                guard.observe(val_loss=loss)
        self._forget_validation()

    def _forget_validation(self) -> None:
        self._val_total, self._val_count, self._val_calls, self._val_has_grad = 0.0, 0, 0, False


def _divisor_of(loss: torch.Tensor) -> float | None:
    """The number that a loss was divided by last; None if it was not."""
    node: Any = loss.grad_fn
    name = "" if node is None else node.name()
    if not name.startswith(("DivBackward", "MulBackward")) or [f for f, _ in node.next_functions[1:] if f]:
        return None
    other = node._saved_other
    if not isinstance(other, torch.Tensor) or other.numel() != 1 or not other.is_cpu or not float(other):
        return None
    return round(float(other) if name.startswith("Div") else 1.0 / float(other), 6)
