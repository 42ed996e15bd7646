"""What users build on changes only when somebody means it: `tests/interface.txt` is the interface, in words.

After a change that is meant: `python tests/test_interface.py` writes it anew. The difference belongs into the same
commit, and into CHANGELOG.md.
"""

import contextlib
import dataclasses
import difflib
import importlib
import inspect
import io
import re
import sys
from pathlib import Path

import pytest

import fastguard
from fastguard.commands import cli
from fastguard.sinks import flatten

from records import make_bad_record, make_record

SNAPSHOT = Path(__file__).with_name("interface.txt")
# Beside the names in `fastguard` itself.
MODULES = (
    "fastguard.sinks",
    "fastguard.visualization",
    "fastguard.page",
    "fastguard.diagnosis",
    "fastguard.clip",
)


def _plain(default):
    text = repr(default)
    return "..." if " at 0x" in text or text.startswith("<") else text


def _signature(function):
    """Names, kinds and defaults of the parameters; annotations may be made better without notice."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a built-in class
        return "(...)"
    parts, is_keyword_only = [], False
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_keyword_only = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            parts.append("*")
            is_keyword_only = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={_plain(parameter.default)}"
        parts.append(f"{star}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def _is_ours(value):
    return str(getattr(value, "__module__", "")).partition(".")[0] == "fastguard"


def _members(cls):
    """Public attributes of a class that it or a parent of ours defines, as they stand in the classes."""
    found = {}
    for parent in reversed(cls.__mro__):
        if _is_ours(parent):
            found.update((name, value) for name, value in vars(parent).items() if not name.startswith("_"))
    return found


def _class(name, cls):
    parents = [parent.__name__ for parent in cls.__bases__ if parent is not object]
    is_error = issubclass(cls, Exception)
    yield f"class {name}({', '.join(parents)})" if is_error else f"class {name}{_signature(cls)}"
    if dataclasses.is_dataclass(cls):
        frozen = " (frozen)" if cls.__dataclass_params__.frozen else ""
        yield f"    fields{frozen}: {', '.join(field.name for field in dataclasses.fields(cls))}"
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    for member, value in sorted(_members(cls).items()):
        if member in fields:
            continue
        if isinstance(value, (classmethod, staticmethod)):
            yield f"    {type(value).__name__} {member}{_signature(getattr(cls, member))}"
        elif inspect.isfunction(inspect.unwrap(value) if callable(value) else value):  # C++ stands for some
            yield f"    {member}{_signature(value)}"
        elif not inspect.ismemberdescriptor(value):
            yield f"    {member}"


def _names(module):
    """The public names of one module, and what they take."""
    home = importlib.import_module(module)
    names = home.__all__ if hasattr(home, "__all__") else [name for name in vars(home) if not name.startswith("_")]
    names = [*names, *getattr(home, "_OLDER", ())]
    for name in sorted(names):
        value = getattr(home, name)
        if inspect.isclass(value) and _is_ours(value):
            yield from _class(f"{module}.{name}", value)
        elif callable(value) and _is_ours(value):
            yield f"{module}.{name}{_signature(value)}"
        elif not inspect.ismodule(value) and not name.startswith("__") and module == "fastguard":
            yield f"{module}.{name}"


def _commands():
    """Options of each command."""
    for name in sorted(cli.COMMANDS):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            cli.main([name, "--help"])
        usage = out.getvalue().partition("\n\n")[0]
        yield f"fastguard {name}: {' '.join(sorted(set(re.findall(r'--[a-z-]+', usage))))}"


def _exit_codes():
    for module in ("cli", "diagnose"):
        home = importlib.import_module(f"fastguard.commands.{module}")
        for name, value in sorted(vars(home).items()):
            if name.startswith("EXIT_"):
                yield f"{module}.{name} = {value!r}"


def interface():
    """All of it, as text."""
    keys = {**flatten(make_record(0, 1.0, loss=1.0, val_loss=1.0, lr=0.1)), **flatten(make_bad_record(1, ["b"]))}
    sections = {
        "fastguard.__all__": sorted(fastguard.__all__),
        "Names, what they take, and their defaults": list(_names("fastguard")),
        **{module: list(_names(module)) for module in MODULES},
        "Commands": list(_commands()),
        "Exit codes": list(_exit_codes()),
        "Keys of a line of a log": sorted(re.sub(r"^(grad/\w+)/.*", r"\1/<tensor>", key) for key in keys),
    }
    return "\n".join(f"# {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items())


def test_the_interface_is_what_the_snapshot_says():
    before, now = SNAPSHOT.read_text(encoding="utf-8"), interface()
    changes = difflib.unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="", n=0)
    remedy = "the interface changed; if that is meant: python tests/test_interface.py"
    assert before == now, "\n".join([remedy, *changes])


def test_a_change_would_be_seen(monkeypatch):
    before = interface()
    for name, value in (("wrap", lambda optimizer, model=None: optimizer), ("tensor_stats", None)):
        with monkeypatch.context() as patch:
            patch.setattr(fastguard, name, value)
            assert interface() != before


def test_every_exit_code_is_documented():
    page = Path(__file__).parent.parent / "docs" / "guide" / "diagnosis.md"
    if not page.is_file():
        pytest.skip("docs/ is not beside the tests: they run from a copy without it")
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)}
    codes = {int(code) for line in _exit_codes() for code in re.findall(r"\b(\d+)\b", line.partition("=")[2])}
    assert codes and codes <= told


if __name__ == "__main__":
    SNAPSHOT.write_text(interface(), encoding="utf-8")
    sys.stdout.write(f"wrote {SNAPSHOT}\n")
