"""The parts of a history: the whole run in buckets, averages with spikes, tensors and samples now and then."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastguard.records import Overview, StepStats, TrainingHistory, Trend, strict_json
from fastguard.records.running import NUM_BUCKETS, Running, quantiles
from fastguard.records.sampled import NUM_BATCHES, WINDOW
from fastguard.records.samples import ModuleActivity, WeightStats
from fastguard.records.tensors import MAX_TENSORS, TensorTracks

from made_runs import activity, falling_losses, layered
from records import make_batch, make_record, make_row, make_table

VALUES = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


def through_json(state):
    return strict_json.decode(json.loads(json.dumps(strict_json.encode(state), allow_nan=False)))


@pytest.mark.parametrize("count", [0, 5, 19, 20, 21, 100, 256, 257])
@pytest.mark.parametrize("part", [Overview, Trend, Running])
def test_saved_and_loaded_a_part_goes_on_the_same(part, count):
    """At the ends of warm-ups and as buckets merge, where a run of Hypothesis is too short."""
    values = falling_losses(600)
    values[150] = values[300] = 50.0
    add = {
        Overview: lambda one, step: one.add(step, values[step], math.nan, None),
        Trend: lambda one, step: one.add(step, values[step]),
        Running: lambda one, step: one.add(values[step]),
    }[part]
    one, twin = part(), part()
    for step in range(count):
        add(one, step)
    twin.load(through_json(one.state()))
    for each in (one, twin):
        for step in range(count, 600):
            add(each, step)
    assert repr(twin) == repr(one)


class TestOverview:
    @given(st.lists(st.none() | VALUES, max_size=700))
    @settings(max_examples=30, deadline=None)
    def test_nothing_is_lost_but_places(self, losses):
        overview = Overview()
        for step, loss in enumerate(losses):
            overview.add(step, loss, 1.0, None)
        buckets = overview.buckets
        finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        assert sum(bucket.num_steps for bucket in buckets) == len(losses)
        assert sum(bucket.loss.num for bucket in buckets) == len(finite)
        assert [b.first_step for b in buckets[1:]] == [b.last_step + 1 for b in buckets[:-1]]
        assert len(buckets) <= NUM_BUCKETS
        if finite:
            known = [b.loss for b in buckets if b.loss.num]
            assert (min(k.min for k in known), max(k.max for k in known)) == (min(finite), max(finite))
            assert known[-1].last == finite[-1]
            mean = sum(k.mean * k.num for k in known) / len(finite)
            assert mean == pytest.approx(sum(finite) / len(finite), rel=1e-9, abs=1e-6)

    def test_bad_steps_are_counted_and_left_out(self):
        history = TrainingHistory()
        history.add(make_record(0, loss=1.0))
        history.add(make_record(1, loss=99.0, skipped=True))
        history.add(make_record(2, math.nan, loss=99.0))
        assert [(b.num_steps, b.loss.num) for b in history.overview.buckets] == [(1, 1), (1, 0), (1, 0)]


class TestTrend:
    def filled(self, values):
        trend = Trend()
        for step, value in enumerate(values):
            trend.add(step, value)
        return trend

    def test_follows_the_level_and_knows_its_best(self):
        trend = self.filled(falling_losses(400, noise=0.02))
        assert trend.mean == pytest.approx(0.3, rel=0.05)
        assert trend.first == pytest.approx(2.2, rel=0.1)
        assert trend.best <= trend.mean and trend.best_step > 200
        assert self.filled([100.0 - step for step in range(80)]).std <= 1.1  # a slope is not noise

    @pytest.mark.parametrize("places", [(25,), (100,), (399,), (100, 101, 110, 140)])
    def test_finds_spikes(self, places):
        values = falling_losses(400)
        values[1] = 1e4  # a wild beginning does not hide later spikes
        for at in places:
            values[at] = 9.0
        trend = self.filled(values)
        expected = [(at, 101 if at == 100 and 101 in places else at) for at in places if at != 101]
        assert [(s.first_step, s.last_step) for s in trend.spikes] == expected
        assert all(s.z > 6 and s.value == 9.0 for s in trend.spikes) and trend.first < 3.0

    def test_a_new_level_is_learnt(self):
        rng = random.Random(0)
        trend = self.filled([*(rng.gauss(1, 0.1) for _ in range(100)), *(rng.gauss(5, 0.1) for _ in range(150))])
        assert trend.mean == pytest.approx(5.0, abs=0.2)
        assert len(trend.spikes) == 1 and trend.spikes[0].last_step - trend.spikes[0].first_step >= 10

    @given(st.lists(VALUES, max_size=60))
    def test_never_holds_nan_or_inf(self, values):
        trend = self.filled(values)
        assert trend.count == sum(map(math.isfinite, values))
        assert math.isfinite(trend.mean) and math.isfinite(trend.std)


class TestRunning:
    @given(st.lists(st.floats(-1e100, 1e100), max_size=50))
    def test_is_the_mean_and_spread_of_its_values(self, values):
        running = Running()
        for value in [math.nan, *values, math.inf]:
            running.add(value)
        assert running.count == len(values)
        if not values:
            assert math.isnan(running.std)
            return
        scale = max(map(abs, values))
        assert running.mean == pytest.approx(statistics.fmean(values), abs=1e-12 * scale)
        # The spread is a root of squares: half of the digits, and squares below 1e-308 vanish.
        assert running.std == pytest.approx(statistics.pstdev(values), abs=1e-7 * scale + 1e-150)
        assert (running.min, running.max) == (min(values), max(values))

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
    def test_quantiles_agree_with_numpy(self, values, q):
        numpy = pytest.importorskip("numpy")
        assert quantiles(values, (q,))[0] == pytest.approx(numpy.quantile(values, q), rel=1e-9, abs=1e-9)
        assert all(map(math.isnan, quantiles([], (0.0, 1.0))))


_BATCH_ENDS = (*range(15, 128, 16), 159, 191, 223, 255, 319, 383, 447)


class TestTensors:
    def test_first_and_usual_norm(self):
        history = layered(200, lambda step, place: 4.0 * (1 + place) * (1 if step < 20 else 0.25))
        track = history.tensors["layers.2.weight"]
        assert math.exp(track.first_log_rms) == pytest.approx(12.0 / 4)
        assert track.norm == pytest.approx(3.0, rel=0.2)
        assert (track.numel, track.num_zero, track.zero_since) == (16, 0, None)

    def test_zeros(self):
        history = layered(100, lambda step, place: 0.0 if step >= 40 and place == 1 else 1.0 if place else 1.0 + step)
        tracks = [history.tensors[f"layers.{place}.weight"] for place in range(3)]
        assert [track.zero_since for track in tracks] == [None, 47, None]  # the first sample that saw it

    def test_bad_steps_are_not_sampled(self):
        history = TrainingHistory()
        history.add(make_record(0, math.nan))
        history.add(make_record(1, skipped=True))
        assert len(history.tensors) == 0
        history.add(make_record(2))
        assert history.tensors.last_step == 2

    @pytest.mark.parametrize(("num_tensors", "places"), [(10, _BATCH_ENDS), (100, _BATCH_ENDS), (1000, (223, 447))])
    def test_steps_between_samples_grow_with_the_number_of_tensors(self, num_tensors, places):
        tracks, names = TensorTracks(), [f"t{i}" for i in range(num_tensors)]
        table = make_table([make_row()] * num_tensors, names)
        assert [step for step in range(500) if tracks.see(step, table)] == [0, 1, 2, 5, 10, *places]

    def test_number_of_tensors_is_bounded(self):
        tracks, many = TensorTracks(), MAX_TENSORS + 5
        tracks.see(0, make_table([make_row()] * many, [f"t{i}" for i in range(many)]))
        assert len(tracks) == MAX_TENSORS

    def test_a_tensor_that_comes_later(self):
        history = TrainingHistory()
        for step in range(60):
            names = ["a", "b"] if step >= 30 else ["a"]
            history.add(StepStats(step, make_table([make_row()] * len(names), names)))
        tensors = history.tensors
        assert (tensors["b"].first_step, "c" in tensors) == (31, False)
        assert tensors.hold(["a", "b"]) and tensors.hold(["b"]) and not tensors.hold(["a", "c"])
        assert tensors.all_are("last_step", tensors.last_step) and tensors.all_are("zero_since", -1.0)
        assert not tensors.all_are("num_samples", tensors["a"].num_samples)


class TestSamples:
    def test_the_first_and_the_newest_are_kept(self):
        history = TrainingHistory()
        for step in range(1000):
            batches = (make_batch(num_samples=step), make_batch(training=False))
            samples = {"activations": (activity("act", zero=step / 1000),), "batches": batches}
            history.add(make_record(step, grad_cosine=None if step % 2 else 1.0 / (step + 1), **samples))
        window = history.activations["act"]
        assert (window.first.step, window.count, window.last.value.stats.num_zeros) == (0, 1000, 999)
        assert [s.step for s in window.recent] == list(range(1000 - WINDOW, 1000))
        steps = [step for step, _ in history.batches]
        assert len(steps) == NUM_BATCHES == 256 and steps[:8] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert steps[8:] == sorted(steps[8:]) and steps[8] == 876
        assert history.batches[-1] == (999, make_batch(training=False)) and history.batches[2].batch.num_samples == 1
        assert len(history.grad_cosines) == 256 and history.grad_cosines[-1] == (998, 1.0 / 999)

    def test_modules_that_are_no_longer_sampled(self):
        history = TrainingHistory()
        history.add(make_record(0, activations=(activity("old"), activity("both"))))
        history.add(make_record(1, activations=(activity("both"), activity("new"))))
        assert [name for name, _ in history.activations.current()] == ["both", "new"]
        assert [name for name, _ in history.activations.items()] == ["old", "both", "new"]

    @pytest.mark.parametrize(
        "item",
        [
            activity("a", nans=2, inputs_finite=None),
            activity("a", units=0),
            WeightStats("w", 4, math.inf, math.nan, 1.0),
            WeightStats("w", 4, 2.0, 0.5, 1.0, 0.25, 0.125, 3),
            make_batch(input_mean=math.nan, output_abs_max=math.inf, input_digest=2**63 - 1),
        ],
    )
    def test_items_survive_json(self, item):
        plain, kind = through_json(item.to_dict()), type(item)
        assert kind in (ModuleActivity, WeightStats, type(make_batch()))
        assert repr(kind.from_dict(plain)) == repr(kind.from_dict({**plain, "from_the_future": 1})) == repr(item)
