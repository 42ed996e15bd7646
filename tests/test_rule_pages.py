"""Every rule and every cause has its page, and the page says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastguard.diagnosis import CAUSES, RULES, diagnose
from fastguard.history import TrainingHistory

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "rules"
if not PAGES.is_dir():
    pytest.skip("docs/ is not beside the tests: they run from a copy without it", allow_module_level=True)
HEADINGS = ["Symptom", "Evidence", "Cause", "Remedy", "Source"]


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("name", sorted(RULES))
class TestPage:
    def text(self, name):
        return (ROOT / RULES[name].page).read_text(encoding="utf-8")

    def test_has_title_and_headings_in_order_none_of_them_empty(self, name):
        text = self.text(name)
        assert text.startswith(f"# {name}\n") and f"*{RULES[name].severity}*" in text
        sections = re.split(r"^## ", text, flags=re.M)[1:]
        assert [section.partition("\n")[0] for section in sections] == HEADINGS
        assert all(len(section.partition("\n")[2].split()) >= 3 for section in sections)

    def test_names_the_thresholds_with_their_defaults(self, name):
        rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|$", self.text(name), flags=re.M))
        assert rows == {threshold: f"{value:g}" for threshold, value in RULES[name].thresholds.items()}

    def test_repeats_remedy_and_source(self, name):
        text = words(self.text(name))
        assert words(RULES[name].remedy) in text
        assert words(RULES[name].source)[1:] in text  # it begins with a capital there

    def test_is_in_the_index(self, name):
        assert f"| [{name}]({name}.md) | {RULES[name].severity} |" in (PAGES / "README.md").read_text(encoding="utf-8")


def test_there_is_no_page_without_a_rule():
    pages = {path.stem for path in PAGES.glob("*.md")} - {"README", "causes"}
    assert pages == set(RULES)


def test_causes_are_explained():
    text = (PAGES / "causes.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: words(part) for part in re.split(r"^## ", text, flags=re.M)[1:]}
    assert list(sections) == list(CAUSES)
    for name, cause in CAUSES.items():
        assert words(cause.summary) in sections[name] and words(cause.remedy) in sections[name]
        assert all(f"[{rule}]({rule}.md)" in sections[name] for rule in cause.reasons)


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
        assert [f.rule for f in diagnose(history, rules=[RULES["tiny-batches"]])] == ["tiny-batches"]
        assert RULES["tiny-batches"].page == "" and RULES["tiny-batches"].family == "own"
    finally:
        RULES.pop("tiny-batches", None)
