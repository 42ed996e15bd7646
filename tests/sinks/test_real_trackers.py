"""Each sink against the package of its tracker, offline: what it logged is read back, and nothing of yours is lost."""

import json
import math
import sys
import time
import urllib.request
import warnings
from pathlib import Path

import pytest

from fastguard.sinks import MlflowSink, PrometheusSink, SafeSink, TensorBoardSink, TrackioSink, WandbSink
from fastguard.sinks.mlflow import accepted

from records import make_bad_record, make_record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # the trackers' own
]
HOSTILE = ["a/b", "", "../x", "/y//z", "NaN", "a#<b>", "x" * 400, "é\u202e", "a[/b]"]
NORMS = [1.0, 2.0, math.nan, math.inf, 3.0]


def needs(package):
    return pytest.importorskip(package, reason=f"needs {package}; .ci/run installs it")


def write_some(sink):
    """Steps 0 to 4 with `NORMS`; those that are not finite are skipped; and a finding."""
    for step, norm in enumerate(NORMS):
        sink.write(make_record(step, norm, skipped=not math.isfinite(norm), loss=norm, lr=0.1))
    sink.tell({"rule": "a-rule", "severity": "warning", "summary": "S.", "recommendation": "R.", "last_step": 4})


def are_norms(values):
    return list(map(repr, map(float, values))) == list(map(repr, NORMS))


# What you log beside the sink at a step of your loop.
USERS = {
    "nothing": lambda run, n: None,
    "once": lambda run, n: run.log({"mine": n}),
    "twice": lambda run, n: (run.log({"mine": n}), run.log({"mine": n + 0.5})),
    "by step": lambda run, n: run.log({"mine": n}, step=n),
    "every third": lambda run, n: run.log({"mine": n}) if n % 3 == 2 else None,
    "by epoch": lambda run, n: run.log({"mine": n}, step=n // 2) if n % 2 else None,
}


class TestTensorBoard:
    def read(self, folder):
        needs("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        sizes = {"scalars": 0, "tensors": 0}
        return EventAccumulator(str(folder), size_guidance=sizes).Reload()

    def test_round_trip(self, tmp_path):
        needs("tensorboard")
        TensorBoardSink(tmp_path / "no record, no file").close()
        assert list(tmp_path.iterdir()) == []
        sink = TensorBoardSink(tmp_path, prefix="train/", tensors_every=2)
        write_some(sink)
        sink.close()
        found = self.read(tmp_path)
        points = found.Scalars("train/grad/norm")
        assert [p.step for p in points] == list(range(5)) and are_norms([p.value for p in points])
        assert [p.value for p in found.Scalars("train/fastguard/skipped")] == [0, 0, 1, 1, 0]
        text = found.Tensors("train/fastguard/finding/a-rule/text_summary")[0]
        assert (text.step, text.tensor_proto.string_val[0]) == (4, b"[warning, step 4] S. R.")
        assert "train/fastguard/event/text_summary" in found.Tags()["tensors"]
        safe = SafeSink(sink)
        with pytest.warns(RuntimeWarning, match="must have an open writer, got a closed one"):
            safe.write(make_record(5))
        assert safe.num_lost == 1

    def test_your_writer_stays_yours(self, tmp_path):
        needs("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(tmp_path))
        sink = TensorBoardSink(writer, tensors_every=1)
        for step in range(3):
            writer.add_scalar("mine", step, step)
            sink.write(make_record(step))
        sink.close()
        writer.add_scalar("mine", 3, 3)
        writer.close()
        found = self.read(tmp_path)
        assert len(found.Scalars("mine")) == 4 and len(found.Scalars("grad/norm")) == 3

    def test_a_resumed_run_hides_the_steps_that_it_repeats(self, tmp_path):
        needs("tensorboard")
        for first, options in ((0, {}), (3, {"purge_step": 3})):
            sink = TensorBoardSink(tmp_path, **options)
            for step in range(first, first + 6):
                sink.write(make_record(step, 1.0 + first))
            sink.close()
            time.sleep(1.1)  # the name of a file has the second
        found = [(p.step, p.value) for p in self.read(tmp_path).Scalars("grad/norm")]
        assert found == [(step, 1.0 if step < 3 else 4.0) for step in range(9)]


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    mlflow = needs("mlflow")
    needs("sqlalchemy")
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder / 'runs.db'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = mlflow.MlflowClient(uri)  # makes 60 tables, one by one
        return client, client.create_experiment("e", str(folder)), uri


class TestMlflow:
    @pytest.fixture
    def client(self, database):
        client, experiment, self.uri = database
        self.run_id = client.create_run(experiment).info.run_id
        return client

    def test_round_trip(self, client):
        sink = MlflowSink(self.run_id, tracking_uri=self.uri, prefix="train/", layers=99)
        write_some(sink)
        names = [*HOSTILE, "a_", "a#", "a<", ".", "./..", "..x", "x" * 401]  # some of which it rejects
        sink.write(make_bad_record(5, names, names=names))
        for number, step in enumerate((*range(6, 90), *range(60, 70))):  # more than a batch, and some steps again
            sink.write(make_record(step, 1.0 + number))
        sink.close()
        assert sink.num_lost == 0, sink.last_error
        points = client.get_metric_history(self.run_id, "train/grad/norm")
        assert sorted(p.step for p in points) == sorted((*range(90), *range(60, 70)))
        values = [p.value for p in points]
        assert values[:2] == [1.0, 2.0] and math.isnan(values[2]) and math.isnan(values[3])  # Inf would be 1.8e308
        assert client.get_metric_history(self.run_id, "train/grad/num_infs")[3].value == 1.0
        data = client.get_run(self.run_id).data
        assert data.tags["train/fastguard/finding/a-rule"] == "[warning, step 4] S. R."
        assert len([key for key in data.metrics if key.startswith("train/grad/norm/")]) == 1 + len(names)
        for name in ("grad/norm/layers.0.weight", "fastguard/loss", "é b:c-d_e"):
            assert accepted(name) == name

    def test_a_missing_run_loses_records_and_says_so(self, client, tmp_path, monkeypatch):
        safe = SafeSink(MlflowSink("0" * 32, tracking_uri=self.uri))
        safe.write(make_record(0))
        with pytest.warns(RuntimeWarning, match="could not write a record: MlflowException"):
            safe.close()
        assert safe.num_lost == 1
        with pytest.raises(ValueError, match="must be open to write"):
            safe.sink.write(make_record(1))
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ValueError, match="`run` must be a run of MLflow or its id, got None, and none is active"):
            MlflowSink().write(make_record(0))


class TestTrackio:
    @pytest.mark.parametrize("user", USERS)
    def test_round_trip(self, user, tmp_path, monkeypatch):
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        trackio = needs("trackio")
        for module in ("trackio.utils", "trackio.sqlite_storage"):
            home = pytest.importorskip(module)
            if hasattr(home, "TRACKIO_DIR"):
                monkeypatch.setattr(home, "TRACKIO_DIR", tmp_path)
        run = trackio.init("p", name="r", embed=False, auto_log_gpu=False, auto_log_cpu=False)
        sink = TrackioSink(run, tensors_every=2)
        for step in range(5):
            USERS[user](run, step)
        write_some(sink)
        run.finish()
        rows = sys.modules["trackio.sqlite_storage"].SQLiteStorage.get_logs("p", "r")
        ours = [row for row in rows if "grad/norm" in row]
        assert [row["step"] for row in ours] == list(range(5)) and are_norms(row["grad/norm"] for row in ours)
        theirs = {"nothing": 0, "once": 5, "twice": 10, "by step": 5, "every third": 1, "by epoch": 2}[user]
        assert sum("mine" in row for row in rows) == theirs
        findings = [row["fastguard/finding/a-rule"] for row in rows if "fastguard/finding/a-rule" in row]
        assert findings == ["[warning, step 4] S. R."]


class TestPrometheus:
    @pytest.fixture
    def sink(self):
        needs("prometheus_client")
        made = PrometheusSink(0)
        assert made.port is None  # ranks that get no record take no port
        yield made
        made.close()

    def scrape(self, sink):
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    def test_totals_and_the_largest_since_the_last_scrape(self, sink):
        write_some(sink)
        found = self.scrape(sink)
        totals = {"steps": 5.0, "skipped": 2.0, "clipped": 0.0, "nonfinite": 2.0}
        assert {name: found[f"fastguard_{name}_total",] for name in totals} == totals
        assert found["fastguard_findings_total", "a-rule", "warning"] == 1.0
        assert (found["fastguard_grad_norm",], found["fastguard_lr",]) == (3.0, 0.1)
        assert found["fastguard_grad_norm_largest",] == 3.0
        assert ("fastguard_grad_norm_largest",) not in self.scrape(sink)
        sink.write(make_record(5, 0.5))
        sink.write(make_bad_record(6, HOSTILE, names=HOSTILE))
        found = self.scrape(sink)
        assert found["fastguard_grad_norm_largest",] == 0.5 and found["fastguard_steps_total",] == 7.0
        assert math.isnan(found["fastguard_grad_norm",])

    def test_ports(self, sink):
        sink.write(make_record(0))
        assert sink._server.server_address[0] == "127.0.0.1"
        with pytest.raises(OSError, match="in use"):
            PrometheusSink(sink.port).write(make_record(0))
        sink.close()
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10)


def chunks_of(data):
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
    def run(self, tmp_path, monkeypatch):
        for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path), "DISABLE_CODE": "true"}.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        self.folder = tmp_path
        return needs("wandb").init(project="p", dir=str(tmp_path))

    def finish(self, run):
        """Rows of the run's history, and its metrics with the axis of each; W&B may write after `finish`."""
        run.finish()
        from wandb.proto.wandb_internal_pb2 import Record

        for _ in range(200):
            (path,) = self.folder.glob("wandb/offline-run-*/*.wandb")
            records = [Record.FromString(data) for data in chunks_of(Path(path).read_bytes())]
            if any(record.WhichOneof("record_type") == "exit" for record in records):
                break
            time.sleep(0.1)
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.WhichOneof("record_type") == "history"
        ]
        return rows, {record.metric.name: record.metric.step_metric for record in records if record.metric.name}

    # How many rows of six steps are kept: ours, and yours; see docs/guide/trackers.md.
    @pytest.mark.parametrize(
        ("user", "commit", "num_ours", "num_theirs"),
        [
            ("nothing", True, 6, 0),
            ("once", True, 6, 6),
            ("twice", True, 6, 12),
            ("by step", True, 6, 6),
            ("every third", True, 6, 2),
            ("by epoch", True, 6, 1),  # use `commit=False` here
            ("nothing", False, 1, 0),
            ("once", False, 6, 6),
            ("twice", False, 6, 12),
            ("by step", False, 6, 6),
            ("every third", False, 3, 2),
            ("by epoch", False, 3, 3),
        ],
    )
    def test_no_row_of_yours_is_lost(self, run, user, commit, num_ours, num_theirs):
        sink = WandbSink(run, commit=commit)
        for n in range(6):  # a record is delivered when the next step begins
            if n:
                sink.write(make_record(n - 1))
            USERS[user](run, n)
        sink.write(make_record(5))
        rows, _ = self.finish(run)
        assert len({row["mine"] for row in rows if "mine" in row}) == num_theirs
        assert len({row["fastguard/step"] for row in rows if "grad/norm" in row}) == num_ours

    def test_round_trip(self, run):
        sink = WandbSink(run, prefix="train/", tensors_every=2)
        write_some(sink)
        rows, axes = self.finish(run)
        assert are_norms(row["train/grad/norm"] for row in rows if "train/grad/norm" in row)
        assert [row["train/fastguard/step"] for row in rows] == list(range(5))
        assert axes["train/grad/norm"] == "train/fastguard/step" and axes["train/fastguard/step"] == ""
        texts = [row["train/fastguard/finding/a-rule"] for row in rows if "train/fastguard/finding/a-rule" in row]
        assert texts == ["[warning, step 4] S. R."]
        safe = SafeSink(sink)
        with pytest.warns(RuntimeWarning, match="could not write a record: "):
            safe.write(make_record(5))  # the run is finished
        assert safe.num_lost == 1


@pytest.mark.parametrize(("package", "kind"), [("wandb", WandbSink), ("trackio", TrackioSink)])
def test_anything_but_a_run_is_refused(package, kind):
    needs(package)
    with pytest.raises(TypeError, match=rf"`run` must be what {package}\.init returned, got 'p'"):
        kind("p")
    with pytest.raises(ValueError, match=rf"`run` must be what {package}\.init returned, got None"):
        kind(None).write(make_record(0))


@pytest.mark.parametrize("package", ["torch.utils.tensorboard", "wandb", "mlflow", "trackio", "prometheus_client"])
def test_a_missing_package_is_named_with_its_extra(package, monkeypatch):
    kinds = {"torch.utils.tensorboard": TensorBoardSink, "wandb": WandbSink, "mlflow": MlflowSink}
    kind = {**kinds, "trackio": TrackioSink, "prometheus_client": PrometheusSink}[package]
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"torch.utils.tensorboard": "tensorboard", "prometheus_client": "prometheus"}.get(package, package)
    with pytest.raises(ImportError, match=rf"Sink needs {extra}: pip install 'fastguard\[{extra}\]'"):
        kind("x") if kind is not PrometheusSink else kind()
