"""The benchmark harness on tiny cases. Nothing here asserts a time."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from fastguard import kernels
from fastguard.commands import bench
from fastguard.commands.bench import (
    cases,
    further,
    harness,
    machine,
    memory,
    models,
    plot,
    readme,
    rivals,
    steps,
    sweep,
    table,
)
from fastguard.commands.bench.cases import Case, StepCase
from fastguard.commands.bench.subject import Subject

TINY = harness.Settings(num_rounds=2, num_slow_rounds=1, turn_ns=1, max_calls=3)
SHAPES = ((3,), (70, 50), (), (1,), (4096,), (2, 3, 5, 7))
FLOAT32 = Case("tiny-float32", "tiny float32", SHAPES)
BFLOAT16 = Case("tiny-bfloat16", "tiny bfloat16", SHAPES, torch.bfloat16)
ROOT = Path(__file__).resolve().parents[1]
_CPU = kernels.backends()["cpu"]
needs_extension = pytest.mark.skipif(not _CPU.available, reason=str(_CPU.reason))

# section 5 of issue 2
LIMITS = {
    "clip": 0.40,
    "clip-always": 0.80,
    "clip-bfloat16": 0.45,
    "clip-300x1000": 0.08,
    "clip-3000x64": 0.08,
    "read": 1.25,
    "separate-ops": 0.02,
    "step-mlp": 0.35,
    "further-tensor": 120.0,
    "memory-clip-10000x1": 256 * 10_000 + 2**20,
    "memory-guarding-10000x1": 256 * 10_000 + 2**20,
    "memory-clip-gpt2-float32": 256 * 148 + 2**20,
    "memory-guarding-gpt2-float32": 256 * 148 + 2**20,
}


def timing(*rounds_us: float | None) -> dict:
    return {"title": "", "median_us": 1.0, "min_us": 1.0, "max_us": 1.0, "norm_error": None, "rounds_us": rounds_us}


@pytest.fixture
def results() -> dict:
    """Invented results in which every ratio is 0.5 and every spread 0.5 to 2."""
    ours, theirs = timing(1.0, 2.0), timing(2.0, 4.0)
    timings = {
        name: theirs if name.startswith(("torch", "separate", "toolkit", "read", "memcpy")) else ours
        for name in rivals.RIVALS
    }
    spread = {"median": 0.5, "min": 0.5, "max": 2.0}
    step = dict.fromkeys(("plain_us", "clip_us", "guarded_us", "clip_adds_us", "guarded_adds_us", "ratio"), spread)
    functions = [f"{f}_{kind}_ns" for f in ("fastguard", "torch") for kind in ("alive", "fresh")]
    return {
        "cases": {name: {"title": name, "timings": timings, "left_out": {}} for name in cases.CASES},
        "steps": {name: {"title": name, **step} for name in cases.STEP_CASES},
        "further": {**dict.fromkeys(functions, spread), "300x1000-fresh": {"ratio": spread}},
        "memory": {
            name: {"allowed_bytes": 256 * cases.CASES[name].num_tensors + 2**20, "clip_bytes": 10, "guarding_bytes": 10}
            for name in ("10000x1", "gpt2-float32")
        },
        "machine": machine.Machine().to_dict(),
    }


def test_cases_are_the_models_they_name():
    sizes = {name: (case.num_tensors, case.num_elements) for name, case in cases.CASES.items()}
    assert sizes["gpt2-float32"] == sizes["gpt2-bfloat16"] == (148, 124_439_808)
    assert sizes["resnet50"] == (161, 25_557_032)
    assert sizes["one-100m"] == (1, 100_000_000)
    for build, expected in ((models.mlp, 101_386), (models.transformer, 4_820_992)):
        assert sum(p.numel() for p in build().model.parameters()) == expected


@pytest.mark.parametrize("case", [FLOAT32, BFLOAT16], ids=lambda case: case.name)
def test_every_rival_agrees_with_float64_and_is_timed(case):
    measured = harness.measure_case(case, TINY)
    assert measured["timings"].keys() | measured["left_out"].keys() == rivals.RIVALS.keys()
    assert all(RIVAL_REASONS[name]() for name in measured["left_out"])
    for name, t in measured["timings"].items():
        assert len(t["rounds_us"]) == TINY.num_rounds, name
        assert 0 < t["min_us"] <= t["median_us"] <= t["max_us"], name


RIVAL_REASONS = {name: rival.missing for name, rival in rivals.RIVALS.items()}


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("clip", lambda s: torch.tensor(s.norm * 1.01)),
        ("torch-norm", lambda s: torch.tensor(s.norm * 1.01)),
        ("stats-rows", lambda s: [s.rows[0]._replace(num_zeros=7), *s.rows[1:]]),
        ("separate-ops", lambda s: [s.rows[0]._replace(max_val=s.rows[0].max_val * 1.001), *s.rows[1:]]),
        ("toolkit", lambda s: s.total._replace(mean=s.total.std)),
        ("read", lambda s: s.word_sum() ^ 1),
        ("memcpy", lambda s: torch.cat([g.flatten() for g in s.gradients]) * 1.01),
        ("clip-always", lambda s: torch.tensor(s.norm)),  # right, but the gradients were not scaled
    ],
)
def test_a_wrong_result_is_refused(name, result):
    subject = Subject(FLOAT32)
    if name == "clip-always":
        subject.limit /= 2
    with pytest.raises(rivals.WrongResultError, match="in float64 it is"):
        rivals.RIVALS[name].check(result(subject), subject)


def test_clipping_rivals_are_given_fresh_gradients_before_the_values_fade():
    subject = Subject(FLOAT32)
    first = [g.clone() for g in subject.gradients]
    call = rivals.RIVALS["clip-always"].prepare(subject)
    while subject.limit > subject.norm * 1e-3:
        call()
    assert subject.norm_now() < subject.norm * 2e-3
    subject.freshen()
    assert all(torch.equal(a, b) for a, b in zip(first, subject.gradients, strict=True))


@needs_extension
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 3, 511, 1024, 65_537, 1_000_003])
def test_the_read_stream_reads_every_word(numel, dtype):
    from fastguard import _C

    case = Case("", "", ((numel,), (7,)), dtype)
    subject = Subject(case)
    for prefetch in (False, True):
        assert _C.read_stream(subject.gradients, 2, prefetch) == subject.word_sum()
    if numel > 1:
        with pytest.raises(ValueError, match="tensor 0 must be dense"):
            _C.read_stream([subject.gradients[0][::2]], 1, False)


def test_rivals_without_numpy_name_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    measured = harness.measure_case(FLOAT32, TINY, ["norm", "toolkit"])
    assert measured["left_out"] == {"toolkit": "needs numpy: pip install 'fastguard[bench]'"}
    assert "needs numpy" in table.case_text(measured)


def test_whole_steps_train_to_the_same_bits_and_have_a_ratio():
    case = StepCase("tiny", "tiny step", lambda: models.mlp(width=8, inputs=4, classes=3, batch=2), 6)
    measured = steps.measure_steps(case, num_repetitions=2)
    assert len(measured["repetitions"]) == 2
    assert measured["plain_us"]["median"] > 0
    assert "guarding adds" in table.step_text(measured)


def test_whole_steps_that_differ_are_refused(monkeypatch):
    monkeypatch.setattr(steps, "NO_CLIPPING", 1e-6)  # the guard and torch round their coefficients differently
    with pytest.raises(rivals.WrongResultError, match="not those of the plain one"):
        steps.measure_steps(cases.STEP_CASES["step-mlp"], num_repetitions=1, num_steps=6)


def test_further_tensors_are_measured_alive_and_fresh():
    measured = further.measure_further(harness.Settings(num_rounds=1), many=30, few=10)
    for key in ("fastguard_alive_ns", "fastguard_fresh_ns", "torch_alive_ns", "torch_fresh_ns"):
        assert measured[key].keys() == {"median", "min", "max"}
    assert measured["3000x64-fresh"]["ratio"]["median"] > 0


def test_peak_growth_sees_memory_that_was_given_back():
    grown = memory.peak_growth_bytes(lambda: bytes(bytearray(b"x" * (32 << 20))), num_calls=1)
    assert grown >= 32 << 20
    assert memory.peak_growth_bytes(lambda: None) < 1 << 20


def test_memory_is_measured_in_a_fresh_process():
    measured = memory.measure_memory(cases.CASES["300x1000"])
    assert measured["allowed_bytes"] == 256 * 300 + 2**20
    assert measured["kept_bytes"] >= 64 * 300
    assert measured["clip_bytes"] >= 0
    if kernels.backends()["cpu"].available:  # the limit is one of the C++ kernels: reference widens to float64
        assert measured["clip_bytes"] <= measured["allowed_bytes"]


def test_memory_that_cannot_be_measured_says_why():
    with pytest.raises(RuntimeError, match=r"clip_bytes of tiny-float32 failed:\n(.|\n)*KeyError"):
        memory.measure_memory(FLOAT32)


def test_the_table_has_every_measure_of_the_issue(results):
    lines = {line["key"]: line for line in table.measures(results)}
    limits = {key: line["at_most"] for key, line in lines.items() if line["at_most"] is not None}
    assert limits == LIMITS
    assert (lines["clip"]["aim"], lines["read"]["aim"]) == (0.34, 1.1)
    assert {key for key, line in lines.items() if line["verdict"] == table.MISSED} == {
        *("clip", "clip-bfloat16", "clip-300x1000", "clip-3000x64", "separate-ops", "step-mlp")
    }
    assert lines["further-tensor"]["verdict"] == table.REACHED
    assert lines["norm"]["verdict"] == table.NO_LIMIT
    assert lines["clip-3000x64-fresh"]["verdict"] == table.NOT_MEASURED


def test_a_limit_that_nothing_was_measured_for_is_neither_reached_nor_missed():
    for line in table.measures({"cases": {}, "steps": {}}):
        assert line["verdict"] == table.NOT_MEASURED and line["value"] is None


def test_ratios_are_taken_round_by_round():
    measured = {"timings": {"a": timing(1.0, 6.0, 9.0), "b": timing(2.0, None, 9.0)}}
    assert harness.ratio(measured, "a", "b") == (0.75, 0.5, 1.0)
    assert harness.ratio(measured, "a", "c") is None


def test_the_quicker_read_stream_is_compared_with():
    slow, quick = timing(4.0), timing(2.0) | {"median_us": 0.5}
    assert table.fastest_read({"timings": {"read": slow, "read-prefetch": quick}}) == "read-prefetch"
    assert table.fastest_read({"timings": {"stats": slow}}) is None


@pytest.mark.parametrize(("us", "text"), [(0.4, "0.4 µs"), (72.04, "72 µs"), (9_100, "9.1 ms"), (1_088_000, "1.09 s")])
def test_durations_have_three_digits(us, text):
    assert table.duration(us) == text


def test_collected_results_survive_json_and_tell_the_machine(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(cases, "CASES", {"300x1000": FLOAT32})
    monkeypatch.setattr(cases, "STEP_CASES", {})
    monkeypatch.setattr(harness, "QUICK", TINY)
    path = tmp_path / "results" / "out.json"
    monkeypatch.chdir(tmp_path)
    assert bench.main(["--quick", "--only", "300x1000"]) == 0
    assert list(tmp_path.iterdir()) == []  # nothing is saved unless asked for
    assert bench.main(["--quick", "--only", "300x1000", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "300 tensors × 1000, not clipping" in printed and torch.__version__ in printed
    loaded = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(json.dumps(loaded["measures"])) == json.loads(json.dumps(table.measures(loaded)))
    assert loaded["machine"].keys() >= {"cpu", "num_cores", "num_threads", "isa", "torch", "python", "fastguard"}
    assert loaded["machine"].keys() >= {"load_at_start", "others_ratio", "is_busy"}


def test_an_unknown_case_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--only", "gpt5"])
    assert "gpt2-float32" in capsys.readouterr().err


def test_plots_are_drawn_from_a_sweep(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    monkeypatch.setattr(sweep, "_SETTINGS", TINY)
    swept = sweep.measure_sweep(lambda text: None, num_elements=(10, 100), num_tensors=(1, 3))
    assert [point["x"] for point in swept["elements"]] == [10, 100]
    paths = plot.draw({"sweep": swept, "machine": machine.Machine().to_dict()}, tmp_path)
    assert [path.name for path in paths] == ["cost-elements.png", "cost-tensors.png"]
    assert all(path.stat().st_size > 1000 for path in paths)


def test_points_that_do_not_fit_into_memory_are_left_out(monkeypatch):
    monkeypatch.setattr(sweep, "_SETTINGS", TINY)
    monkeypatch.setattr(sweep, "_available_bytes", lambda: 1000)
    said = []
    swept = sweep.measure_sweep(said.append, num_elements=(10, 1000), num_tensors=())
    assert [point["x"] for point in swept["elements"]] == [10]
    assert any("not enough memory" in text for text in said)


def test_plots_without_matplotlib_name_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        bench.main(["--plot"])
    assert "pip install 'fastguard[bench]'" in capsys.readouterr().err


DOCUMENT = "# a\n\n<!-- bench:begin -->\nold\n<!-- bench:end -->\n\nb\n<!-- measures:begin -->\n<!-- measures:end -->\n"


def test_the_tables_of_a_document_are_written_and_checked(results, tmp_path, capsys):
    saved, document = tmp_path / "cpu.json", tmp_path / "README.md"
    bench.save(results, saved)
    document.write_text(DOCUMENT, encoding="utf-8")
    check = [str(saved), str(document), "--check"]
    assert readme.main(check) == 1
    assert "out of date" in capsys.readouterr().out
    assert document.read_text(encoding="utf-8") == DOCUMENT
    assert readme.main(check[:2]) == 0
    assert readme.main(check) == 0
    text = document.read_text(encoding="utf-8")
    assert text.startswith("# a\n\n<!-- bench:begin -->\n") and "old" not in text and "\nb\n" in text
    assert "| clip, GPT-2 124M float32, limit not reached | 1 µs | 1 µs | **0.50** |" in text
    assert f"torch {torch.__version__}" in text
    assert "| 0.40 (aim 0.34) | missed |" in text
    document.write_text(text.replace("**0.50**", "**0.05**"), encoding="utf-8")
    assert readme.main(check) == 1


def test_a_document_without_markers_is_refused(results, tmp_path):
    document = tmp_path / "README.md"
    document.write_text("# nothing here\n", encoding="utf-8")
    with pytest.raises(readme.ReadmeError, match=r"README\.md: .*bench:begin"):
        readme.update(document, results)


def test_figures_from_a_busy_machine_say_so(results):
    results["machine"] |= {"is_busy": True, "load_at_start": 3.0}
    assert "BUSY" in machine.line(results["machine"])
    assert "figures are noisy" in "\n".join(readme.cost_table(results))


def test_the_documents_show_the_saved_results():
    saved = ROOT / "benchmarks" / "results" / "cpu.json"
    if not saved.exists():
        pytest.skip("no saved results beside these tests")
    documents = [str(ROOT / "README.md"), str(ROOT / "benchmarks" / "README.md")]
    assert readme.main([str(saved), *documents, "--check"]) == 0


def test_the_activation_benchmark_on_a_tiny_tensor(monkeypatch):
    path = ROOT / "benchmarks" / "activations.py"
    if not path.exists() or not kernels.backends()["cpu"].available:
        pytest.skip("no benchmarks beside the tests, or no C++ kernels")
    spec = importlib.util.spec_from_file_location("benchmark_of_activations", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "SHAPE", (128, 64))
    found = script.measure(3)
    rows = script.measures(found["rounds_us"])
    assert [row["at_most"] for row in rows] == [0.012, 0.05, 1.6, 2.0, None, None, None]
    assert all(0 < row["min"] <= row["median"] <= row["max"] for row in rows)
    assert all(us > 0 for us in found["small_us"].values())
