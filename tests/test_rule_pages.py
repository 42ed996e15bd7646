"""Every rule and every cause has its page, and the page says what the code does. `docs/rules/generate.py` writes it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from fastguard.diagnosis import CAUSES, RULES, diagnose
from fastguard.diagnosis.causes import UNKNOWN
from fastguard.records import TrainingHistory

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "rules"
if not PAGES.is_dir():
    pytest.skip("docs/ is not beside the tests: they run from a copy without it", allow_module_level=True)
_spec = importlib.util.spec_from_file_location("generate", PAGES / "generate.py")
assert _spec is not None and _spec.loader is not None
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)
HEADINGS = ["Symptom", "Evidence", "Cause", "Remedy", "Source"]


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("name", sorted(RULES))
class TestPage:
    def text(self, name):
        path = ROOT / RULES[name].page
        if not path.is_file():
            pytest.fail(f"{RULES[name].page} is not there: run `python docs/rules/generate.py`", pytrace=False)
        return path.read_text(encoding="utf-8")

    def test_has_title_and_headings_in_order_none_of_them_empty(self, name):
        text = self.text(name)
        assert text.startswith(f"# {name}\n") and f"*{RULES[name].severity}*" in text
        sections = re.split(r"^## ", text, flags=re.M)[1:]
        assert [section.partition("\n")[0] for section in sections] == HEADINGS
        assert all(len(section.partition("\n")[2].split()) >= 3 for section in sections)


def test_the_pages_say_what_the_rules_do():
    problems = generate.problems()
    assert not problems, "\n" + "\n".join(problems)


def test_causes_are_explained():
    text = (PAGES / "causes.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: words(part) for part in re.split(r"^## ", text, flags=re.M)[1:]}
    assert list(sections) == [*CAUSES, UNKNOWN]
    for name, cause in CAUSES.items():
        assert words(cause.summary) in sections[name] and words(cause.remedy) in sections[name]
        assert all(f"[{sign}]({RULES[sign].whole}.md)" in sections[name] for sign in cause.reasons)


def test_links_lead_somewhere():
    for page in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert (PAGES / target).is_file(), f"{page.name} links to {target}"


def test_the_rule_of_the_index_works():
    code = re.findall(r"```python\n(.*?)```", (PAGES / "README.md").read_text(encoding="utf-8"), flags=re.S)[0]
    space: dict = {"__name__": "docs"}
    try:
        exec(code, space)
        history = TrainingHistory()
        for step in range(200):
            history.record(step, loss=1.0 + 0.9 * (-1) ** step, grad_norm=1.0 + step % 7, lr=0.1)
        assert [f.rule for f in diagnose(history, rules=[RULES["jumping-loss"]])] == ["jumping-loss"]
        assert RULES["jumping-loss"].page == "" and RULES["jumping-loss"].family == "own"
    finally:
        RULES.pop("jumping-loss", None)
