"""What the rules are told of model, optimizers and loss, beside the records."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .. import _env
from ..names import Namer
from .facts import ModelFacts
from .ledger import Ledger
from .loss_graph import facts_of_loss, parameters_of_loss
from .policies import GivenPolicy
from .ranks import LocalGradients
from .run import Run
from .sampling import Sampling
from .sketches import guarded_parameters

_ALIVE: weakref.WeakSet[Told] = weakref.WeakSet()


class Told:
    """Notes facts in the history of one guard. What fails is noted too, and stops nobody."""

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
        self._num_opposed = 0
        with run.failures.kept("model facts", "The rules that want to know of the model were told nothing."):
            ledger.history.note_model(**facts.at_first())
        self.tell()
        _ALIVE.add(self)

    def tell(self) -> None:
        """What is so now of model and optimizers, and what was seen, which outlives these."""
        optimizers = self._optimizers()
        with self._run.failures.kept("model facts", "The rules may not know how optimizer and model are set now."):
            facts = self.facts.now(optimizers, guarded_parameters) if optimizers else {}
            self._ledger.history.note_model(**facts, **self._seen())

    def tell_of_loss(self, loss: Any) -> None:
        """What the graph of the first observed loss says of it, and of the models of other guards that are in it."""
        with self._run.failures.kept("model facts", "The rules do not know what loss it is."):
            known = {id(p) for p, _ in self._namer.known()}
            if known:
                known |= self._guarded()
            self._ledger.history.note_model(**facts_of_loss(loss, known or None))
            foreign = parameters_of_loss(loss) - known if known else set()
            for other in list(_ALIVE) if foreign else ():
                other._be_opposed(foreign)
            self._be_opposed(set())

    def _seen(self) -> dict[str, Any]:
        """What was told to the guard, and what it saw."""
        run = self._run
        limit = None if run.clip is None else run.clip.limit
        policy = run.clip.given if isinstance(run.clip, GivenPolicy) else run.clip
        return {
            **self._sampling.facts(),
            "objective": self._objective,
            "clip_limit": limit if isinstance(limit, (int, float)) else None,
            "clip_policy": "" if policy is None else _shown(policy),
            "has_scaler": run.has_scaler if run.step else None,
            "num_ranks": self._num_ranks,
            "num_restarts": _env.num_restarts() or None,
        }

    @property
    def _num_ranks(self) -> int | None:
        """Over which the gradients lie, or that are watched; 1 where there were more before a resume."""
        if self._local is not None:
            return self._local.num_ranks
        ranks = self._run.ranks
        if ranks is not None and not ranks.is_alone:
            return ranks.num_ranks
        return None if self._ledger.history.model.num_ranks is None else 1

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that still exist."""
        return [member.optimizer for member in self._run.members if member.is_alive]

    def _guarded(self) -> set[int]:
        """Ids of the parameters under this guard."""
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        return {id(p) for group in groups for p in group["params"]}

    def _be_opposed(self, foreign: set[int]) -> None:
        """Notes how many parameters are in the loss of another guard's model, as in a game."""
        history = self._ledger.history
        self._num_opposed = max(self._num_opposed, len(foreign & self._guarded()) if foreign else 0)
        if self._num_opposed > (history.model.num_foreign_parameters or 0):
            history.note_model(num_foreign_parameters=self._num_opposed)


def _shown(policy: Any) -> str:
    """A policy of a user's, as it shows itself."""
    try:
        return repr(policy)[:200]
    except Exception:  # it is the user's own
        return type(policy).__name__
