"""Fixtures of the tests that read logs."""

import json
import math
import sys
import types

import pytest

from fastguard.commands import cli


@pytest.fixture
def told(tmp_path, capsys):
    """Diagnoses what it is given: exit code, stdout, stderr."""

    def ask(content, *options):
        path = tmp_path / "run.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        capsys.readouterr()
        code = cli.main(["diagnose", str(path), *options])
        return (code, *capsys.readouterr())

    return ask


@pytest.fixture(params=["json", "strict", "orjson"])
def parser(request, monkeypatch):
    """Python's json alone; something as strict as orjson in front of it; orjson itself, where it is installed."""
    if request.param == "json":
        monkeypatch.setitem(sys.modules, "orjson", None)
    elif request.param == "orjson":
        pytest.importorskip("orjson", reason="orjson is not installed: pip install fastguard[logs]")
    else:

        def refuse(name):
            raise ValueError(name)

        def integer(digits):
            return int(digits) if len(digits) < 19 else number(digits)

        def number(digits):
            value = float(digits)
            return value if math.isfinite(value) else refuse(digits)

        def loads(text):
            try:
                whole = json.loads(text, parse_constant=refuse, parse_int=integer, parse_float=number)
            except RecursionError:
                refuse("nested too deeply")
            return refuse("half a surrogate") if b"\\ud8" in text else whole

        monkeypatch.setitem(sys.modules, "orjson", types.SimpleNamespace(loads=loads))
