"""Every Python that is declared: nothing newer than the oldest is used, and each one found here imports all modules.

The other Pythons of a machine rarely have torch. There a stand-in takes its place, so that every line at module level
runs.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastguard

PACKAGE = Path(fastguard.__file__).parent
OLDEST = (3, 10)
PYTHONS = ["3.10", "3.11", "3.12", "3.13", "3.14"]

EVERY_MODULE = """
import importlib.abc, importlib.machinery, sys, types
from pathlib import Path

STOOD_IN_FOR = "torch triton numpy matplotlib tqdm transformers lightning ignite skorch fastai".split()

class Anything(type):  # a class, a function, a decorator, a value: whatever a module wants to hold
    __code__ = None

    def __call__(cls, *args, **kwargs):
        return anything(cls.__name__)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, anything(name))
        return cls.__dict__[name]

    def __or__(cls, other):
        return cls

    def __getitem__(cls, key):
        return cls

def anything(name):
    return type.__call__(Anything, name, (), {})

class Package(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, anything(name))
        return self.__dict__[name]

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in STOOD_IN_FOR:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Package(spec.name)

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Finder())
sys.modules["fastguard._C"] = None  # it wants the real torch
package = Path(sys.argv[1])
for path in sorted(package.rglob("*.py")):
    name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
    importlib.import_module(name)
    print(name)
"""


def too_new(source: str) -> Iterator[str]:
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


@functools.cache
def interpreter(version: str) -> str | None:
    """The Python of this version: the one that runs the tests, one on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [
        sys.executable,
        shutil.which(f"python{version}"),
        *map(str, pyenv.glob(f"versions/{version}.*/bin/python")),
    ]
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, found):
        done = subprocess.run([path, "-c", ask], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    return None


def run(version: str, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = interpreter(version)
    if path is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [path, "-W", "error", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
class TestPython:
    def test_imports_every_module(self, version):
        done = run(version, EVERY_MODULE, PACKAGE)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == len(list(PACKAGE.rglob("*.py")))
