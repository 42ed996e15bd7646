"""Writes what the pages of this folder say of the rules from the rules themselves: `python docs/rules/generate.py`.

Of a page, "Symptom" and "Cause" are written by hand and kept; the rest is the rule's: family, severity, thresholds,
docstring, remedy and source. A rule without a page gets one, with these two to fill in. The index in `README.md` takes
the first sentence of each "Symptom". `causes.md` has a section for each cause between an introduction and "unknown",
which are kept. With `--check` nothing is written, and the exit code is 1 if something would be, or is left to fill in.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the rules beside these pages, whatever is installed

from fastguard.diagnosis import CAUSES, RULES, Cause, Rule  # noqa: E402
from fastguard.diagnosis.registry import SIGNS  # noqa: E402
from fastguard.tools.preflight import CHECKS  # noqa: E402

BY_HAND = ("Symptom", "Cause")
FILL_IN = {
    "Symptom": "FILL IN: what a user sees, in a sentence or two; the first goes into the index.",
    "Cause": "FILL IN: what is at work where a run looks like this.",
}
REMARK = "; a remark (*info*) where nothing is [the worse for it](README.md#what-is-told)"
BEGIN, END = "<!-- rules:begin (written by generate.py) -->", "<!-- rules:end -->"


def ours() -> list[Rule]:
    """What has a page: fastguard's own rules, and the checks of `preflight`."""
    return [*(rule for rule in RULES.values() if rule.page), *CHECKS.values()]


def title_of(rule: Rule) -> str:
    """What the pages call the rule's family: `TITLE` of its file."""
    module = sys.modules[rule.check.__module__]
    if not hasattr(module, "TITLE"):
        raise SystemExit(f'{module.__file__} must have a line like `TITLE = "Gradients too large"`: the family\'s name')
    return f"Before the first step: {module.TITLE}" if rule.stage == "before" else str(module.TITLE)


def filled(text: str) -> str:
    """`text` in lines of a page's width."""
    return textwrap.fill(text, 118, break_on_hyphens=False, break_long_words=False)


def sections(text: str) -> dict[str, str]:
    """The sections of a page by their headings."""
    parts = re.split(r"^## ", text, flags=re.M)[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in parts}


def of_each(rule: Rule, what: Callable[[Rule], str]) -> str:
    """What is said of each sign of a rule, under its name if there are several; what is the same is said once."""
    texts: dict[str, list[str]] = {}
    for one in rule.signs:
        texts.setdefault(what(one), []).append(f"`{one.name}`")
    if len(texts) == 1:
        return next(iter(texts))
    return "\n\n".join(f"### {', '.join(names)}\n\n{text}" for text, names in texts.items())


def evidence(rule: Rule) -> str:
    """When a sign of a rule fires, and its thresholds."""
    paragraphs = (inspect.getdoc(rule.check) or "").split("\n\n")
    blocks = [*map(filled, paragraphs)]
    if rule.thresholds:
        rows = [f"| `{name}` | {value:g} |" for name, value in rule.thresholds.items()]
        blocks.append("\n".join(["| threshold | default |", "|---|---|", *rows]))
        first = next(iter(rule.thresholds))
        if rule.stage == "before":
            blocks.append(f'Another one: `fastguard.preflight(..., thresholds={{"{rule.name}": {{"{first}": ...}}}})`.')
    if rule.stage == "before" and rule.cause:
        blocks.append(f"Asked by [preflight](../guide/preflight.md); speaks for the cause `{rule.cause[0]}`.")
    elif rule.thresholds:
        blocks.append(
            f'Another one: `diagnose(history, thresholds={{"{rule.name}": {{"{first}": ...}}}})`, or\n'
            f"`fastguard diagnose RUN.jsonl --set {rule.name}.{first}=...`."
        )
    return "\n\n".join(blocks)


def source(rule: Rule) -> str:
    """Where definition and thresholds come from; a sign that does not say is ours."""
    text = rule.source or "definition and limits are our own"
    return filled(text[:1].upper() + text[1:] + ".")


def page(rule: Rule, text: str) -> str:
    """The page of `rule`, with what was written by hand in `text`, which it had so far."""
    old = sections(text)
    new = {
        "Symptom": old.get("Symptom", FILL_IN["Symptom"]),
        "Evidence": of_each(rule, evidence),
        "Cause": old.get("Cause", FILL_IN["Cause"]),
        "Remedy": of_each(rule, lambda one: filled(one.remedy)),
        "Source": of_each(rule, source),
    }
    is_doubtful = all(one.needs_harm for one in rule.signs)
    head = f"# {rule.name}\n\n{title_of(rule)} · at most *{rule.severity}*{REMARK if is_doubtful else ''}\n"
    return "\n".join([head, *(f"## {heading}\n\n{body}\n" for heading, body in new.items())])


def index(pages: dict[str, str]) -> str:
    """Tables of all rules by family, preflight's last: the one with most critical rules first, else by the alphabet."""
    families: dict[str, list[Rule]] = {}
    for rule in ours():
        families.setdefault(title_of(rule), []).append(rule)
    blocks = []

    def place(family: tuple[str, list[Rule]]) -> tuple[bool, int, str]:
        is_early = family[1][0].stage == "before"
        return is_early, -sum(rule.severity == "critical" for rule in family[1]), family[0]

    for title, rules in sorted(families.items(), key=place):
        rows = [f"## {title}\n", "| rule | at most | symptom |", "|---|---|---|"]
        for rule in rules:
            symptom = " ".join(sections(pages[rule.name])["Symptom"].split())
            first = re.split(r"\.(?: |$)", symptom)[0]
            rows.append(f"| [{rule.name}]({rule.name}.md) | {rule.severity} | {first} |")
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks)


def lowered(sentence: str) -> str:
    """`sentence` as a part of one."""
    return sentence[:1].lower() + sentence[1:].rstrip(".")


def linked(names: Iterable[str]) -> str:
    """Links to the pages of the rules `names`."""
    return ", ".join(f"[{name}]({SIGNS[name].whole if name in SIGNS else name}.md)" for name in names) + "."


def of_cause(cause: Cause) -> str:
    """The section of a cause."""
    parts = [cause.summary, f"What to do: {cause.remedy}", f"Speaks for it: {linked(cause.reasons)}"]
    if cause.explains - cause.reasons.keys():
        parts.append(f"Explains as well: {linked(sorted(cause.explains - cause.reasons.keys()))}")
    needed = [lowered((inspect.getdoc(need) or "").partition("\n")[0]) for need in cause.needs]
    if needed:
        parts.append(f"Needs: {'; '.join(needed)}.")
    if cause.unless:
        parts.append(f"Ruled out by: {linked(sorted(cause.unless))}")
    return "\n\n".join([f"## {cause.name}", *map(filled, parts)])


def causes(text: str) -> str:
    """`causes.md`, with the introduction and the section "unknown" that it has in `text`."""
    introduction = text.partition("\n## ")[0].rstrip()
    unknown = f"## unknown\n\n{sections(text)['unknown']}\n"
    return "\n\n".join([introduction, *map(of_cause, CAUSES.values()), unknown])


def wanted() -> Iterator[tuple[Path, str]]:
    """Every file of this folder that is written here, as it shall be."""
    pages = {}
    for rule in ours():
        path = HERE / f"{rule.name}.md"
        pages[rule.name] = page(rule, path.read_text(encoding="utf-8") if path.exists() else "")
        yield path, pages[rule.name]
    yield HERE / "causes.md", causes((HERE / "causes.md").read_text(encoding="utf-8"))
    readme = HERE / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    yield readme, f"{before}{BEGIN}\n\n{index(pages)}\n\n{END}{rest.partition(END)[2]}"


def problems() -> list[str]:
    """What is not as it shall be, in a line each."""
    found = []
    for path, text in wanted():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            found.append(f"docs/rules/{path.name} is not what the rules say: run `python docs/rules/generate.py`")
        found += [
            f'docs/rules/{path.name}: "{heading}" is to be filled in by hand'
            for heading, body in sections(text).items()
            if body.startswith("FILL IN") or (heading in BY_HAND and not body)
        ]
    pages = {path.stem for path in HERE.glob("*.md")} - {"README", "causes", *(rule.name for rule in ours())}
    return found + [
        f"docs/rules/{name}.md is the page of no rule: delete it"
        for name in sorted(pages - {rule.name for rule in ours()})
    ]


def main() -> int:
    """Writes, or only looks; says what is left to do."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something would be")
    if not parser.parse_args().check:
        for path, text in wanted():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                print(f"wrote docs/rules/{path.name}")
    left = problems()
    print("\n".join(left) or "the pages say what the rules do")
    return int(bool(left))


if __name__ == "__main__":
    sys.exit(main())
