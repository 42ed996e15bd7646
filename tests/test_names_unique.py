"""One name, one thing: no two classes of the package are called the same, but the callbacks of frameworks."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import fastguard

# Who imports one of them imports its framework; nobody has two.
OF_EACH_FRAMEWORK = {"FastguardCallback"}


def twice(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Names of top-level classes that stand in several modules, or twice in one, with the places."""
    places = defaultdict(list)
    for where, source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{where}:{node.lineno}")
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_classes_have_one_name():
    folders = map(Path, fastguard.__path__)
    found = twice((str(path), path.read_text(encoding="utf-8")) for folder in folders for path in folder.rglob("*.py"))
    assert all("/integrations/" in place for name in OF_EACH_FRAMEWORK for place in found.get(name, ()))
    wrong = [f"{name}: {', '.join(places)}" for name, places in found.items() if name not in OF_EACH_FRAMEWORK]
    assert not wrong, "one name, one thing; rename all but one of\n" + "\n".join(wrong)


def test_a_second_one_is_found():
    sources = [("a.py", "class A: pass\nclass B: pass"), ("b.py", "def f():\n    class B: pass\nclass A(int): pass")]
    assert twice(sources) == {"A": ["a.py:1", "b.py:3"]}
