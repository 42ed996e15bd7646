"""Each sink against the package of its tracker, offline: what it wrote is read back, and all of the user's is there."""

from __future__ import annotations

import math
import subprocess
import sys
import time
import urllib.request
import warnings

import pytest
import torch
from tracker_helpers import (
    HOSTILE,
    as_expected,
    by_epoch,
    by_step,
    every_third,
    needs,
    nothing,
    once,
    twice,
    write_some,
)

import fastguard
from fastguard.sinks import MlflowSink, PrometheusSink, SafeSink, TensorBoardSink, TrackioSink, WandbSink
from fastguard.sinks.mlflow import accepted

from records import make_bad_record, make_record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # the trackers' own
]


class TestTensorBoard:
    @pytest.fixture(params=["torch", "tensorboardX"])
    def writer_of(self, request):
        needs("tensorboard")  # to read
        if request.param == "tensorboardX":
            return needs("tensorboardX").SummaryWriter
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter

    def read(self, folder):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        sizes = {"scalars": 0, "histograms": 0, "tensors": 0, "compressedHistograms": 0}
        return EventAccumulator(str(folder), size_guidance=sizes).Reload()

    def test_what_was_written_is_read_back(self, tmp_path):
        needs("tensorboard")
        sink = TensorBoardSink(tmp_path, prefix="train/", tensors_every=2)
        sink.measure = lambda: fastguard.MagnitudeHistogram({-3: 2, 0: 1})
        write_some(sink)
        sink.close()
        found = self.read(tmp_path)
        points = found.Scalars("train/grad/norm")
        assert [p.step for p in points] == list(range(5)) and as_expected([p.value for p in points])
        assert [p.value for p in found.Scalars("train/fastguard/skipped")] == [0, 0, 1, 1, 0]
        assert math.isinf(found.Scalars("train/fastguard/loss")[3].value)
        histogram = found.Histograms("train/grad/log2_magnitude")[0].histogram_value
        assert sum(histogram.bucket) == histogram.num == 3 and (histogram.min, histogram.max) == (-3, 1)
        assert histogram.bucket_limit[-1] == 1 and "train/grad/log10_norm" in found.Tags()["histograms"]
        text = found.Tensors("train/fastguard/finding/a-rule/text_summary")[0]
        assert (text.step, text.tensor_proto.string_val[0]) == (4, b"[warning, step 4] S. R.")
        assert "train/fastguard/event/text_summary" in found.Tags()["tensors"]
        with pytest.raises(ValueError, match="must have an open writer, got a closed one"):
            sink.write(make_record(5))

    def test_one_event_a_step(self, tmp_path):
        needs("tensorboard")
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader

        sink = TensorBoardSink(tmp_path, tensors_every=1)
        for step in range(10):
            sink.write(make_record(step))
        sink.close()
        (path,) = tmp_path.iterdir()
        assert len(list(RawEventFileLoader(str(path)).Load())) == 1 + 10  # the first is the file's version

    def test_a_writer_of_the_users_stays_theirs(self, tmp_path, writer_of):
        writer = writer_of(str(tmp_path))
        sink = TensorBoardSink(writer, tensors_every=1)
        for step in range(3):
            writer.add_scalar("mine", step, step)
            sink.write(make_record(step))
        sink.close()
        writer.add_scalar("mine", 3, 3)
        writer.close()
        found = self.read(tmp_path)
        assert len(found.Scalars("mine")) == 4 and len(found.Scalars("grad/norm")) == 3
        safe = SafeSink(sink)
        with pytest.warns(RuntimeWarning, match="must have an open writer"):
            safe.write(make_record(9))
        assert safe.num_lost == 1

    def test_a_resumed_run_hides_what_it_does_again(self, tmp_path, writer_of, monkeypatch):
        if writer_of.__module__.startswith("tensorboardX"):
            monkeypatch.setattr("fastguard.sinks.tensorboard._home", lambda: "tensorboardX")
        for first, options in ((0, {}), (3, {"purge_step": 3})):
            sink = TensorBoardSink(tmp_path, **options)
            for step in range(first, first + 6):
                sink.write(make_record(step, 1.0 + first))
            sink.close()
            time.sleep(1.1)  # the name of a file has the second
        found = [(p.step, p.value) for p in self.read(tmp_path).Scalars("grad/norm")]
        assert found == [(step, 1.0 if step < 3 else 4.0) for step in range(9)]

    def test_odd_targets_are_refused(self, tmp_path):
        needs("tensorboard")
        with pytest.raises(TypeError, match="`target` must be a folder or a `SummaryWriter`, got 3"):
            TensorBoardSink(3)

    def test_hostile_names(self, tmp_path):
        needs("tensorboard")
        sink = TensorBoardSink(tmp_path, layers=99)
        sink.write(make_bad_record(0, HOSTILE, names=HOSTILE))
        sink.close()
        assert {f"grad/norm/{name}" for name in HOSTILE} <= set(self.read(tmp_path).Tags()["scalars"])

    def test_a_rank_that_is_given_no_record_makes_no_file(self, tmp_path):
        needs("tensorboard")
        TensorBoardSink(tmp_path / "run").close()
        assert not (tmp_path / "run").exists()

    def test_a_guarded_training(self, tmp_path):
        needs("tensorboard")
        model = torch.nn.Linear(3, 2)
        sinks = [TensorBoardSink(tmp_path)]
        optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters()), model, max_norm=0.1, sinks=sinks)
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.guard.observe(loss=loss)
        optimizer.guard.close()
        found = self.read(tmp_path)
        assert len(found.Scalars("grad/norm")) == len(found.Scalars("fastguard/loss")) == 4
        assert {"grad/log2_magnitude", "grad/log10_norm"} <= set(found.Tags()["histograms"])
        assert {"grad/norm/weight", "grad/norm/bias"} <= set(found.Tags()["scalars"])
        (cost,) = optimizer.guard.report().sinks
        assert cost["name"].startswith("TensorBoardSink(") and cost["num_lost"] == 0


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


def test_what_waits_is_written_when_the_process_ends(tmp_path, database):
    """Without `close`: by TensorBoard's thread, and by that of a database."""
    needs("tensorboard")
    client, experiment, uri = database
    run_id = client.create_run(experiment).info.run_id
    code = f"""
import torch, fastguard
from fastguard.sinks import MlflowSink, TensorBoardSink
model = torch.nn.Linear(3, 2)
sinks = [TensorBoardSink("tb"), MlflowSink({run_id!r}, tracking_uri={uri!r})]
optimizer = fastguard.wrap(torch.optim.SGD(model.parameters()), model, sinks=sinks)
for _ in range(3):
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [p.step for p in TestTensorBoard().read(tmp_path / "tb").Scalars("grad/norm")] == [0, 1, 2]
    assert len(client.get_metric_history(run_id, "grad/norm")) == 3


class TestMlflow:
    @pytest.fixture
    def client(self, database):
        client, experiment, self.uri = database
        self.run_id = client.create_run(experiment).info.run_id
        return client

    def test_what_was_written_is_read_back(self, client):
        sink = MlflowSink(self.run_id, tracking_uri=self.uri, prefix="train/")
        write_some(sink)
        sink.close()
        assert sink.num_lost == 0, sink.last_error
        points = client.get_metric_history(self.run_id, "train/grad/norm")
        assert [p.step for p in points] == list(range(5))
        values = [p.value for p in points]
        assert values[:2] == [1.0, 2.0] and math.isnan(values[2]) and math.isnan(values[3])  # Inf would be 1.8e308
        assert client.get_metric_history(self.run_id, "train/grad/num_infs")[3].value == 1.0
        tags = client.get_run(self.run_id).data.tags
        assert tags["train/fastguard/finding/a-rule"] == "[warning, step 4] S. R."

    def test_names_that_it_rejects_lose_nothing(self, client):
        sink = MlflowSink(self.run_id, tracking_uri=self.uri, layers=99)
        names = [*HOSTILE, "a_", "a#", "a<", ".", "./..", "..x", "x" * 401]
        sink.write(make_bad_record(0, names, names=names))
        sink.close()
        assert sink.num_lost == 0, sink.last_error
        kept = [key for key in client.get_run(self.run_id).data.metrics if key.startswith("grad/norm/")]
        assert len(kept) == len(names)

    def test_more_than_a_batch_and_a_step_again(self, client):
        sink = MlflowSink(self.run_id, tracking_uri=self.uri, tensors_every=0)
        for number, step in enumerate((*range(90), *range(60, 70))):
            sink.write(make_record(step, 1.0 + number))
        sink.close()
        assert sink.num_lost == 0, sink.last_error
        points = client.get_metric_history(self.run_id, "grad/norm")
        assert sorted(p.step for p in points) == sorted((*range(90), *range(60, 70)))

    def test_a_run_that_is_not_there_loses_records_and_says_so(self, client):
        safe = SafeSink(MlflowSink("0" * 32, tracking_uri=self.uri))
        safe.write(make_record(0))
        with pytest.warns(RuntimeWarning, match="could not write a record: MlflowException"):
            safe.close()
        assert safe.num_lost == 1
        with pytest.raises(ValueError, match="must be open to write"):
            safe.sink.write(make_record(1))

    def test_without_a_run(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        needs("mlflow")
        with pytest.raises(ValueError, match="`run` must be a run of MLflow or its id, got None, and none is active"):
            MlflowSink().write(make_record(0))

    def test_names_stay_as_they_are_where_they_can(self):
        for name in ("grad/norm/layers.0.weight", "fastguard/loss", "é b:c-d_e"):
            assert accepted(name) == name


class TestTrackio:
    @pytest.fixture
    def start(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        trackio = needs("trackio")
        for module in ("trackio.utils", "trackio.sqlite_storage"):
            home = pytest.importorskip(module)
            if hasattr(home, "TRACKIO_DIR"):
                monkeypatch.setattr(home, "TRACKIO_DIR", tmp_path)
        return lambda: trackio.init("p", name="r", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def read(self):
        from trackio.sqlite_storage import SQLiteStorage

        return SQLiteStorage.get_logs("p", "r")

    @pytest.mark.parametrize("user", [nothing, once, twice, by_step, every_third, by_epoch])
    def test_what_was_written_is_read_back_and_all_of_the_users(self, start, user):
        run = start()
        sink = TrackioSink(run, tensors_every=2)
        for step, norm in enumerate((1.0, 2.0, math.nan, math.inf, 3.0, 4.0)):
            user(run, step)
            sink.write(make_record(step, norm, skipped=not math.isfinite(norm)))
        sink.tell({"rule": "a-rule", "severity": "info", "summary": "S.", "recommendation": "", "last_step": 5})
        run.finish()
        rows = self.read()
        ours = [row for row in rows if "grad/norm" in row]
        assert [row["step"] for row in ours] == list(range(6))
        assert as_expected([float(row["grad/norm"]) for row in ours[:5]])
        theirs = {nothing: 0, once: 6, twice: 12, by_step: 6, every_third: 2, by_epoch: 3}[user]
        assert sum("mine" in row for row in rows) == theirs
        assert [row["fastguard/finding/a-rule"] for row in rows if "fastguard/finding/a-rule" in row] == [
            "[info, step 5] S."
        ]
        assert ours[0]["grad/log10_norm"]["_type"] == "trackio.histogram"

    def test_what_is_no_run_is_refused(self):
        needs("trackio")
        with pytest.raises(TypeError, match=r"`run` must be what trackio\.init returned, got 'p'"):
            TrackioSink("p")


class TestPrometheus:
    @pytest.fixture
    def sink(self):
        needs("prometheus_client")
        made = PrometheusSink(0)
        assert made.port is None  # ranks that are given no record take none
        yield made
        made.close()

    def scrape(self, sink):
        from prometheus_client.parser import text_string_to_metric_families

        address = f"http://127.0.0.1:{sink.port}/metrics"
        with urllib.request.urlopen(address, timeout=10) as answer:
            text = answer.read().decode()
        families = text_string_to_metric_families(text)
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    def test_totals_and_the_largest_since_it_asked(self, sink):
        write_some(sink)
        found = self.scrape(sink)
        totals = {"steps": 5.0, "skipped": 2.0, "clipped": 0.0, "nonfinite": 2.0}
        assert {name: found[f"fastguard_{name}_total",] for name in totals} == totals
        assert found["fastguard_findings_total", "a-rule", "warning"] == 1.0
        assert (found["fastguard_grad_norm",], found["fastguard_lr",]) == (3.0, 0.1)
        assert found["fastguard_grad_norm_largest",] == 3.0 and found["fastguard_layer_norm", "w"] == 3.0
        assert ("fastguard_grad_norm_largest",) not in self.scrape(sink)
        sink.write(make_record(5, math.nan))
        sink.write(make_record(6, 0.5))
        found = self.scrape(sink)
        assert found["fastguard_grad_norm_largest",] == 0.5 and found["fastguard_steps_total",] == 7.0

    def test_nan_is_shown_and_hostile_names_are_labels(self, sink):
        sink.write(make_bad_record(0, HOSTILE, names=HOSTILE))
        found = self.scrape(sink)
        assert math.isnan(found["fastguard_grad_norm",])
        assert {key[1] for key in found if key[0] == "fastguard_layer_norm"} == set(HOSTILE)

    def test_this_machine_alone_may_ask_and_the_port_is_free_again(self, sink):
        sink.write(make_record(0))
        assert sink._server.server_address[0] == "127.0.0.1"
        sink.close()
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10)

    def test_a_registry_of_the_users_and_a_port_that_is_taken(self, sink):
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry()
        other = PrometheusSink(registry=registry, prefix="my run")
        other.write(make_record(0))
        assert b"my_run_steps_total 1.0" in generate_latest(registry) and other.port is None
        sink.write(make_record(0))
        with pytest.raises(OSError, match="in use"):
            PrometheusSink(sink.port).write(make_record(0))


@pytest.mark.parametrize("package", ["torch.utils.tensorboard", "wandb", "mlflow", "trackio", "prometheus_client"])
def test_a_package_that_is_missing_is_named_with_its_extra(package, monkeypatch):
    kinds = {"torch.utils.tensorboard": TensorBoardSink, "wandb": WandbSink, "mlflow": MlflowSink}
    kind = {**kinds, "trackio": TrackioSink, "prometheus_client": PrometheusSink}[package]
    for name in (package, "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    extra = {"torch.utils.tensorboard": "tensorboard", "prometheus_client": "prometheus"}.get(package, package)
    with pytest.raises(ImportError, match=rf"Sink needs {extra}: pip install 'fastguard\[{extra}\]'"):
        kind("x") if kind is not PrometheusSink else kind()
