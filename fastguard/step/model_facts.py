"""ModelFactRecorder: records facts about model, optimizers and loss in the history, for the rules."""

from __future__ import annotations

import weakref
from typing import Any

from .. import _env
from ..names import Namer
from ..observers.facts import ModelFacts
from ..observers.loss_gradient import facts_of_loss, parameters_of_loss
from ..observers.resources import ResourceUse
from ..observers.sketches import guarded_parameters
from ..ranks import LocalGradients
from .ledger import Ledger
from .run import Run
from .sampling import Sampling
from .settings import users_policy

_ALIVE: weakref.WeakSet[ModelFactRecorder] = weakref.WeakSet()


class ModelFactRecorder:
    """Records facts in the history of one guard. Failures are recorded, too, and never raised."""

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        sampling: Sampling,
        facts: ModelFacts,
        namer: Namer,
        objective: str | None,
        local: LocalGradients | None = None,
    ) -> None:
        self._run, self._ledger, self._sampling, self.facts = run, ledger, sampling, facts
        self._namer = namer
        self._objective = objective
        self._local = local
        self._resources = ResourceUse()
        self._foreign: dict[int, weakref.ref[Any]] = {}  # parameters of the loss that are not the model's
        self._loss: int | None = None  # the number of the loss's operation
        with run.failures.kept("model facts", "The rules know nothing about the model."):
            ledger.history.note_model(**facts.at_first())
        self.record()
        _ALIVE.add(self)

    def record(self) -> None:
        """Records the facts as they are now."""
        optimizers = self._run.living_optimizers()
        with self._run.failures.kept("model facts", "The rules may not know the settings of optimizer and model."):
            facts = self.facts.now(optimizers, guarded_parameters) if optimizers else {}
            self._ledger.history.note_model(**facts, **self._of_run())

    def record_loss_graph(self, loss: Any) -> None:
        """Records what the autograd graph of the first loss says about it, also for guards whose models are in it."""
        with self._run.failures.kept("model facts", "The rules do not know what loss it is."):
            known = {id(p) for p, _ in self._namer.known()}
            known |= self._guarded() if known else set()
            self._ledger.history.note_model(**facts_of_loss(loss, known or None))
            self._foreign = parameters_of_loss(loss) if known else {}
            for number in known & self._foreign.keys():
                del self._foreign[number]
            node = getattr(loss, "grad_fn", None)
            self._loss = None if node is None else node._sequence_nr()
            for other in [one for one in _ALIVE if one is not self]:
                if other._loss == self._loss is not None:  # the same loss: both minimise it
                    self._share(other)
                    other._share(self)
                other._note_adversary(self)
                self._note_adversary(other)

    def _of_run(self) -> dict[str, Any]:
        run = self._run
        limit = None if run.clip is None else run.clip.limit
        policy = users_policy(run.clip)
        return {
            **self._sampling.observers.facts(),
            "resources": self._resources.facts(run.step) or None,
            "objective": self._objective,
            "clip_limit": limit if isinstance(limit, (int, float)) else None,
            "clip_policy": "" if policy is None else _shown(policy),
            "has_scaler": run.has_scaler if run.step else None,
            "num_ranks": self._num_ranks,
            "num_averaged": run.num_averaged,
            "num_restarts": _env.num_restarts() or None,
        }

    @property
    def _num_ranks(self) -> int | None:
        """Number of ranks that hold or average the gradients; 1 if there were more before a resume."""
        if self._local is not None:
            return self._local.num_ranks
        ranks = self._run.ranks
        if ranks is not None and not ranks.is_alone:
            return ranks.num_ranks
        return None if self._ledger.history.model.num_ranks is None else 1

    def _guarded(self) -> set[int]:
        groups = [group for optimizer in self._run.living_optimizers() for group in optimizer.param_groups]
        return {id(p) for group in groups for p in group["params"]}

    def _share(self, other: ModelFactRecorder) -> None:
        """The parameters of `other` are not those of an adversary."""
        shared = self._foreign.keys() & other._guarded()
        for number in shared:
            del self._foreign[number]
        if shared:
            self._ledger.history.note_model(num_foreign_parameters=len(self._foreign))

    def _note_adversary(self, other: ModelFactRecorder) -> None:
        """Records how many parameters are in the loss of the model of `other`, as in a GAN."""
        own = self._guarded() if other._foreign else set()
        num = len([i for i, ref in other._foreign.items() if i in own and ref() is not None])
        history = self._ledger.history
        if num > (history.model.num_foreign_parameters or 0):
            history.note_model(num_foreign_parameters=num)


def _shown(policy: Any) -> str:
    try:
        return repr(policy)[:200]
    except Exception:  # a user's policy may raise
        return type(policy).__name__
