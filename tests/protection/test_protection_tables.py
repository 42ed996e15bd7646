"""The protection experiment's tables are those of its results, and its figures those of its parts."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("benchmarks.protection", reason="the experiment is not beside these tests", exc_type=ImportError)

from benchmarks.protection import criteria, suite, table

RULE = {"acted": 0.0005, "held": 0.995, "held-spikes": 1.0, "held-bursts": 0.99, "held-early": 0.9, "damped": 16.0}
RULE |= {"damped-median": 15.0}
ENDED = {"through": 0.95, "gave-up": 0.05, "stopped": 0.0, "silent": 0.0, "num_runs": 20}
ONE = {"num_runs": 10, "num_exploded": 8, "final": {"median": 2.5, "min": 2.4, "max": 2.6}}
WHERE = {"cpu": "a CPU", "num_cores": 2, "torch": "2.13", "fastguard": "0.1", "date": "2026-01-01", "seeds": 10}


def results():
    parts = {
        "policies": {"all": {"Spikes": RULE, "ZClip": {**RULE, "damped": 2000.0}}, "calm": {"Spikes": RULE}},
        "diverging": {
            "num_planted": 30,
            "protections": {"nothing": {**ENDED, "through": 0.0, "silent": 19.0}, "fastguard": ENDED},
            "troubles": {"weights: NaN": {"nothing": ENDED, "fastguard": ENDED}},
        },
        "guide": {
            "measure": {"char-lstm": {"nothing": ONE, "everything": {**ONE, "num_exploded": 0}}},
            "precision": {"char-lstm": {"float32": {**ONE, "final": None}}},
        },
        "healthy": {"num_runs": 30, "rollbacks": 0, "different": 0},
        "costs": {"snapshot": {"figure": 0.004}, "per-tensor": {"figure": 1.2}},
    }
    for part in parts.values():
        part |= {"seconds": 1.0}
    for name in ("policies", "diverging", "guide", "healthy"):
        parts[name]["conditions"] = WHERE
    parts["costs"] = {k: v for k, v in parts["costs"].items() if k != "seconds"} | {"seconds": 1.0, "conditions": WHERE}
    return {"parts": parts, "measures": suite.measures(parts)}


def test_figures_are_taken_from_the_parts():
    found = results()["measures"]
    assert found["acted"] == 0.0005 and found["through"] == 0.95 and found["rollbacks"] == 0
    assert found["snapshot"] == 0.004
    assert set(found) <= {measure.key for measure in criteria.MEASURES}


def test_what_was_missed_is_said_and_what_was_not_measured_too():
    lines = {row[0]: row for row in table.measure_rows(results())[1]}
    titles = {measure.key: measure.title for measure in criteria.MEASURES}
    assert lines[titles["acted"]][1:] == ["≤ 0.1 %", "0.05 %", "reached"]
    assert lines[titles["per-tensor"]][1:] == ["≤ 1.1", "1.2", "missed"]
    assert lines[titles["rollback"]][1:] == ["≤ 2", "—", "not measured"]
    assert lines[titles["silent"]][1:] == ["= 0", "0", "reached"]


@pytest.mark.parametrize("name", table.ROWS)
def test_each_table_has_as_many_cells_in_every_row(name):
    header, rows = table.ROWS[name][1](results())
    assert rows and all(len(row) == len(header) for row in rows)
    lines = table.table_of(name, results())
    assert lines[0].count("|") == len(header) + 1
    assert table.table_of(name, {"parts": {}, "measures": {}}) == [] or name == "protection"


def test_the_text_has_all_tables_that_were_run():
    said = table.text(results())
    assert "8 of 10" in said and "2.5 (2.4 – 2.6)" in said and "weights: NaN" in said
    assert "weights: NaN" not in table.text({"parts": {}, "measures": {}})


def test_the_saved_results_are_read():
    if not suite.RESULTS.exists():
        pytest.skip("no results are saved")
    saved = json.loads(suite.RESULTS.read_text(encoding="utf-8"))
    assert saved["measures"] == suite.measures(saved["parts"])
    assert table.text(saved)


@pytest.mark.parametrize("value", [None, float("nan"), "NaN", float("inf"), "Infinity"])
def test_what_is_not_finite_is_a_dash(value):
    assert table.number(value, "%") == table.number(value) == "—"


def test_a_part_that_is_run_again_leaves_the_others_as_they_were(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results()), encoding="utf-8")
    again = {"num_runs": 4, "rollbacks": 1, "different": 0, "worst": float("inf")}
    monkeypatch.setitem(suite.RUN, "healthy", lambda seeds, options: dict(again))
    assert suite.main(["--only", "healthy", "--seeds", "2", "--json", str(path)]) == 0
    saved = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert saved["measures"]["rollbacks"] == 1 and saved["measures"]["through"] == 0.95
    assert saved["parts"]["healthy"]["worst"] == "Infinity" and saved["parts"]["healthy"]["conditions"]["seeds"] == 2
    assert {k: v for k, v in saved["parts"].items() if k != "healthy"} == {
        k: v for k, v in results()["parts"].items() if k != "healthy"
    }
    assert "missed" in capsys.readouterr().out
