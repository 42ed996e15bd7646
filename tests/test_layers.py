"""Imports go one way, from what users call to what knows nobody. No arrow runs back, and none runs in a circle."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fastguard

# Every room, by the first part of a module's name inside the package, with the rooms that it may import from; one that
# is not listed fails the test. A room may always import from itself.
VOCABULARY = {"_text", "errors", "_env", "records"}
ABOVE_KERNELS = {*VOCABULARY, "_device", "kernels"}
READERS = {"diagnosis", "report", "sinks"}
OBSERVERS = {*ABOVE_KERNELS, "names"}
RANKS = {*ABOVE_KERNELS, "observers"}
MAY_IMPORT = {
    "_text": set(),
    "errors": {"_text"},
    "_env": set(),
    "_device": {"_env"},
    "_C": set(),
    "names": {"errors"},
    "records": {"_text", "errors", "_env", "_C"},
    "kernels": {*VOCABULARY, "_device", "_C"},
    "observers": OBSERVERS,
    "clip": ABOVE_KERNELS,
    "ranks": RANKS,
    "recovery": {*RANKS, "ranks", "clip", "diagnosis"},
    "diagnosis": VOCABULARY,
    "report": {*VOCABULARY, "diagnosis", "visualization"},
    "visualization": VOCABULARY,
    "page": {*VOCABULARY, "diagnosis", "report", "visualization"},
    "sinks": VOCABULARY,
    "step": {*OBSERVERS, *READERS, "clip", "observers", "ranks", "recovery"},
    "experiments": {*ABOVE_KERNELS, "clip", "diagnosis", "observers", "recovery", "step"},
    "integrations": {*VOCABULARY, "clip", "step"},
    "tools": {*OBSERVERS, *READERS, "experiments", "observers", "ranks", "recovery", "step"},
    "commands": {*OBSERVERS, *READERS, "_C", "experiments", "page", "step", "tools", "visualization", "__init__"},
    "__main__": {"commands"},
}
# Imports made when they are called: GradientStats.from_gradients needs a kernel, and `wrap` begins experiments.
ALLOWED = {
    ("fastguard.records.table", "fastguard.kernels"),
    ("fastguard.step.wrapping", "fastguard.experiments.beside"),
}
DOOR = "__init__"  # may import from everywhere
WITHOUT_TORCH = {
    *VOCABULARY,
    *READERS,
    "visualization",
    "page",
}  # logs are read, and rules run, on machines without torch
ARRAYS = {"torch", "numpy"}


class Import(NamedTuple):
    """One import: who, in which line, when ("at import", "when called", "for type checkers"), and of what."""

    module: str
    line: int
    when: str
    target: str

    def __str__(self) -> str:
        return f"{self.module}, line {self.line} ({self.when}): imports {self.target}"


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _walk(nodes: Iterable[ast.AST], when: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, when
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from _walk(node.body, "for type checkers")
            yield from _walk(node.orelse, when)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _walk(ast.iter_child_nodes(node), when if when == "for type checkers" else "when called")
        else:
            yield from _walk(ast.iter_child_nodes(node), when)


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imports_of(source: str, module: str, is_package: bool, known: set[str]) -> list[Import]:
    """The imports in `source`, relative ones resolved; of `from x import y`, y counts if it is a module in `known`."""
    found = []
    for node, when in _walk(parsed(source).body, "at import"):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            base = node.module or ""
            if node.level:
                above = module.split(".")[: None if is_package and node.level == 1 else (is_package - node.level)]
                base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
        found += [Import(module, node.lineno, when, target) for target in dict.fromkeys(targets)]
    return found


def room_of(module: str) -> str:
    """The room of `fastguard.x.y`, which is `x`; `__init__` for the package itself."""
    return [*module.split("."), "__init__"][1]


def problems(imports: Iterable[Import]) -> list[str]:
    """What is wrong with `imports`: arrows that run back, torch where it must not be, modules without a room."""
    wrong = []
    for one in imports:
        room = room_of(one.module)
        if room == DOOR:
            continue
        if one.when == "for type checkers" and one.module != "fastguard.tools":  # whose names are lazy, too
            wrong.append(f"{one}: only the door may import for type checkers; hand data down instead")
        if room not in MAY_IMPORT:
            wrong.append(f"{one.module} has no room: enter it in MAY_IMPORT of tests/test_layers.py, where it belongs")
        elif one.target.split(".")[0] == "fastguard":
            to = room_of(one.target)
            if to == DOOR and DOOR not in MAY_IMPORT[room]:
                wrong.append(f"{one}: only commands may go through the package's own door")
            elif to not in MAY_IMPORT and to != DOOR:
                wrong.append(f"{one}, which has no room: enter it in MAY_IMPORT of tests/test_layers.py")
            elif to != room and to not in MAY_IMPORT[room] and (one.module, one.target) not in ALLOWED:
                wrong.append(f"{one}: {room} must not import {to}")
        elif room in WITHOUT_TORCH and one.target.split(".")[0] in ARRAYS:
            wrong.append(f"{one}: {room} must work without it")
    return list(dict.fromkeys(wrong))


@functools.cache
def _sources() -> dict[str, Path]:
    """Every module of the installed package, by name. The package may have several folders (an editable install)."""
    found = {}
    for folder in map(Path, fastguard.__path__):
        for path in sorted(folder.rglob("*.py")):
            parts = ("fastguard", *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def _all_imports() -> list[Import]:
    sources = _sources()
    known = {*sources, "fastguard._C"}
    return [
        one
        for module, path in sources.items()
        for one in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py", known)
    ]


def test_the_whole_package_is_walked():
    sources = _sources()
    assert {"fastguard", "fastguard.records", "fastguard.kernels.cpu", "fastguard.sinks.jsonl"} <= sources.keys()
    arrows = {(one.module, one.target) for one in _all_imports()}
    assert ("fastguard.step.settings", "fastguard.kernels") in arrows  # `from . import kernels`
    assert ("fastguard.sinks.jsonl", "fastguard.records") in arrows  # `from ..records import StepStats`
    assert ("fastguard.kernels.cpu", "fastguard._C") in arrows


def test_every_module_has_a_room():
    homeless = [module for module in _sources() if room_of(module) not in {*MAY_IMPORT, DOOR}]
    assert not homeless, f"no room for {homeless}: enter them in MAY_IMPORT of tests/test_layers.py"


def test_the_root_has_few_loose_files():
    loose = {module for module in _sources() if module.count(".") == 1 and _sources()[module].name != "__init__.py"}
    assert loose == {f"fastguard.{name}" for name in ("__main__", "_device", "_env", "_text", "errors", "names")}


def test_no_arrow_runs_back():
    wrong = problems(_all_imports())
    assert not wrong, "\n" + "\n".join(wrong)


def _circles(arrows: Iterable[tuple[str, str]]) -> list[set[str]]:
    """Groups of modules each of which imports all others of it, directly or not."""
    follows: dict[str, set[str]] = {}
    for one, other in arrows:
        follows.setdefault(one, set()).add(other)

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for other in follows.get(waiting.pop(), set()) - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    reached = {module: reach(module) for module in follows}
    circles = [{other for other in seen if module in reached.get(other, ())} for module, seen in reached.items()]
    return [circle for circle in circles if circle]


def test_there_is_no_circle():
    arrows = [(one.module, one.target) for one in _all_imports() if room_of(one.module) != DOOR]
    arrows = [arrow for arrow in arrows if arrow not in ALLOWED]
    packages = {module for module, path in _sources().items() if path.name == "__init__.py"}
    # A package's own parts may import one another through no `__init__`; those who do would be seen here.
    arrows = [(a, b) for a, b in arrows if b.startswith("fastguard") and not (b in packages and a.startswith(b + "."))]
    assert not _circles(arrows)
    assert _circles([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])[0] == {"a", "b", "c"}


def test_nobody_uses_what_is_private_to_another_module():
    """`x._y` of a module `x` that is not one's own; torch's are torch's."""
    wrong = []
    for module, path in _sources().items():
        tree = parsed(path.read_text(encoding="utf-8"))
        ours = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fastguard")):
                ours |= {alias.asname or alias.name for alias in node.names}
                wrong += [
                    f"{module}, line {node.lineno}: {alias.name}"
                    for alias in node.names
                    if alias.name.startswith("_") and alias.name not in ("_C", "_env", "_device", "__version__")
                ]
        for node in ast.walk(tree):
            is_private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
            if is_private and isinstance(node.value, ast.Name) and node.value.id in ours - {"_C"}:
                wrong.append(f"{module}, line {node.lineno}: {node.value.id}.{node.attr}")
    assert not wrong, "\n" + "\n".join(wrong)


FAKES = {
    "a kernel that writes logs": ("kernels.fake", "from .. import sinks", "kernels must not import sinks"),
    "a rule that computes": ("diagnosis.fake", "from ..kernels.cpu import detail", "must not import kernels"),
    "the vocabulary asks the step": ("records.fake", "from ..step import Guard", "records must not import step"),
    "inside a function": ("records.fake", "def f():\n    from ..step import Guard", "(when called)"),
    "inside a method's try": (
        "report.fake",
        "class A:\n    def f(self):\n        try:\n            import fastguard.step\n        except E: pass",
        "line 4 (when called): imports fastguard.step",
    ),
    "for types only": (
        "step.run",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..clip import ClipPolicy",
        "only the door may import for type checkers",
    ),
    "a clip policy asks the step": ("clip.fake", "from ..step.run import Run", "clip must not import step"),
    "a consumer with torch": ("sinks.fake", "def f():\n    import torch.nn as nn", "sinks must work without it"),
    "a consumer with numpy": ("report.fake", "from numpy import quantile", "report must work without it"),
    "the step through the door": ("step.fake", "import fastguard", "only commands may go through"),
    "a module in no room": ("fresh", "import math", "fastguard.fresh has no room"),
    "an import of a module in no room": ("step.fake", "from .. import fresh", "imports fastguard.fresh, which has no"),
}


@pytest.mark.parametrize(("module", "source", "message"), FAKES.values(), ids=FAKES.keys())
def test_a_fake_is_caught(module, source, message):
    known = {*_sources(), "fastguard._C", "fastguard.fresh"}
    assert message in "\n".join(problems(imports_of(source, f"fastguard.{module}", False, known)))


def test_consumers_work_where_torch_and_numpy_are_not_installed():
    modules = [m for m in _sources() if room_of(m) in WITHOUT_TORCH]
    code = "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\nimport " + ", ".join(modules)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
