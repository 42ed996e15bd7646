"""`fastguard diagnose` and the reader on any bytes: a diagnosis, or the code 3 and a line that says why."""

import gzip
import json
import math
import tracemalloc
from pathlib import Path

import pytest

from fastguard.commands import cli
from fastguard.records import COLUMNS, ClippedGroup, StepStats, TrainingHistory, log
from fastguard.records.loading import KEYS
from fastguard.records.samples import WeightStats
from fastguard.sinks import JsonlSink, read_jsonl
from fastguard.sinks.sink import flatten_step

from log_lines import ROW, healthy_log, line
from made_runs import activity
from records import make_batch, make_row, make_table

BATCH = make_batch().to_dict()
WEIGHT = {"numel": 4, "norm": 2.0, "std": 0.5, "abs_max": 1.0}
ACTIVITY = {"family": "relu", **{key: value for key, value in activity().to_dict().items() if key != "name"}}


@pytest.mark.parametrize(
    "content",
    ["", "\n\n", '{"model":{"names":["a"]}}\n', "{}\n", '{"event":"of a newer one"}\n', "{\n{\n", b"\0" * 99],
    ids=["empty", "blank lines", "facts only", "an empty object", "unknown lines", "damaged lines", "zeros"],
)
def test_a_log_without_steps_is_not_healthy(told, content):
    code, out, err = told(content)
    assert (code, out) == (3, "")
    assert err.splitlines()[-1].startswith("fastguard diagnose: error: `log` must hold a step, got none")


class TestOtherFiles:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (gzip.compress(b"{}", mtime=0), r"got '\x1f\x8b"),
            (b"[1, 2]\n", "got '[1, 2]'"),
            (b"null\n", "got 'null'"),
            (b"\x7fELF\x02\x01\x01\0", r"got '\x7fELF"),
            (b"\x1b[2J\xe2\x80\xae", r"got '\x1b[2J"),
        ],
    )
    def test_say_what_they_are(self, told, content, message):
        code, out, err = told(content)
        assert (code, out) == (3, "") and message in err and err.count("\n") == 1
        assert err.replace("\n", "").isprintable() and err.isascii()

    def test_a_folder_and_a_name_that_no_file_can_have(self, capsys, tmp_path):
        for name in ("", "a\0b", "n" * 300, "\udcff\x1b[2J"):
            assert cli.main(["diagnose", str(tmp_path / name)]) == 3
            err = capsys.readouterr().err
            assert err.startswith("fastguard diagnose: error: ") and err.count("\n") == 1 and "\x1b" not in err


class TestWrongTypes:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (line(step=None), "must be a whole number, got None - at `record['step']`"),
            (line(step=-1), "must be a whole number >= 0, got -1 - at `record['step']`"),
            (line(step=10**400), "must be a whole number, got 1000"),
            ('{"step":1e999}', "must be a whole number, got inf"),
            (line(loss=[]), "must be a number, got [] - at `record['loss']`"),
            (line(loss="a\x1b[2J"), r"must be a number, got 'a\x1b[2J'"),
            (line(lr=False), "must be a number, got False - at `record['lr']`"),
            (line(grad__norm=-1.0), "must be a number >= 0, got -1.0 - at `record['grad/norm']`"),
            (line(grad__mean="x"), "must be a number, got 'x' - at `record['grad/mean']`"),
            (line(grad__num_nans=-1), "must be a whole number >= 0, got -1 - at `record['grad/num_nans']`"),
            (line(grad__num_elements="Infinity"), "got 'Infinity' - at `record['grad/num_elements']`"),
            (line(skipped="no"), "must be true or false, got 'no' - at `record['skipped']`"),
            (line(nonfinite="abc", grad__norm="NaN"), "must be a list, got 'abc' - at `record['nonfinite']`"),
            (line(nonfinite=[1], grad__norm="NaN"), "must be text, got 1 - at `record['nonfinite'][0]`"),
            (line(tensors=[1]), "must be a dict with text for keys, got [1] - at `record['tensors']`"),
            (line(tensors={"a": "NaN"}), "must be a list, got 'NaN' - at `record['tensors']['a']`"),
            (line(tensors={"a": [None]}), "must be a number, got None - at `record['tensors']['a']`"),
            (line(tensors={"a": [*ROW[:5], -1, 0, 0]}), "must have a count for num_zeros, got -1.0"),
            (line(tensors={"a": ROW, "b": [4, "NaN", *ROW[2:]]}), "must have a number >= 0 for sum_sq, got nan"),
            (line(activations=["a"]), "must be a dict with text for keys, got ['a'] - at `record['activations']`"),
            (line(activations={"a": {"mean": 1.0}}), "must be there, and is missing - at `record['activations']['a']["),
            (line(activations={"a": {**ACTIVITY, "num_zeros": 1.5}}), "must be a whole number, got 1.5 - at"),
            (line(activations={"a": {**ACTIVITY, "dead_units": [1, "x"]}}), "['dead_units'][1]`"),
            (line(weights={"\x1b": {**WEIGHT, "norm": "big"}}), r"got 'big' - at `record['weights']['\x1b']['norm']`"),
            (line(batches=[{**BATCH, "training": 2}]), "got 2 - at `record['batches'][0]['training']`"),
            (line(batches=[BATCH, {}]), "must be there, and is missing - at `record['batches'][1]['training']`"),
            (line(grad__cosine="x"), "must be a number, got 'x' - at `record['grad/cosine']`"),
            ('{"loss":1.0}', "`path` must be a log of steps, got a record without `step`"),
        ],
        ids=range(28),
    )
    def test_the_key_and_the_line_are_named(self, told, content, message):
        code, out, err = told(healthy_log(3) + content + "\n" + line(step=9))
        assert (code, out) == (3, "")
        assert message in err and err.count("\n") == 1 and err.endswith("run.jsonl, line 4\n")

    @pytest.mark.parametrize(
        ("facts", "message"),
        [
            ({"names": "abc"}, "must be names, got a single text 'abc' - at `model['names']`"),
            ({"names": [1]}, "must be text, got 1 - at `model['names'][0]`"),
            ({"initialization": {"a": 1}}, "must be a list, got 1 - at `model['initialization']['a']`"),
            ({"initialization": {"a": [1, 2, 3]}}, "must have 2 entries, got 3"),
            ({"dropout": [0.5]}, "must be a dict with text for keys, got [0.5] - at `model['dropout']`"),
            ({"steps_per_epoch": 0}, "must be a whole number >= 1, got 0 - at `model['steps_per_epoch']`"),
            ({"decay_per_step": "much"}, "must be a number, got 'much' - at `model['decay_per_step']`"),
            ({"has_scheduler": "yes"}, "must be true or false, got 'yes' - at `model['has_scheduler']`"),
        ],
    )
    def test_notes_of_the_model(self, told, facts, message):
        code, out, err = told(json.dumps({"time": 1.0, "model": facts}) + "\n" + line())
        assert (code, out) == (3, "") and message in err and err.count("\n") == 1

    def test_deeply_nested_values_are_not_gone_into(self, told, parser):
        for depth in (50, 900, 100_000):
            for start, end in (("[", "]"), ('{"a":', "}")):
                deep = start * depth + ("1" if "a" in start else "") + end * depth
                assert told(healthy_log(30) + f'{{"step":30,"x":{deep}}}\n')[0] == 0
                code, _, err = told(healthy_log(30) + f'{{"step":30,"loss":{deep}}}\n')
                assert code == (3 if "error" in err else 0)  # what cannot be parsed at all is a damaged line
                assert "must be a number" in err or "1 line was cut off or damaged" in err

    def test_read_jsonl_leaves_out_what_is_nested_too_deeply(self, tmp_path, parser):
        for depth in (50, 900, 100_000):
            (tmp_path / "run.jsonl").write_text(f'{{"step":0,"x":{"[" * depth}{"]" * depth}}}\n' + line(step=1))
            log = read_jsonl(tmp_path / "run.jsonl")
            assert [record["step"] for record in log] == ([0, 1] if depth == 50 else [1]) and log[-1]["loss"] == 1.0
            assert log.skipped_lines == ([] if depth == 50 else [1])


class TestReadAsFarAsItCanBe:
    @pytest.mark.parametrize("spelled", ['"NaN"', "NaN", '"Infinity"', "Infinity", "-Infinity", '"-Infinity"', "1e999"])
    def test_not_finite_in_any_spelling(self, tmp_path, parser, spelled):
        (tmp_path / "log").write_text(f'{{"step":0,"loss":{spelled},"grad/norm":1}}\n')
        (value,) = TrainingHistory.from_jsonl(tmp_path / "log").loss
        assert math.isnan(value) if "nan" in spelled.lower() else math.isinf(value)

    def test_duplicated_keys_null_and_whole_floats(self, tmp_path, parser):
        (tmp_path / "log").write_text('{"step":0,"step":7.0,"loss":1,"loss":2,"lr":null,"skipped":0,"grad/norm":3}\n')
        history = TrainingHistory.from_jsonl(tmp_path / "log")
        assert (history.step, history.loss, history.learning_rate, history.grad_norm) == ([7], [2.0], [], [3.0])

    def test_marks_and_line_ends_of_other_systems(self, told):
        text = healthy_log(40)
        plain = told(text)
        assert plain[0] == 0
        assert told(b"\xef\xbb\xbf" + text.encode()) == plain == told(text.replace("\n", "\r\n"))

    def test_half_surrogates_and_odd_names(self, told, parser):
        text = healthy_log(40) + line(step=40, tensors={"\ud800": ROW, "": ROW, "\x1b[2J\n": ROW})
        assert told(text)[0] == 0

    def test_what_a_newer_version_wrote(self, told):
        newer = [
            line(step=200, of_later=1, tensors={"a": [*ROW, *[5.0] * (len(COLUMNS) + 1 - len(ROW))]}),
            line(step=201, activations={"a": {**ACTIVITY, "skew": 1.0}}, weights={"a": {**WEIGHT, "rank": 3}}),
            line(step=202, batches=[{**BATCH, "output_rank": 3}]),
            '{"time":1.0,"event":"resumed"}',
            '{"time":1.0,"model":{"names":["a"],"sharded":true}}',
        ]
        code, out, err = told(healthy_log() + "\n".join(newer))
        assert code == 0 and out.startswith("HEALTHY after 203 steps")
        said = "written by a newer version? 3 unknown keys ignored: of_later, event, model/sharded"
        assert err == f"fastguard diagnose: {said}\n"

    def test_facts_that_an_older_version_wrote(self, told):
        older = '{"time":1.0,"model":{"num_averaged":3,"odd_ranks":[{"rank":3}]}}'
        assert told(healthy_log() + older)[::2] == (0, "")

    def test_unknown_keys_without_end(self, told):
        lines = "".join(line(step=i, **{f"\x1b{i}": 1, "n" * 5000: 2}) + "\n" for i in range(300))
        code, _, err = told(lines)
        assert code == 1 and "256 unknown keys ignored" in err and len(err) < 1000 and "\x1b" not in err

    def test_every_key_that_sinks_write_is_known(self, tmp_path):
        tables = make_table([make_row(), make_row(num_nans=1)], ["a", "b"])
        sampled = {"activations": (activity(),), "weights": (WeightStats("a", 4, 2.0, 0.5, 1.0, 0.1, 0.1),)}
        sampled.update(batches=(make_batch(),), grad_cosine=0.5)
        sampled.update(trigger=1.0, over=("a",), groups=(ClippedGroup("a", 2.0, 1.0, 1.0),))
        record = StepStats(0, tables, 0.5, True, 1.0, 2.0, 1e-3, 1024.0, **sampled)
        with JsonlSink(tmp_path / "run.jsonl") as sink:
            sink.write(record)
            sink.note({"names": ["a"]})
        written = [json.loads(text) for text in (tmp_path / "run.jsonl").read_text().splitlines()]
        assert {key for keys in written for key in keys} == KEYS - {"grad/noise_scale"}  # of logs of 0.3
        assert flatten_step(record).keys() <= KEYS


class TestDamage:
    def test_lines_are_counted_and_the_first_thousand_listed(self, told, tmp_path):
        code, _, err = told(healthy_log(40) + "{\n" * 1500)
        assert code == 0 and "1500 lines were cut off or damaged, and left out: [41, 42, 43" in err
        found = read_jsonl(tmp_path / "run.jsonl")
        assert (found.num_skipped, len(found.skipped_lines), len(found)) == (1500, 1000, 40)

    def test_a_line_without_end_is_left_out(self, tmp_path, monkeypatch):
        monkeypatch.setattr(log, "MAX_LINE_BYTES", 1000)
        path = tmp_path / "run.jsonl"
        for long in (line(x="n" * 100_000), '{"step":0' + " " * 990, line(x="n" * 5000)[:1000], "\0" * 1000):
            path.write_text(f"{line(step=1)}\n{long}\n{line(step=2)}\n")
            reader = log.LogReader(path)
            assert [record["step"] for record in reader] == [1, 2]
            assert (reader.skipped_lines, reader.line) == ([2], 3)


class TestStreaming:
    def test_keeps_no_lines(self, tmp_path):
        path = tmp_path / "run.jsonl"
        path.write_text(healthy_log(3000))
        TrainingHistory.from_jsonl(path)  # what is made once
        tracemalloc.start()
        try:
            history = TrainingHistory.from_jsonl(path, window=64)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert history.num_steps == 3000
        assert peak < 1e6  # the lines alone would be 1.5 MB of dicts

    def test_names_that_are_new_in_each_line(self, tmp_path):
        lines = (line(step=i, grad__norm="NaN", nonfinite=[f"w{i}"]) + "\n" for i in range(4200))
        (tmp_path / "log").write_text("".join(lines))
        history = TrainingHistory.from_jsonl(tmp_path / "log")
        assert history.num_nonfinite == 4200 and len(history.first_nonfinite) == 4096


def test_random_logs():
    pytest.importorskip(
        "benchmarks.reliability", reason="the benchmarks are not beside these tests", exc_type=ImportError
    )
    from benchmarks.reliability import logs

    figures, bad = logs.run(200, seed=7)
    assert not bad, bad[0].wrong + f" (python -m benchmarks.reliability.logs --seed 7 --keep {Path('wrong')})"
    codes = [code for counts in figures["exit_codes"].values() for code in counts]
    assert {"0", "1", "2", "3", "4"} == set(codes)
