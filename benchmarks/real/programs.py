"""Training programs from public repositories, and faults planted in them: `programs.toml` and `faults.toml`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomllib

SETS = ("", "fresh", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True)
class Program:
    """One program, as it was published or with a fault.

    Attributes:
        source: the repository on GitHub.
        commit: which of its commits.
        script: the file, or `-m` and the module, with its arguments.
        patches: texts that are replaced in the script, such as its number of epochs; `file::text` in a file beside it.
        folder: where it is started; "" for the repository.
        fault: what is wrong with it; "" if nothing is.
        causes: the causes that count as right for `fault`.
        blind: of the set that was kept for one asking.
    """

    source: str
    commit: str
    script: str
    patches: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    fault: str = ""
    causes: tuple[str, ...] = ()
    blind: bool = False

    @property
    def name(self) -> str:
        script = self.script.removeprefix("-m ").split()[0]
        return "/".join(part for part in (self.source.partition("/")[2], self.folder, script) if part)

    @property
    def half(self) -> str:
        """ "tune" or "counted": rules were changed for "counted" only after both had been asked twice, and never for a
        blind set."""
        return "counted" if self.blind or int(hashlib.sha256(self.source.encode()).hexdigest(), 16) % 2 else "tune"


def read(which: str = "") -> tuple[list[Program], list[Program], dict[str, str]]:
    """The programs of a set, one of `SETS`, the same with faults, and the stand-ins for modules."""
    given = _read(which, "programs")
    programs = [Program(**one, blind=bool(which)) for one in given["program"]]
    by_name = {program.name: program for program in programs}
    faults = [
        replace(by_name[one["program"]], fault=one["fault"], causes=tuple(one["causes"]),
                patches={**by_name[one["program"]].patches, **one["texts"]})
        for one in _read(which, "faults")["fault"]
    ]  # fmt: skip
    return programs, faults, (read(SETS[SETS.index(which) - 1])[2] if which in SETS[3:] else {}) | given["modules"]


def _read(which: str, what: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / f"{which}_{what}.toml".removeprefix("_")).read_text(encoding="utf-8"))


FAMILIES: dict[str, list[str]] = _read("", "faults")["families"]
