"""Weights & Biases, offline: what the sink wrote is read back, and all of the user's is there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tracker_helpers import as_expected, by_epoch, by_step, every_third, needs, nothing, once, twice, write_some

from fastguard.sinks import SafeSink, WandbSink

from records import make_record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # the trackers' own
]


def records_of(data):
    """The records of a file of W&B's: LevelDB's log format after seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if at % 32768 > 32768 - 7:
            at += -at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


class TestWandb:
    @pytest.fixture
    def start(self, tmp_path, monkeypatch):
        for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "DISABLE_CODE": "true"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        wandb = needs("wandb")
        return lambda **options: wandb.init(project="p", dir=str(tmp_path), **options)

    def read(self, folder):
        """Rows of the run's history, and its metrics with the axis of each; W&B may write after `finish`."""
        from wandb.proto.wandb_internal_pb2 import Record

        for _ in range(200):
            (path,) = Path(folder).glob("wandb/offline-run-*/*.wandb")
            records = [Record.FromString(data) for data in records_of(path.read_bytes())]
            if any(record.WhichOneof("record_type") == "exit" for record in records):
                break
            time.sleep(0.1)
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        return rows, {record.metric.name: record.metric.step_metric for record in records if record.metric.name}

    # How many rows of six steps are kept: ours, and the user's; see docs/guide/trackers.md.
    @pytest.mark.parametrize(
        ("user", "options", "num_ours", "num_theirs"),
        [
            (nothing, {}, 6, 0),
            (once, {}, 6, 6),
            (twice, {}, 6, 12),
            (by_step, {}, 6, 6),
            (every_third, {}, 6, 2),
            (by_epoch, {}, 6, 1),  # for which there is `commit=False`
            (nothing, {"commit": False}, 1, 0),
            (once, {"commit": False}, 6, 6),
            (twice, {"commit": False}, 6, 12),
            (by_step, {"commit": False}, 6, 6),
            (every_third, {"commit": False}, 3, 2),
            (by_epoch, {"commit": False}, 3, 3),
        ],
    )
    def test_no_row_of_the_users_is_lost(self, start, tmp_path, user, options, num_ours, num_theirs):
        run = start()
        sink = WandbSink(run, **options)
        for n in range(6):  # a record is handed over when the next step begins
            if n:
                sink.write(make_record(n - 1))
            user(run, n)
        sink.write(make_record(5))
        run.finish()
        rows, _ = self.read(tmp_path)
        assert len({row["mine"] for row in rows if "mine" in row}) == num_theirs
        assert len({row["fastguard/step"] for row in rows if "grad/norm" in row}) == num_ours

    def test_records_that_come_late_and_together_cost_no_row_either(self, start, tmp_path):
        run = start()
        sink = WandbSink(run)
        for n in range(8):
            run.log({"mine": n}, step=n)
            for late in range(n - 3, n + 1) if n % 4 == 3 else ():
                sink.write(make_record(late))
        run.finish()
        rows, _ = self.read(tmp_path)
        assert sorted(row["mine"] for row in rows if "mine" in row) == list(range(8))

    def test_a_user_who_gets_ahead_later(self, start, tmp_path):
        run = start()
        sink = WandbSink(run)
        for n in range(150):
            run.log({"mine": n}, **({"step": n} if n < 40 else {}))
            if n == 40:
                run.log({"evaluated": 1})
                run.log({"evaluated": 2})
            sink.write(make_record(n))
        run.finish()
        rows, _ = self.read(tmp_path)
        # Without the sink, too, 40 takes the place of 39, whose row was still open.
        assert {row["mine"] for row in rows if "mine" in row} == set(range(150)) - {39}
        assert len([row for row in rows if "evaluated" in row]) == 2
        assert len({row["fastguard/step"] for row in rows if "grad/norm" in row}) >= 150 - 64

    def test_what_was_written_is_read_back(self, start, tmp_path):
        run = start()
        sink = WandbSink(run, prefix="train/", tensors_every=2)
        write_some(sink)
        run.finish()
        rows, axes = self.read(tmp_path)
        assert as_expected([row["train/grad/norm"] for row in rows if "train/grad/norm" in row])
        assert [row["train/fastguard/step"] for row in rows] == list(range(5))
        assert axes["train/grad/norm"] == "train/fastguard/step" and axes["train/fastguard/step"] == ""
        texts = [row["train/fastguard/finding/a-rule"] for row in rows if "train/fastguard/finding/a-rule" in row]
        assert texts == ["[warning, step 4] S. R."]
        assert rows[0]["train/grad/log10_norm/_type"] == "histogram"

    def test_a_finished_run_loses_records_and_nothing_else(self, start, tmp_path):
        run = start()
        sink = SafeSink(WandbSink(run))
        run.finish()
        with pytest.warns(RuntimeWarning, match="could not write a record: "):
            sink.write(make_record(0))
        assert sink.num_lost == 1

    def test_a_resumed_run_whose_steps_go_back(self, start, tmp_path):
        run = start()
        sink = WandbSink(run)
        for n in (*range(4), *range(2, 8)):
            run.log({"mine": n})
            sink.write(make_record(n))
        run.finish()
        rows, _ = self.read(tmp_path)
        assert len([row for row in rows if "mine" in row]) == 10
        assert {row["fastguard/step"] for row in rows if "grad/norm" in row} == set(range(8))

    def test_what_is_no_run_is_refused(self):
        needs("wandb")
        with pytest.raises(TypeError, match=r"`run` must be what wandb\.init returned, got 'p'"):
            WandbSink("p")
        with pytest.raises(ValueError, match=r"`run` must be what wandb\.init returned, got None"):
            WandbSink(None).write(make_record(0))
