"""Every Python that is declared: nothing newer than the oldest is used, and the tests run under each in CI."""

import ast
import re
from pathlib import Path

import pytest

import fastguard

PACKAGE = Path(fastguard.__file__).parent
OLDEST = (3, 10)
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]


def too_new(source):
    """Forms in `source` that the oldest Python does not know, of those that compiling there or mypy would not tell."""
    try:
        tree = ast.parse(source, feature_version=OLDEST)
    except SyntaxError as error:
        yield f"{error.lineno}: {error.msg}"
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
            if len(bases) > 1 and {"NamedTuple", "TypedDict"} & set(bases):
                yield f"{node.lineno}: class {node.name} derives from {' and '.join(bases)}"


def test_no_form_that_the_oldest_python_does_not_know():
    found = [
        f"{path}:{line}" for path in sorted(PACKAGE.rglob("*.py")) for line in too_new(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_what_is_declared_is_what_is_tested():
    pyproject = PACKAGE.parent / "pyproject.toml"
    if not pyproject.is_file():
        pytest.skip("pyproject.toml is not beside the package: it is installed")
    text = pyproject.read_text(encoding="utf-8")
    assert re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text) == PYTHONS
    assert f'requires-python = ">={PYTHONS[0]}"' in text and f'python_version = "{PYTHONS[0]}"' in text
    assert f'target-version = "py{PYTHONS[0].replace(".", "")}"' in text
    workflow = (pyproject.parent / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert set(PYTHONS) == set(re.findall(r'"(3\.\d+)"', workflow))
