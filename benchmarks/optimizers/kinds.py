"""`python -m benchmarks.optimizers.kinds`: trains what sits in a model, and writes docs/optimizers.md.

What optimizers of a kind do is taken from results/optimizers.json, which `python -m benchmarks.optimizers` measures.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import machine
from ..readme import Results, markdown, update
from . import models, table
from .suite import RESULTS, ROOT, commit

PAGE = ROOT / "docs" / "optimizers.md"
MODELS = ROOT / "benchmarks" / "results" / "optimizers-models.json"

# Kinds, and which classes are of them: by package, with the names of classes.
KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "torch's own": {"torch": ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "SparseAdam", "LBFGS")},
    "8-bit, 4-bit and float8 state": {
        "torchao": ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8"),
        "bitsandbytes": ("Adam8bit", "AdamW8bit", "Lion8bit", "SGD8bit", "RMSprop8bit"),
    },
    "paged state": {"bitsandbytes": ("PagedAdam", "PagedAdamW", "PagedAdamW8bit", "PagedLion8bit")},
    "schedule-free": {
        "schedulefree": (
            *("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"),
            *("AdamWScheduleFreeClosure", "SGDScheduleFreeClosure", "RAdamScheduleFreeClosure"),
        ),
        "heavyball": ("SFAdamW",),
        "prodigy-plus-schedule-free": ("ProdigyPlusScheduleFree",),
    },
    "Lion": {"lion-pytorch": ("Lion",), "bitsandbytes": ("Lion", "PagedLion"), "timm": ("Lion",)},
    "Muon": {
        "torch": ("Muon",),
        "muon-optimizer": ("Muon", "SingleDeviceMuon", "SingleDeviceMuonWithAuxAdam"),
        "timm": ("Muon",),
        "heavyball": ("Muon",),
    },
    "Adafactor, the rate None too": {
        "torch": ("Adafactor",),
        "transformers": ("Adafactor",),
        "timm": ("Adafactor", "AdafactorBigVision"),
        "torch-optimizer": ("Adafactor",),
    },
    "SOAP, Shampoo, PSGD, Kron": {
        "heavyball": ("SOAP", "KLShampoo", "PSGDKron", "PSGDLRA"),
        "kron-torch": ("Kron",),
        "timm": ("Kron",),
        "torch-optimizer": ("Shampoo",),
    },
    "a low-rank gradient": {"galore-torch": ("AdamW", "Adafactor"), "apollo-torch": ("AdamW",)},
    "a rate that it finds itself": {
        "prodigyopt": ("Prodigy",),
        "dadaptation": ("DAdaptAdam", "DAdaptSGD", "DAdaptLion", "DAdaptAdan"),
    },
    "state in groups, attributes or by no parameter": {
        "torch-optimi": ("Adam", "AdamW", "Adan", "Ranger"),
        "madgrad": ("MADGRAD", "MirrorMADGRAD"),
        "timm": ("Lamb",),
        "pytorch_optimizer": ("SPAM", "StableSPAM", "ASGD"),
    },
    "around another optimizer": {
        "pytorch_optimizer": ("Lookahead", "ScheduleFreeWrapper", "TRAC", "OrthoGrad", "SAM"),
        "timm": ("Lookahead",),
        "torch-optimizer": ("Lookahead",),
    },
}


def chosen(results: Results, kind: str) -> list[tuple[str, dict[str, Any]]]:
    """The classes of a kind that were tried, with their verdicts."""
    packages = [(name, results["packages"][name], names) for name, names in KINDS[kind].items()]
    return [
        (f"{name}'s {table.label(package, verdict)}", verdict)
        for name, package, names in packages
        for verdict in package.get("verdicts", ())
        if verdict["name"] in names
    ]


def _of_all(number: int, total: int) -> str:
    return "all" if number == total else f"{number} of {total}"


def _but(kind: list[tuple[str, dict[str, Any]]]) -> str:
    """What does not hold, in words."""
    found = []
    for name, verdict in kind:
        if "unusable" in verdict:
            found.append(f"{name} does not run on a CPU")
        if "clip_unknown" in verdict:
            found.append(f"torch does not clip what {name} takes")
        found += [f"{name}: {'refused' if what == 'refused' else 'no ' + what}" for what in table.failures(verdict)]
    return "; ".join(found)


def _conditions(results: Results) -> str:
    return table.conditions(results).rpartition("; ")[0] + "."


def _kinds(results: Results) -> list[str]:
    rows = []
    for kind in KINDS:
        tried = chosen(results["optimizers"], kind)
        counts = table.counts(verdict for _, verdict in tried)
        held = [_of_all(counts[what], counts["run"]) if counts["run"] else "-" for what in ("idle", "skip", "clip")]
        rows.append((kind, str(counts["run"]), *held, _but(tried)))
    header = ("kind", "tried", "idle", "skip", "clip", "but")
    return [*markdown(header, rows, 1), "", _conditions(results["optimizers"])]


def _parts(results: Results) -> list[str]:
    rows = []
    for one in results["models"]["cases"]:
        verdict, failures = one["verdict"], table.failures(one["verdict"])
        held = ["no" if {what, "refused"} & failures.keys() or "unusable" in verdict else "yes"
                for what in ("idle", "skip", "clip")]  # fmt: skip
        if "clip_unknown" in verdict:
            held[2] = "torch's takes none such"
        apart = [f"{verdict[name]:.1e}" if name in verdict else "-" for name in ("clip_torch", "clip_torch_ulp")]
        rows.append((one["model"], one["optimizer"], *held, *apart))
    header = ("in the model", "optimizer", "idle", "skip", "clip", "to torch's clip", "torch's to itself")
    return [*markdown(header, rows), "", _conditions(results["models"])]


TABLES: dict[str, Callable[[Results], list[str]]] = {"parts": _parts, "kinds": _kinds}


def saved() -> Results:
    """The results that the page is made of."""
    return {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in (("optimizers", RESULTS), ("models", MODELS))
    }


def measured() -> Results:
    """Trains all cases. Cost: half a minute."""
    logging.getLogger("fastguard").setLevel(logging.ERROR)  # each skips two steps
    described, started = machine.Machine(), time.perf_counter()
    cases = [
        {"model": model, "optimizer": optimizer, "verdict": table.record(verdict)}
        for model, optimizer, verdict in models.verdicts()
    ]
    seconds = round(time.perf_counter() - started, 1)
    return {"conditions": {**described.to_dict(), "commit": commit(), "seconds": seconds}, "cases": cases}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: measures, and writes results and page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers.kinds", description=__doc__)
    parser.add_argument("--page", action="store_true", help="write the page from the results that are there")
    if not parser.parse_args(argv).page:
        MODELS.write_text(json.dumps(measured(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    update(PAGE, saved(), TABLES)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
