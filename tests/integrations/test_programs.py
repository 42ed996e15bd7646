"""Every program on docs/frameworks.md runs as it stands, in a folder of its own."""

import re
from pathlib import Path

import pytest

PATH = Path(__file__).parent.parent.parent / "docs" / "frameworks.md"
if not PATH.is_file():
    pytest.skip("docs/ is not beside the tests: they run from a copy", allow_module_level=True)
pytestmark = pytest.mark.slow

PROGRAMS = dict(re.findall(r"^## ([^\n]+)\n\n```python\n(.*?)^```$", PATH.read_text(), re.MULTILINE | re.DOTALL))
_NAMES = "Transformers, TRL, PEFT", "Lightning", "Fabric", "accelerate", "ignite", "skorch", "fastai"
STEPS = dict(zip(_NAMES, (40, 16, 20, 10, 20, 14, 16)))


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_framework_has_its_program():
    assert PROGRAMS.keys() == STEPS.keys()


@pytest.mark.parametrize("title", STEPS)
def test_the_program_ends_healthy(title, capsys, caplog):
    package = {"Transformers, TRL, PEFT": "transformers", "Fabric": "lightning"}.get(title, title.lower())
    pytest.importorskip(package, reason=f"{package} is not installed")
    names = {"__name__": "__main__"}
    exec(compile(PROGRAMS[title], f"{PATH}: {title}", "exec"), names)
    printed = capsys.readouterr().out
    assert re.search(f"^HEALTHY after {STEPS[title]} steps", printed, re.MULTILINE)
    assert re.search(r"^loss +last \d", printed, re.MULTILINE)
    said = re.search(r"print\((.*)\.report\(\)\)", PROGRAMS[title])
    assert said is not None and eval(said[1], names).history.has_ended
    assert not [r for r in caplog.records if r.name == "fastguard" and r.levelname in ("WARNING", "ERROR")]
