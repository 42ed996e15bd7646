"""Training programs from public repositories, and faults planted in them: `programs.toml` and `faults.toml`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

import tomllib

HERE = Path(__file__).parent
_PROGRAMS = tomllib.loads((HERE / "programs.toml").read_text(encoding="utf-8"))
_FAULTS = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))
MODULES: dict[str, str] = _PROGRAMS["modules"]
FAMILIES: dict[str, list[str]] = _FAULTS["families"]


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
    """

    source: str
    commit: str
    script: str
    patches: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    fault: str = ""
    causes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        script = self.script.removeprefix("-m ").split()[0]
        return "/".join(part for part in (self.source.partition("/")[2], self.folder, script) if part)

    @property
    def half(self) -> str:
        """ "tune" or "counted": what was only counted until 2026-11-26, since when rules are mended for both."""
        return "counted" if int(hashlib.sha256(self.source.encode()).hexdigest(), 16) % 2 else "tune"


PROGRAMS = [Program(**given) for given in _PROGRAMS["program"]]
_BY_NAME = {program.name: program for program in PROGRAMS}
FAULTS = [
    replace(_BY_NAME[one["program"]], fault=one["fault"], causes=tuple(one["causes"]),
            patches={**_BY_NAME[one["program"]].patches, **one["texts"]})
    for one in _FAULTS["fault"]
]  # fmt: skip
