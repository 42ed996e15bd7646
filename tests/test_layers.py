"""Imports go one way: vocabulary <- producers and consumers <- conductor <- door. No arrow runs back."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fastguard

# Every module, by the first part of its name inside the package; one that is not listed fails the test.
LAYERS = {
    "vocabulary": {"_env", "errors", "stats"},
    "producers": {"_C", "activations", "kernels"},
    "consumers": {"diagnosis", "history", "report", "sinks"},
    "conductor": {"guard", "names", "tools", "weights"},
    "door": {"__init__", "__main__", "commands"},
}
MAY_IMPORT = {
    "vocabulary": {"vocabulary"},
    "producers": {"vocabulary", "producers"},
    "consumers": {"vocabulary", "consumers"},
    "conductor": {"vocabulary", "producers", "consumers", "conductor"},
    "door": {"vocabulary", "producers", "consumers", "conductor", "door"},
}
WITHOUT_TORCH = {"vocabulary", "consumers"}  # logs are read, and rules run, on machines without torch
ARRAYS = {"torch", "numpy"}
# A classmethod that people know by this name, and that computes: it looks for the kernels when it is called.
ALLOWED = {("fastguard.stats.table", "fastguard.kernels", "when called")}


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


def imports_of(source: str, module: str, is_package: bool, known: set[str]) -> list[Import]:
    """The imports in `source`, relative ones resolved; of `from x import y`, y counts if it is a module in `known`."""
    found = []
    for node, when in _walk(ast.parse(source).body, "at import"):
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


def layer_of(module: str) -> str | None:
    """The layer of `fastguard.x.y`, or None if `x` is in none."""
    _, first, *_ = [*module.split("."), "__init__"]
    return next((layer for layer, modules in LAYERS.items() if first in modules), None)


def problems(imports: Iterable[Import]) -> list[str]:
    """What is wrong with `imports`: arrows that run back, torch where it must not be, modules without a layer."""
    wrong = []
    for one in imports:
        layer = layer_of(one.module)
        if layer is None:
            wrong.append(f"{one.module} has no layer: enter it in LAYERS of tests/test_layers.py, as DESIGN.md says")
        elif (one.module, one.target, one.when) in ALLOWED:
            continue
        elif one.target.split(".")[0] == "fastguard":
            to = layer_of(one.target)
            if to is None:
                wrong.append(f"{one}, which has no layer: enter it in LAYERS of tests/test_layers.py")
            elif to not in MAY_IMPORT[layer] and one.target != "fastguard":
                wrong.append(f"{one}: {layer} must not import {to}")
            elif one.target == "fastguard" and layer != "door":
                wrong.append(f"{one}: only the door may go through the package's own door")
        elif layer in WITHOUT_TORCH and one.target.split(".")[0] in ARRAYS:
            wrong.append(f"{one}: {layer} must work without it")
    return list(dict.fromkeys(wrong))


def _sources() -> dict[str, Path]:
    """Every module of the installed package, by name. The package may have several folders (an editable install)."""
    found = {}
    for folder in map(Path, fastguard.__path__):
        for path in sorted(folder.rglob("*.py")):
            parts = ("fastguard", *path.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


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
    assert {"fastguard", "fastguard.stats", "fastguard.kernels.cpu", "fastguard.sinks.jsonl"} <= sources.keys()
    arrows = {(one.module, one.target) for one in _all_imports()}
    assert ("fastguard.guard.guard", "fastguard.kernels") in arrows  # `from . import kernels`
    assert ("fastguard.sinks.jsonl", "fastguard.stats") in arrows  # `from ..stats import StepStats`
    assert ("fastguard.kernels.cpu", "fastguard._C") in arrows


def test_every_module_has_a_layer():
    homeless = [module for module in _sources() if layer_of(module) is None]
    assert not homeless, f"no layer for {homeless}: enter them in LAYERS of tests/test_layers.py, as DESIGN.md says"


def test_no_arrow_runs_back():
    wrong = problems(one for one in _all_imports() if one.when != "for type checkers")
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_arrow_runs_back_for_type_checkers():
    wrong = problems(one for one in _all_imports() if one.when == "for type checkers")
    assert not wrong, "\n" + "\n".join(wrong)


FAKES = {
    "a producer that writes logs": ("kernels.fake", "from .. import sinks", "producers must not import consumers"),
    "a rule that computes": ("diagnosis.fake", "from ..kernels.cpu import detail", "must not import producers"),
    "the vocabulary asks the guard": ("stats", "from .guard import Guard", "vocabulary must not import conductor"),
    "inside a function": ("history", "def f():\n    from .guard import Guard", "(when called)"),
    "inside a method's try": (
        "report",
        "class A:\n    def f(self):\n        try:\n            import fastguard.guard\n        except E: pass",
        "line 4 (when called): imports fastguard.guard",
    ),
    "for types only": (
        "errors",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .commands import cli",
        "(for type checkers)",
    ),
    "a consumer with torch": ("sinks.fake", "def f():\n    import torch.nn as nn", "consumers must work without it"),
    "a consumer with numpy": ("report", "from numpy import quantile", "consumers must work without it"),
    "the conductor through the door": ("guard", "import fastguard", "only the door"),
    "a module in no layer": ("fresh", "import math", "fastguard.fresh has no layer"),
    "an import of a module in no layer": ("guard", "from . import fresh", "imports fastguard.fresh, which has no"),
}


@pytest.mark.parametrize(("module", "source", "message"), FAKES.values(), ids=FAKES.keys())
def test_a_fake_is_caught(module, source, message):
    known = {*_sources(), "fastguard._C", "fastguard.fresh"}
    assert message in "\n".join(problems(imports_of(source, f"fastguard.{module}", False, known)))


def test_good_arrows_pass():
    known = {*_sources(), "fastguard._C"}
    good = {
        "kernels.cpu": "import torch\nfrom .. import _C, _env\nfrom ..errors import UnsupportedTensorError",
        "sinks": "from .base import Sink",
        "guard": "import torch\nfrom . import kernels\nfrom .report import build_report",
        "commands": "import fastguard\nfrom . import guard",
    }
    for module, source in good.items():
        assert problems(imports_of(source, f"fastguard.{module}", module == "sinks", known)) == []


def test_relative_imports_resolve():
    known = {"fastguard.a", "fastguard.a.b", "fastguard.c"}

    def target(source: str, module: str, is_package: bool) -> str:
        return imports_of(source, module, is_package, known)[0].target

    assert target("from . import b", "fastguard.a", True) == "fastguard.a.b"
    assert target("from .b import x", "fastguard.a", True) == "fastguard.a.b"
    assert target("from .. import c", "fastguard.a", True) == "fastguard.c"
    assert target("from .. import c", "fastguard.a.b", False) == "fastguard.c"
    assert target("from . import x", "fastguard.a.b", False) == "fastguard.a"
    assert target("from ..c import x", "fastguard.a.b", False) == "fastguard.c"


def test_consumers_work_where_torch_and_numpy_are_not_installed():
    modules = [m for m in _sources() if layer_of(m) in WITHOUT_TORCH]
    code = "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\nimport " + ", ".join(modules)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
