"""README.md and the pages of docs/ do not lie: their Python runs, what they show is printed, rules have their pages."""

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import fastguard
from fastguard.commands import cli
from fastguard.diagnosis import CAUSES, RULES, diagnose
from fastguard.diagnosis.causes import UNKNOWN
from fastguard.records import TrainingHistory

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
if not README.is_file() or not (ROOT / "docs").is_dir():
    pytest.skip("README.md and docs/ are not beside the tests: they run from a copy", allow_module_level=True)

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """What stands between two fences."""

    kind: str
    body: str
    line: int


class Page:
    """A document of ours, and the blocks in it."""

    def __init__(self, path):
        self.path = path
        self.name = str(path.relative_to(ROOT))
        self.text = path.read_text(encoding="utf-8")
        self.blocks = [
            Block(match[1], match[2], self.text[: match.start()].count("\n") + 2)
            for match in _BLOCK.finditer(self.text)
        ]

    def snippets(self):
        """Its Python."""
        return [block for block in self.blocks if block.kind in ("python", "diff")]

    def shown(self, part):
        """The text block that holds `part`."""
        return next(block.body for block in self.blocks if block.kind == "text" and part in block.body)

    def anchors(self):
        """What `#...` can point to in it."""
        titles = re.findall(r"^#+ (.*)$", _BLOCK.sub("", self.text), re.MULTILINE)
        return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}

    def links(self):
        """What it links to within the repository."""
        return sorted(set(re.findall(r"\]\((?!https?:)([^)\s]+)\)", _BLOCK.sub("", self.text))))


# The rules' pages and the benchmarks' have tests of their own; what they link to is looked at here.
PAGES = {page.name: page for page in map(Page, [README, *sorted((ROOT / "docs").rglob("*.md"))])}
OURS = [page for page in PAGES.values() if "docs/rules/" not in page.name]

# What the reader has already: a model, its data and a loss.
SETUP = """
import torch
import fastguard

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
loader = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(20)]
loss_fn = torch.nn.functional.mse_loss
x, y = loader[0]
"""


def _python(kind, body):
    """The code of a block; of a diff, what it looks like once applied."""
    if kind != "diff":
        return body
    return "".join(line[2:] or "\n" for line in body.splitlines(keepends=True) if not line.startswith("-"))


# The programs of frameworks.md need the frameworks: tests/integrations/test_programs.py.
RUN_HERE = [page for page in OURS if page.snippets() and page.name != "docs/frameworks.md"]


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_every_snippet_runs_in_order(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(SETUP, namespace)
    for kind, body, line in page.snippets():
        # Empty lines before it make a traceback point at the line of the page.
        exec(compile("\n" * (line - 1) + _python(kind, body), str(page.path), "exec"), namespace)
    if page.path == README:
        assert "HEALTHY after" in capsys.readouterr().out


def test_every_command_shown_exists():
    shells = "\n".join(block.body for page in OURS for block in page.blocks if block.kind == "sh")
    commands = set(re.findall(r"`?fastguard ([a-z]+)\b(?: |`|$)", shells, re.MULTILINE))
    assert len(commands) >= 4 and commands <= set(cli.COMMANDS)


def test_every_target_of_make_that_is_named_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for page in OURS for name in re.findall(r"(?:`|^)make ([a-z-]+)", page.text, re.MULTILINE)}
    assert len(named) >= 3 and named <= targets


@pytest.mark.parametrize("page", OURS, ids=lambda page: page.name)
def test_every_public_name_in_the_text_exists(page):
    for name in re.findall(r"`fastguard\.([A-Za-z_]+)", page.text):
        assert name in (*fastguard.__all__, *fastguard._MORE_MODULES, "_C"), name


@pytest.mark.parametrize("page", PAGES.values(), ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    broken = []
    for link in page.links():
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        known = PAGES.get(str(path.relative_to(ROOT.resolve()))) if path.suffix == ".md" else None
        if not path.exists() or (anchor and known is not None and anchor not in known.anchors()):
            broken.append(link)
    assert not broken


def test_the_documents_show_the_saved_results():
    readme = pytest.importorskip("benchmarks.reliability.readme", reason="no benchmarks/ here", exc_type=ImportError)
    assert readme.main(["--check"]) == 0, "run `python -m benchmarks.reliability.readme`"


RULE_PAGES = ROOT / "docs" / "rules"
_spec = importlib.util.spec_from_file_location("generate", RULE_PAGES / "generate.py")
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
    text = (RULE_PAGES / "causes.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: words(part) for part in re.split(r"^## ", text, flags=re.M)[1:]}
    assert list(sections) == [*CAUSES, UNKNOWN]
    for name, cause in CAUSES.items():
        assert words(cause.summary) in sections[name] and words(cause.remedy) in sections[name]
        assert all(f"[{sign}]({RULES[sign].whole}.md)" in sections[name] for sign in cause.reasons)


def test_the_rule_of_the_index_works():
    code = re.findall(r"```python\n(.*?)```", (RULE_PAGES / "README.md").read_text(encoding="utf-8"), flags=re.S)[0]
    space = {"__name__": "docs"}
    try:
        exec(code, space)
        history = TrainingHistory()
        for step in range(200):
            history.record(step, loss=1.0 + 0.9 * (-1) ** step, grad_norm=1.0 + step % 7, lr=0.1)
        assert [f.rule for f in diagnose(history, rules=[RULES["jumping-loss"]])] == ["jumping-loss"]
        assert RULES["jumping-loss"].page == "" and RULES["jumping-loss"].family == "own"
    finally:
        RULES.pop("jumping-loss", None)
