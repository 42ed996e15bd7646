"""Texts are wrapped as a person would: no line of a single word in the middle of a paragraph."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

import fastguard

_PIECE = re.compile(r"""\s*[rbfRBF]{0,2}(["'])(?P<text>.*)\1$""")  # a line that is nothing but a part of a string
_STRING = re.compile(r"""\s*[rbfRBF]{0,2}["']""")


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.lineno, first.value.value


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _lonely_in_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Lines of one word that text follows, no code or table or list; and the second line of what should be one."""
    for start, text in _docstrings(source):
        lines = inspect.cleandoc(text).splitlines()
        for number, (before, line, after) in enumerate(zip(["", *lines], lines, lines[1:])):
            is_prose = len(line.split()) == 1 and line[-1] != ":" and line.strip()[0].isalnum()
            goes_on = after and not after.startswith("- ") and _indent(after) >= _indent(line)
            if is_prose and before and goes_on and not any(x.startswith((">>>", "...", "|")) for x in (before, after)):
                yield start + number, line
        first = [*takewhile(bool, lines)]
        if len(first) > 1 and len(first[-1].split()) == 1:
            yield start + len(first) - 1, first[-1]


def _lonely_in_strings(source: str) -> Iterator[tuple[int, str]]:
    """Parts of a string in several lines that hold one word, and another part follows."""
    lines = source.splitlines()
    for number, (line, after) in enumerate(pairwise(lines), 1):
        piece = _PIECE.fullmatch(line)
        if piece and _STRING.match(after) and len(piece["text"].split()) == 1 and piece["text"].endswith(" "):
            yield number, piece["text"]


def lonely(source: str) -> list[tuple[int, str]]:
    """Line numbers and words of what stands alone in a line in the middle of `source`'s texts."""
    return sorted([*_lonely_in_docstrings(source), *_lonely_in_strings(source)])


def test_no_line_of_one_word():
    found = []
    for folder in map(Path, fastguard.__path__):
        for path in sorted(folder.rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            found += [f"{path}:{line}: {word!r}" for line, word in lonely(source)]
    assert not found, "a word alone in its line; wrap the paragraph anew\n" + "\n".join(found)


BROKEN = {
    "a docstring": ('"""What it is.\n\nThe share by which a step shrinks, learning\nrate\nincluded.\n"""', 4),
    "that ends a sentence": ('"""What.\n\nIt does this and goes\non.\nAnd then more."""', 4),
    "of an argument": ('"""What.\n\nArgs:\n    decay: the share, learning\n    rate\n        included."""', 5),
    "of a method": ('class A:\n    def f(self):\n        """Takes all that is\n        small\n        enough."""', 4),
    "of one line and a word": ('def f():\n    """Says in a line what it is\n    for."""', 3),
    "a message": ('f(\n    "give it a lower "\n    "learning "\n    "rate.",\n)', 3),
    "an f-string": ('f(\n    f"it "\n    f"looks "\n    "as if",\n)', 2),
}
FINE = {
    "the last word of a paragraph": '"""One line.\n\nThe rest of\nit.\n"""',
    "a list": '"""What there is.\n\nArgs:\n    names: of all parameters\n    more: things\n"""',
    "what a doctest prints": '"""A.\n\n>>> print(1)\n1\n>>> print(2)\n2\n"""',
    "items of a list": '"""What there is.\n\n- one that ends in a\n  word.\n- another\n"""',
    "a word of its own": 'f(\n    "one",\n    "two",\n)',
    "a last part": 'f(\n    "several words and "\n    "one"\n)',
}


@pytest.mark.parametrize(("source", "line"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_text_is_found(source, line):
    assert line in [number for number, _ in lonely(source)]


@pytest.mark.parametrize("source", FINE.values(), ids=FINE.keys())
def test_a_good_text_is_left_alone(source):
    assert lonely(source) == []
