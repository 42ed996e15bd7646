"""Samples some forward passes of the whole model: its inputs, its output, and which modules it calls last."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict, deque
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..kernels.cpu import extension
from ..names import strip_wrappers
from ..records.failures import Failures
from .batch_sample import data_of, sample_of
from .facts import kind_of, leaves_of
from .loss_gradient import LossGradient, chain_of
from .modes import EvaluationWatch
from .observer import ModuleHook, Observer, Transient, leave_to_python, unwrapped
from .tensors import can_be_read, leaves, thinned

_EARLY, _LATE, _NUM_EARLY = 20, 100, 50  # from one look to the next; and how many there are of the former
_NUM_FIRST = 3  # training passes in a row that are looked at
_COMPARED = (5, 10, 25)  # looks, at the passes after which running statistics are compared with a batch's
_MAX_WAITING = 4  # samples of one record
_NUM_MODULES = _NUM_OPERATIONS = 3
_WHAT = "batch sampler"
_MAX_NORMS = 8  # BatchNorm modules that are compared
_MAX_NORM_ELEMENTS, _MAX_CHANNELS = 65536, 4096
_LEAST_ROWS = 16  # elements of a channel, whose own mean is off by a quarter of a deviation then
_FIRST_QUIET = 2, 13  # the first torch whose dynamo traces a model with such hooks


def schedule_for(clock: Any, model: nn.Module) -> Any:
    """From which steps on a forward pass is to be looked at: in train mode and with autograd, and any other.

    With the clock of a run, which only the extension has, C++ compares these with the number of the step, and a pass
    that is not due enters no Python function.
    """
    if clock is not None:
        return extension.ScheduleState(clock, model)
    return SimpleNamespace(training_from=0, evaluation_from=0, is_evaluation_due=False)


def can_be_quiet(module: nn.Module) -> bool:
    """Whether the forward hooks of `module` can be the extension's, which are false while the only one is not due.

    `Module.__call__` calls just `forward` where all its dicts of hooks are false, which saves 4 us a pass. Not where
    there are hooks already, whose handles know the dict that is there, or where the module has its own `__call__`.
    """
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    known = module.__dict__.get("_forward_hooks")
    is_plain = type(module).__call__ is nn.Module.__call__ and type(known) is OrderedDict and not known
    return is_plain and version >= _FIRST_QUIET


class BatchWatch(Transient, Observer):
    """A forward hook on the whole model that samples passes.

    It samples the first three training passes, then the first one in twenty steps, and after fifty samples the first
    one in a hundred; as often, the first pass in eval mode or without autograd that follows training, whose like up to
    the next step `EvaluationWatch` may follow. It reads tensors on the CPU only: for others the host would have to
    wait. It leaves out passes that are traced, compiled whole, recomputed for the backward pass or inside a transform
    of torch.func.

    Cost: 2 us a pass, 6 if the model has other hooks; 0.1 ms for a sample, of some 4096 elements of input and output.
    """

    def __init__(self, model: nn.Module, run: Any, device: str) -> None:
        failures, clock = run.failures, getattr(run, "clock", None)  # of the extension
        self._model, self._run = weakref.ref(model), weakref.ref(run)
        self._inner = weakref.ref(unwrapped(model))
        self._failures = failures
        self._num_taken = 0
        # In steps: an accumulated gradient takes many passes, an actor many without a gradient.
        self._schedule = schedule_for(clock, model)
        self.is_paused = self._is_met = False
        self.output_width = 0  # the last dimension of the newest output in training; 0 if it has none
        self.first = FirstPass(model, device, failures)
        self.loss = LossGradient(failures)
        self.norms, self.series = NormStatistics(model, failures), EvaluationWatch()
        hooks: Any = None
        if clock is not None and can_be_quiet(model):
            hooks = model.__dict__["_forward_hooks"] = extension.QuietHooks()
        self._handle: Any = model.register_forward_hook(self, with_kwargs=True)
        self._hooks = None if hooks is None else weakref.ref(hooks)
        if hooks is not None:
            hooks.schedule, hooks.is_awaited = self._schedule, self._is_awaited

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        with_grad = torch.is_grad_enabled()
        is_training = module.training and with_grad
        if not self._is_due(is_training) or self.is_paused or (self._is_met and is_training):
            return
        if module is not self._model():  # a replica of DataParallel's is another
            return
        if torch._C._current_graph_task_id() == -1 and not torch._C._is_tracing():
            torch._C._set_grad_enabled(False)  # a tenth of `torch.no_grad`, where that is not in a cache
            try:
                self._look(module, args, kwargs, output, is_training, with_grad)
            except Exception as error:  # a model may raise anything; the report names it, training goes on
                self._failures.note(_WHAT, error, "That pass was not looked at.")
            finally:
                torch._C._set_grad_enabled(with_grad)

    def begin_to_meet(self) -> None:
        """Has passes in training sampled by `meet` from now on. What was seen so far was not the loss's input."""
        self._is_met, self._num_taken, self._schedule.training_from = True, 0, 0
        self.first.found, self.loss = {}, LossGradient(self._failures)

    def meet(self, output: torch.Tensor) -> None:
        """Takes what a loss function is given for the model's output, which was not seen or was another tensor.

        Of the pass before, the inputs are those of the first module that it called. When a sample is due, hooks are set
        on the modules first, and the sample is taken in the pass after that.
        """
        model = self._model()
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(output)
        if model is None or self.is_paused or is_wrapped or not self._is_due(is_training=True):
            return
        if self.first.given is None:
            self.first.begin(model, ())
            return
        given = [x for ref in self.first.given if (x := ref()) is not None]
        with self._failures.kept(_WHAT, "That pass was not looked at."), torch.no_grad():
            self._look(model, given, {}, output, is_training=True, with_grad=True)
            self.first.close()

    def _is_awaited(self) -> bool:
        """Whether to sample a pass that begins now."""
        model = self._model()
        return model is not None and self._is_due(model.training and torch.is_grad_enabled())

    def _is_due(self, is_training: bool) -> bool:
        """Whether to look at such a pass now. Asking changes nothing, but that a series ends with its step."""
        run, schedule = self._run(), self._schedule
        if run is None or not run.may_wait:
            return False
        if is_training:
            schedule.is_evaluation_due = True
            return bool(run.step >= schedule.training_from)
        series, model = self.series, self._inner()
        if series.step == run.step:
            return model is not None and series.awaits(model.training)
        if series.step >= 0:
            schedule.evaluation_from = series.next_from
            series.end(run.step)
        return bool(schedule.is_evaluation_due and run.step >= schedule.evaluation_from)

    def _look(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any, is_training: bool, with_grad: bool
    ) -> None:
        run, schedule, series = self._run(), self._schedule, self.series
        inner = self._inner() or module
        if run is not None and series.step == run.step and not is_training:
            series.meet(inner, args, kwargs, with_grad, run.step)
            return
        if run is None or len(run.ring.batches_at(run.step)) >= _MAX_WAITING:
            return
        self._num_taken += is_training
        following = run.step + (_EARLY if self._num_taken < _NUM_EARLY else _LATE)
        if is_training:
            schedule.training_from = 0 if self._num_taken < _NUM_FIRST else following
        self.first.end(output)
        data = data_of(args, kwargs)
        if not is_training:
            is_open = series.meet(inner, args, kwargs, with_grad, run.step)
            schedule.is_evaluation_due, series.next_from = is_open, following
            schedule.evaluation_from = run.step if is_open else following
        sample = sample_of(data, output, bool(inner.training), with_grad)
        if is_training:
            self.loss.watch(output, [x.tensor for x in data[:4]])
            if self._num_taken in _COMPARED:
                self.norms.arm()
            self.output_width = 0
            if sample is not None and any(y.dim() for _, y in leaves(output)):
                self.output_width = sample.output_width
        if sample is not None:
            run.ring.attach(run.step, batches=(*run.ring.batches_at(run.step), sample))

    def facts(self) -> dict[str, Any]:
        norms = {"norm_statistics": dict(self.norms.found)} if self.norms.found else {}
        return {**self.first.found, **self.loss.facts, **norms, **self.series.facts()}

    def resume(self, step: int) -> None:
        """The first passes were looked at before the run was resumed at `step`."""
        self._num_taken = _NUM_EARLY if step >= _EARLY * _NUM_EARLY else _NUM_FIRST
        self._schedule.training_from = self._schedule.evaluation_from = step + _EARLY
        self.loss.is_late = True

    def close(self) -> None:
        self.first.close()
        self.norms.close()
        handle, self._handle = self._handle, None
        hooks, model = None if self._hooks is None else self._hooks(), self._model()
        if handle is not None:
            handle.remove()
        if hooks is not None:
            hooks.is_awaited = None  # now they are ordinary hooks
            if model is not None and not hooks and model.__dict__.get("_forward_hooks") is hooks:
                model.__dict__["_forward_hooks"] = OrderedDict()

    @property
    def __name__(self) -> str:
        raise AttributeError("a model under guard has hooks that cannot be scripted: call `guard.detach()` before")


class FirstPass(Observer):
    """The modules that the first forward pass called, by hooks in that pass only, and its autocast. Cost: 3 us each."""

    def __init__(self, model: nn.Module, device: str, failures: Failures) -> None:
        self.found: dict[str, Any] = {}  # facts about the model
        # the tensors that the first of these modules took; None outside of such a pass
        self.given: list[weakref.ref[torch.Tensor]] | None = None
        self._device = device if torch.amp.is_autocast_available(device) else ""
        self._failures = failures
        self._called: deque[str] = deque(maxlen=_NUM_MODULES)
        self._learning: dict[str, None] = {}
        self._autocast = ""
        self.hold(model.register_forward_pre_hook(ModuleHook(self.begin)))

    def begin(self, model: nn.Module, args: Any) -> None:
        """Watches the modules of `model`, instead of those of a pass before that did not end."""
        with self._failures.kept(_WHAT, "Which modules the first pass called last is not known."):
            self.close()
            self.hold(model.register_forward_pre_hook(ModuleHook(self.begin)))
            self._called.clear()
            self._learning.clear()
            self.given = []
            self._autocast = _autocast(self._device)
            seen, leaves = ModuleHook(self._see), leaves_of(model)
            if leaves == [model]:
                self._see(model)
            else:  # a scripted module takes no hook
                self.hold(*(x.register_forward_hook(seen) for x in leaves if not isinstance(x, torch.jit.ScriptModule)))
                for name, module in model.named_modules():
                    if name and module._parameters and not isinstance(module, torch.jit.ScriptModule):
                        self.hold(module.register_forward_hook(ModuleHook(self._use, strip_wrappers(name))))

    def _use(self, name: str, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._learning[name] = None

    def _see(self, module: nn.Module, args: Any = (), *_: Any) -> None:
        with self._failures.kept(_WHAT, "Which modules the first pass called last is not known."):
            if not self.given and torch.is_grad_enabled():
                self.given = [weakref.ref(x) for x in args if isinstance(x, torch.Tensor)]
            self._called.append(kind_of(module))
            self._autocast = self._autocast or _autocast(self._device)

    def close(self) -> None:
        super().close()
        self.given = None

    def end(self, output: Any) -> None:
        """The pass is over; the first one that is."""
        if not self.found:
            self.close()
            floating = [y for _, y in leaves(output) if y.is_floating_point()]
            y = next((y for y in floating if y.dim()), floating[0] if floating else None)
            names = [node.name() for node in chain_of(None if y is None else y.grad_fn)]
            done = [name for name in names if name not in ("TBackward0", "TransposeBackward0")][:_NUM_OPERATIONS]
            self.found = {
                "last_modules": list(reversed(self._called)),
                "last_operations": [name.partition("Backward")[0].rpartition("::")[2] for name in done],
                "autocast": self._autocast,
                "learning_modules": list(self._learning),
            }


class NormStatistics(Observer):
    """Hooks on at most eight BatchNorm modules, for one pass; `arm` sets them. Cost: 40 us a module, at such a pass.

    `found` has for each the distance of the means in standard deviations of the batch (root mean square over channels)
    and the running variance divided by that of the batch (geometric mean); Inf if running statistics are not finite.
    """

    def __init__(self, model: nn.Module, failures: Failures) -> None:
        named = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        step = -(-len(named) // _MAX_NORMS) if named else 1
        self._modules = [(strip_wrappers(name), weakref.ref(m)) for name, m in named[::step]]
        self._failures = failures
        self._awaited: set[str] = set()
        self.found: dict[str, tuple[float, float]] = {}

    def arm(self) -> None:
        """Sets the hooks for the next pass."""
        self.close()
        for name, ref in self._modules:
            module = ref()
            if module is not None:
                self._awaited.add(name)
                self.hold(module.register_forward_pre_hook(ModuleHook(self._meet, name)))

    def _meet(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Compares a module once, when it is called. Removes the hooks when all modules were called."""
        if name in self._awaited and args and torch.is_grad_enabled():
            self._awaited.remove(name)
            if not self._awaited:
                self.close()
            self.compare(name, module, args[0])

    def compare(self, name: str, module: nn.Module, x: Any) -> None:
        """Compares the running statistics of a module with those of its input `x`."""
        with self._failures.kept(_WHAT, "Running statistics are not compared."), torch.no_grad():
            mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
            if mean is None or variance is None or type(x) not in (torch.Tensor, nn.Parameter) or x.dim() < 2:
                return
            if not (can_be_read(x) and can_be_read(mean)) or x.shape[1] != mean.numel():
                return
            if not bool(mean.isfinite().all() and variance.isfinite().all()):
                self.found[name] = math.inf, math.inf
                return
            step = -(-x.shape[1] // _MAX_CHANNELS)
            channels = x.detach()[:, ::step]
            most = max(_MAX_NORM_ELEMENTS, _LEAST_ROWS * channels.shape[1])
            channels = thinned(channels, most, (*range(x.dim() - 1, 1, -1), 0)).transpose(0, 1).flatten(1).float()
            if channels.shape[1] < _LEAST_ROWS:
                return
            of_batch, means = torch.var_mean(channels, 1)
            eps = float(getattr(module, "eps", 1e-5))
            away = ((mean[::step].float() - means).square() / (of_batch + eps)).mean().sqrt()
            times = ((variance[::step].float() + eps).log() - (of_batch + eps).log()).mean()
            gap, ratio = float(away), math.exp(max(-700.0, min(700.0, float(times))))
            if math.isfinite(gap) and ratio > 0.0:
                self.found[name] = gap, ratio


def _autocast(device: str) -> str:
    """The dtype of autocast on `device`; empty without autocast or device."""
    if not device or not torch.is_autocast_enabled(device):
        return ""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


leave_to_python(BatchWatch.__call__)
