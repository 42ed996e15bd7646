"""The tables of what fastguard withstands say what was measured, and that the rest was not."""

from __future__ import annotations

import json

import pytest

readme = pytest.importorskip(
    "benchmarks.reliability.readme", reason="benchmarks/ is not beside these tests", exc_type=ImportError
)
documents = pytest.importorskip("benchmarks.readme")

LOGS = {"number": 10_000, "num_wrong": 2, "seed": 0, "exit_codes": {"cut": {"3": 5}}, "fastguard": "0.2.0"}
READER = {"number": 9, "log_mb": 4.5, "json": {"cpu_s": 1.5, "peak_rss_mb": 17.0}, "num_cpus": 2, "cpu_s": 1}
THREADS = {"number": 200, "num_wrong": 0, "seed": 7, "torch": "2.13.0"}


def row(table, title):
    return next(line for line in table if title in line)


def test_what_has_no_results_is_not_measured():
    assert sum("*not measured*" in line for line in readme.long_table({})) == len(readme.PARTS)


def test_what_has_results_says_what_was_tried_and_found():
    table = readme.long_table({"reliability-logs": LOGS, "reliability-threads": THREADS, "reliability-reader": READER})
    assert "| 10,000 tried, 2 wrong | fastguard 0.2.0 |" in row(table, "hostile logs")
    assert "| 200 tried, 0 wrong | torch 2.13.0 |" in row(table, "thread sanitizer")
    assert "| 4 MB: 1.5 s of CPU and 17 MB with json |" in row(table, "million steps, read")
    assert sum("*not measured*" in line for line in table) == len(readme.PARTS) - 3


def test_endings_and_the_soak_are_told_in_a_sentence():
    each = {"most_records_behind": 1}
    ended = {"num_moments": 9, "num_wrong": 2, "num_unreadable_logs": 1, "num_records_lost_in_silence": 3}
    ended |= {"kill_9": each, "sigterm": each, "ctrl_c": each}
    soaked = {"num_steps": 5000, "growth_bytes": 90_112, "slowdown_ratio": 1.014, "num_records_lost": 0}
    table = readme.long_table({"reliability-kill": ended, "reliability-soak": soaked})
    assert "9 moments, 2 wrong: 1 logs unreadable, 3 records lost in silence" in row(table, "kill -9")
    assert "5,000 steps: 0.09 MB more memory; the last tenth took 1.01" in row(table, "a million steps |")


def test_results_without_figures_are_an_error():
    with pytest.raises(documents.ReadmeError, match="reliability-threads"):
        readme.long_table({"reliability-threads": {"torch": "2.13.0", "seed": 1}})


def test_a_table_that_is_out_of_date_is_found(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("# a\n\n<!-- reliability:begin -->\nold\n<!-- reliability:end -->\n", encoding="utf-8")
    monkeypatch.setattr(readme, "TABLES", {page: {"reliability": readme.long_table}})
    assert readme.main(["--check"]) == 1
    assert "out of date: page.md" in capsys.readouterr().out
    assert readme.main([]) == 0 and readme.main(["--check"]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("make soak", "make nothing"), encoding="utf-8")
    assert readme.main(["--check"]) == 1


def test_only_saved_results_are_shown(tmp_path):
    (tmp_path / "reliability-logs.json").write_text(json.dumps(LOGS), encoding="utf-8")
    (tmp_path / "reliability-of-something-else.json").write_text("{}", encoding="utf-8")
    assert readme.saved(tmp_path) == {"reliability-logs": LOGS}
    assert "10,000 tried, 2 wrong" in row(readme.long_table(readme.saved(tmp_path)), "hostile logs")


def test_the_documents_show_the_saved_results():
    assert readme.main(["--check"]) == 0, "run `python -m benchmarks.reliability.readme`"
