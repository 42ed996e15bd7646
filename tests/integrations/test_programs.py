"""Every program on docs/frameworks.md runs as it stands, in a folder of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent.parent / "docs" / "frameworks.md"
if not PATH.is_file():
    pytest.skip("docs/ is not beside the tests: they run from a copy", allow_module_level=True)
pytestmark = pytest.mark.slow

PROGRAMS = dict(re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)^```$", PATH.read_text(), re.MULTILINE | re.DOTALL))
NEEDS = {
    "Transformers, TRL, PEFT": "transformers",
    "Lightning": "lightning",
    "Fabric": "lightning",
    "accelerate": "accelerate",
    "ignite": "ignite",
    "skorch": "skorch",
    "fastai": "fastai",
}


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_framework_has_its_program():
    assert PROGRAMS.keys() == NEEDS.keys()


@pytest.mark.parametrize("title", NEEDS)
def test_the_program_runs(title, capsys):
    pytest.importorskip(NEEDS[title], reason=f"{NEEDS[title]} is not installed")
    exec(compile(PROGRAMS[title], f"{PATH}: {title}", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    steps = {"Lightning": 16, "skorch": 14, "accelerate": 10, "fastai": 16, "Transformers, TRL, PEFT": 40}.get(
        title, 20
    )
    assert f"after {steps} steps" in printed
    assert re.search(r"^loss +last \d", printed, re.MULTILINE)
