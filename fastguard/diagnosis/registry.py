"""The registry of all rules: how a function becomes a rule, and how `diagnose` applies them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..records import TrainingHistory
from ..records.failures import Failures
from . import needs
from .finding import SEVERITIES, Finding, Seen, Severity, as_one, by_sign, sign_of
from .harm import is_harmed
from .signals import span


class Rules(dict[str, "Rule"]):
    """The rules by name. You can look up a single sign, too: `RULES["loss-explosion"]` applies that sign alone."""

    def __missing__(self, name: str) -> Rule:
        return SIGNS[name]


RULES = Rules()
CHECKS: dict[str, Rule] = {}  # the rules of stage "before", which read what `preflight` has measured
SIGNS: dict[str, Rule] = {}  # the checks that are part of a rule of another name, by their own
_OF: dict[str, tuple[Rule, ...]] = {}  # the same by rule
_NONE: Mapping[str, float] = {}
_ONE_EVENT = ("loss-explosion", "loss-divergence", "divergence-ahead", "growing-norm", "norm-spike", "loss-spike")
_OURS = __name__.rpartition(".")[0] + ".rules."


@dataclass(frozen=True, slots=True)
class Rule:
    """A named check of a history. Calling it gives its `Finding`, or None.

    Attributes:
        name: a noun phrase, like "norm-spike".
        check: the function that looks for it: it returns what it has `Seen`, a `Finding`, or None.
        thresholds: its defaults, by name; a call takes others as keyword arguments.
        severity: the worst that it reports, and that of a finding that does not say.
        see: the text of a finding, filled with what was `Seen`.
        sure: the confidence of a finding that does not say.
        source: the origin of definition and thresholds.
        remedy: what to do, unless a finding says better.
        stage: "during" for rules that read a history, "before" for those of `preflight`.
        depth: of a rule of stage "before": 0 for what was given (data, loss, parameters, settings), 1 for initial
            weights, 2 for how signals flow through the model, from 3 on for trial steps. A deeper finding follows from
            a shallower one.
        needs_descent: silent in games, with rewards, and for losses below zero: it requires a loss that is minimised.
        needs_targets: silent in games, where the output is not compared with targets of the data.
        needs_harm: info unless the run has come to harm (`harm.is_harmed`), a rule without this flag warns, or the
            finding's evidence has `is_certain`. These rules warned on sound runs, and found no fault alone.
        of: the rule that it is a sign of; empty for a rule. The signs of a rule make one finding.
        cause: the cause that it speaks for: the name of one in `CAUSES`, or a name and a sentence for one that it alone
            speaks for, whose remedy is the rule's.
        weight: how strongly it speaks for that, from 0 to 1; of two, the first is for a loss that does not fall.
        explains: further rules that the cause explains, as in `causes.Cause`.
        signs: the checks that it consists of.
    """

    name: str
    check: Callable[..., Finding | Seen | None]
    thresholds: Mapping[str, float]
    severity: Severity = "warning"
    see: str = ""
    sure: float = 0.85
    source: str = ""
    remedy: str = ""
    needs_descent: bool = False
    needs_targets: bool = False
    needs_harm: bool = False
    stage: Literal["during", "before"] = "during"
    depth: int = 0
    of: str = ""
    cause: tuple[str, str] | str | None = None
    weight: float | tuple[float, float] = 1.0
    explains: str = ""
    signs: tuple[Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise ValueError(f"`severity` must be one of {list(SEVERITIES)}, got {self.severity!r} - at {self.name!r}")
        signs = () if self.of else _OF.get(self.name, ())
        is_led = any(one.check is self.check for one in signs)
        object.__setattr__(self, "signs", signs if is_led else (self, *signs))

    def __call__(self, history: TrainingHistory, **thresholds: float) -> Finding | None:
        self.check_thresholds(thresholds)
        asked = [(one, thresholds if one.check is self.check else _NONE) for one in self.signs]
        found = [one._ask(history, chosen) for one, chosen in asked if one._may_speak(history)]
        told = [finding for finding in found if finding is not None]
        return as_one(told) if told else None

    @property
    def whole(self) -> str:
        """The name of the rule, or of the rule that it is a sign of."""
        return self.of or self.name

    def _may_speak(self, history: TrainingHistory) -> bool:
        """Whether the run has what it needs: a loss that is minimised, targets of data."""
        if self.needs_descent and needs.descent(history) is False:
            return False
        if not self.needs_targets:
            return True
        plays = needs.game(history) or needs.takes_turns(history)
        return not (plays or needs.reinforces(history) or needs.beside_an_actor(history))

    def _ask(self, history: TrainingHistory, thresholds: Mapping[str, float]) -> Finding | None:
        """As a call, for a rule that may speak and thresholds that it has."""
        seen = self.check(history, **thresholds)
        if seen is None:
            return None
        finding = seen.finding(self.see, self.severity, self.sure) if isinstance(seen, Seen) else seen
        if not isinstance(finding, Finding):
            raise TypeError(f"the rule {self.name!r} must return Seen, a Finding or None, got {type(seen).__name__}")
        first, last = finding.first_step, finding.last_step
        if first is None and last is None and self.stage == "during" and self.family != "own":
            first, last = span(history)
        return dataclasses.replace(
            finding,
            first_step=first,
            last_step=last,
            rule=self.whole,
            recommendation=finding.recommendation or self.remedy,
            link=self.page,
            evidence={**finding.evidence, **({"sign": self.name} if self.of else {})},
        )

    def check_thresholds(self, thresholds: Mapping[str, float]) -> None:
        """Raises TypeError for a threshold that the rule does not have."""
        unknown = sorted(thresholds.keys() - self.thresholds.keys())
        if unknown:
            known = ", ".join(self.thresholds) or "none"
            raise TypeError(f"`{unknown[0]}` must be a threshold of the rule {self.name!r}; it has: {known}")

    @property
    def family(self) -> str:
        """The file that it is in, like "vanishing", up to an underscore; "own" for a user's rule."""
        if self.stage == "before":
            return "preflight"
        module = self.check.__module__
        return module.removeprefix(_OURS).partition("_")[0] if module.startswith(_OURS) else "own"

    @property
    def page(self) -> str:
        """The page that explains it, from the root of the repository; empty for a user's rule."""
        return "" if self.family == "own" else f"docs/rules/{self.whole}.md"


def rule(
    name: str, *, of: str = "", leads: bool = False, was: str = "", **about: Any
) -> Callable[[Callable[..., Finding | Seen | None]], Rule]:
    """Registers a function of a `TrainingHistory` as a rule; its keyword-only arguments are the thresholds.

    A rule of stage "before" goes to `CHECKS`; its function takes what `preflight` has measured.

    Args:
        name: must be new, unless the same function is defined again (as when a notebook cell is run twice).
        of: the rule that this is a sign of.
        leads: whether the rule `of` takes its thresholds and its text from this sign.
        was: earlier names, with blanks between them; they are understood wherever a rule is named.
        about: the other attributes of `Rule`: severity, source, remedy and what it needs.

    Raises:
        ValueError: if another function has that name, the severity is unknown, or a threshold has no default.

    >>> @rule("long-run", severity="info", remedy="Take a break.")
    ... def long_run(history, *, max_steps=10):
    ...     if history.num_steps > max_steps:
    ...         return Finding(f"{history.num_steps} steps", severity="info")
    >>> long_run.thresholds
    {'max_steps': 10}
    >>> del RULES["long-run"]
    """

    def register(check: Callable[..., Finding | Seen | None]) -> Rule:
        made = make_rule(check, name, of=of, **about)
        if made.stage == "before":
            CHECKS[name] = made
            return made
        known = RULES.get(name, SIGNS.get(name))
        if known is not None and _identity(known.check) != _identity(check):
            raise ValueError(f"`name` must be new, got {name!r}, which is a rule already. Choose another name.")
        SIGNS.update(dict.fromkeys([*was.split(), *([name] if of else [])], made))
        if of:
            _OF[of] = (*(one for one in _OF.get(of, ()) if one.name != name), made)
        whole = made if leads or not of else RULES.get(of)
        if whole is not None:
            RULES[made.whole] = whole = dataclasses.replace(whole, name=made.whole, of="")
            worst = max((one.severity for one in whole.signs), key=SEVERITIES.index)
            RULES[made.whole] = dataclasses.replace(whole, severity=worst)
        return made

    return register


def make_rule(check: Callable[..., Finding | Seen | None], name: str, **about: Any) -> Rule:
    """As `rule`, without registering: pass it to `diagnose(history, rules=[...])`."""
    thresholds: dict[str, Any] = {}
    for argument in inspect.signature(check).parameters.values():
        if argument.kind is not argument.KEYWORD_ONLY:
            continue
        if argument.default is argument.empty:
            raise ValueError(f"`{argument.name}` must have a default - at rule {name!r}")
        thresholds[argument.name] = argument.default
    return Rule(name, check, thresholds, **about)


def _identity(check: Callable[..., Finding | Seen | None]) -> tuple[str, str]:
    return check.__module__, check.__qualname__


def diagnose(
    history: TrainingHistory,
    *,
    rules: Iterable[Rule] | None = None,
    thresholds: Mapping[str, Mapping[str, float]] | None = None,
    failures: Failures | None = None,
) -> list[Finding]:
    """Returns the findings of the rules in `history`: critical first, the surer first among equals.

    A rule that raises finds nothing: the logger `fastguard` says so, and the other rules still run.

    Args:
        history: the run; it is not changed.
        rules: the rules to apply; all registered ones by default.
        thresholds: other thresholds by rule, like `{"norm-spike": {"ratio": 20.0}}`.
        failures: counts the rules that raise; each is logged once.

    Raises:
        ValueError: for thresholds of a rule that is not applied.
        TypeError: for a threshold that the rule does not have.

    Cost: a few passes over the window and one over the last record's rows: about 1 ms. Not for every step.
    """
    rules = list(RULES.values() if rules is None else rules)
    asked = [sign for one in rules for sign in one.signs]
    names = {one.name: one for one in asked}
    chosen: dict[str, Mapping[str, float]] = {}
    for name, given in (thresholds or {}).items():
        one = RULES[name] if name in RULES or name in SIGNS else names.get(name)
        sign = None if one is None else next((sign for sign in asked if sign.check is one.check), None)
        if sign is None:
            raise ValueError(f"`thresholds` must name rules, got {name!r}; the rules are: {', '.join(names)}")
        sign.check_thresholds(given)
        chosen[sign.name] = given
    failures = Failures() if failures is None else failures
    found = []
    may_speak: dict[tuple[bool, bool], bool] = {}  # by what is needed, worked out once for all rules
    for a in asked:
        needed = a.needs_descent, a.needs_targets
        try:
            if needed not in may_speak:
                may_speak[needed] = a._may_speak(history)
            finding = a._ask(history, chosen.get(a.name, _NONE)) if may_speak[needed] else None
        except Exception as error:
            failures.note(f"rule {a.name!r}", error, "Its check was skipped.")
        else:
            if finding is not None:
                found.append(finding)
    found = _told_once(found)
    certain = {sign_of(finding) for finding in found if finding.evidence.get("is_certain")}
    doubtful = {a.name for a in asked if a.needs_harm} - certain
    warns = {sign_of(finding) for finding in found if finding.severity != "info"}
    if warns and warns <= doubtful and is_harmed(history) is False:
        found = [dataclasses.replace(finding, severity="info") for finding in found]
    rules_of: dict[str, list[Finding]] = {}
    for finding in found:
        rules_of.setdefault(finding.rule, []).append(finding)
    return sorted(map(as_one, rules_of.values()), key=lambda finding: finding.weight, reverse=True)


def families_of(findings: Iterable[Finding]) -> set[str]:
    """The families of all signs that were found."""
    return {RULES[name].family for name in by_sign(findings) if name in RULES or name in SIGNS}


def _told_once(found: list[Finding]) -> list[Finding]:
    """`found`, where only the first of `_ONE_EVENT` warns: they all report one event, a loss that rises."""
    warning = {sign_of(f) for f in found if f.severity != "info" and not f.evidence.get("is_certain")}
    first, *others = [name for name in _ONE_EVENT if name in warning] or [""]
    return [
        dataclasses.replace(f, severity="info", evidence={**f.evidence, "told_by": first})
        if sign_of(f) in others
        else f
        for f in found
    ]
