"""The answer of `check_initialization`: a dict by layer, which also prints as a table."""

from __future__ import annotations

from typing import Any

from ..._text import NAME_WIDTH, in_columns, listed, prose, shown

TOO_SMALL, TOO_LARGE = 0.1, 10.0  # times the expected standard deviation
OK, SMALL, LARGE, NOT_FINITE = "ok", "too_small", "too_large", "not_finite"


class AttributeDict(dict[str, Any]):
    """A dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no {name!r} here; there is: {listed(self, 16)}") from None


class InitializationReport(AttributeDict):
    """What was found: an `AttributeDict` for each layer under its name, and the verdict under `all_ok`.

    The name is that of the weight ("0.weight"); the layer's own ("0") and its place (0) find it too.

    | key of a layer | what it is |
    |---|---|
    | `status` | `ok`; `too_small` (below 0.1 × expected); `too_large` (above 10 ×); `not_finite` |
    | `expected_std`, `actual_std`, `ratio` | standard deviations; actual over expected |
    | `kind` | `weight`, `recurrent`, `embedding` |
    | `fan_in`, `rule` | inputs to each output; which rule the expectation comes from, and why |
    | `output_variance`, `variance_ratio` | with a batch: of its output; over the one before it, None for the first |

    Beside the layers stand, as keys and attributes that are not iterated over: `layers` (all of them), `others`
    (biases, norms and the like: `kind`, `status`, `rms`, `expected_rms`), `not_judged` (name -> reason), `followers`
    (where it was learned what follows each layer), and with a batch `variance_ok` (no ratio outside [0.1, 10]).
    `all_ok` is True if all layers and others are ok and none was without values.
    """

    def __init__(
        self,
        layers: dict[str, AttributeDict],
        others: dict[str, AttributeDict],
        not_judged: dict[str, str],
        followers: str,
        all_ok: bool,
        variance_ok: bool | None,
    ) -> None:
        super().__init__(layers)
        self["all_ok"] = all_ok
        self._beside: dict[str, Any]
        beside = {"layers": _Layers(layers), "others": others, "not_judged": not_judged, "followers": followers}
        object.__setattr__(self, "_beside", {**beside, "variance_ok": variance_ok})

    def __missing__(self, key: Any) -> Any:
        if key in self._beside:
            return self._beside[key]
        return self._beside["layers"][key]

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or key in self._beside or key in self._beside["layers"]

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of `key`, or `default`."""
        try:
            return self[key]
        except KeyError:
            return default

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        beside = {k: v for k, v in self._beside.items() if k not in ("layers", "others")}
        tables = {k: {name: dict(e) for name, e in self._beside[k].items()} for k in ("layers", "others")}
        return {"all_ok": self["all_ok"], **tables, **beside}

    def __reduce__(self) -> tuple[Any, ...]:
        b = self._beside
        arguments = (dict(b["layers"]), b["others"], b["not_judged"], b["followers"], self["all_ok"], b["variance_ok"])
        return InitializationReport, arguments

    def __repr__(self) -> str:
        return f"InitializationReport({len(self._beside['layers'])} layers, all_ok={self['all_ok']})"

    def __str__(self) -> str:
        layers, others = self._beside["layers"], self._beside["others"]
        with_batch = self._beside["variance_ok"] is not None
        rows = [_cells(name, e, with_batch) for name, e in layers.items()]
        rows.insert(0, ("layer", "status", *_HEADINGS[: 3 + with_batch], "rule"))
        text = in_columns(rows, left=(0, 1, len(rows[0]) - 1))
        text.insert(1, "-" * max(map(len, text)))
        remarks = {n: f"{e.status}, {e.kind} of rms {e.rms:.3g}" for n, e in others.items() if e.status != OK}
        remarks |= {n: f"not judged, {reason}" for n, reason in self._beside["not_judged"].items()}
        text += [f"{shown(name, NAME_WIDTH)}: {prose(remark)}" for name, remark in remarks.items()]
        bad = sum(e.status != OK for e in (*layers.values(), *others.values()))
        text.append("all ok" if self["all_ok"] else f"not all ok: {bad} of {len(layers) + len(others)} are off")
        return "\n".join(text)


_HEADINGS = ("expected std", "actual std", "ratio", "variance ratio")


def _cells(name: str, e: AttributeDict, with_batch: bool) -> tuple[str, ...]:
    numbers = [f"{e.expected_std:.3e}", f"{e.actual_std:.3e}", f"{e.ratio:.2f}"]
    if with_batch:
        ratio = e.get("variance_ratio")
        numbers.append("-" if ratio is None else f"{ratio:.2f}")
    return (shown(name, NAME_WIDTH), e.status, *numbers, e.rule)


class _Layers(dict[str, AttributeDict]):
    """Layers by the name of their weight; the layer's own name and its place lead there too."""

    def __missing__(self, key: Any) -> AttributeDict:
        if isinstance(key, int) and -len(self) <= key < len(self):
            return list(self.values())[key]
        if isinstance(key, str) and dict.__contains__(self, f"{key}.weight"):
            return self[f"{key}.weight"]
        raise KeyError(f"no layer is named '{shown(key)}'; the layers are: {listed(self, 16)}")

    def __contains__(self, key: object) -> bool:
        if dict.__contains__(self, key) or (isinstance(key, str) and dict.__contains__(self, f"{key}.weight")):
            return True
        return isinstance(key, int) and -len(self) <= key < len(self)
