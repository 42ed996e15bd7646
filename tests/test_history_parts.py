"""The parts of a history: the whole run in buckets, averages with spikes, tensors and samples now and then."""

from __future__ import annotations

import json
import math
import random
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastguard.records import Overview, StepStats, TrainingHistory, Trend, strict_json
from fastguard.records.batches import NUM_BATCHES
from fastguard.records.overview import NUM_BUCKETS
from fastguard.records.sampled import WINDOW
from fastguard.records.samples import ModuleActivity, WeightStats
from fastguard.records.tensors import MAX_TENSORS, TensorTracks

from made_runs import activity, falling_losses, layered
from records import make_batch, make_record, make_row, make_table

VALUES = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


def through_json(state):
    return strict_json.decode(json.loads(json.dumps(strict_json.encode(state), allow_nan=False)))


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

    def test_a_million_steps_fit(self):
        overview = Overview()
        for step in range(0, 1_000_000, 10):
            overview.add(step, 1.0, 2.0, 3.0)
        assert 128 <= len(overview.buckets) <= 256
        assert overview.steps_per_bucket == 512

    def test_bad_steps_are_counted_and_left_out(self):
        history = TrainingHistory()
        history.add(make_record(0, loss=1.0))
        history.add(make_record(1, loss=99.0, skipped=True))
        history.add(make_record(2, math.nan, loss=99.0))
        assert [(b.num_steps, b.loss.num) for b in history.overview.buckets] == [(1, 1), (1, 0), (1, 0)]

    @pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
    def test_saved_and_loaded_it_goes_on_the_same(self, count):
        overview, twin = Overview(), Overview()
        for step in range(count):
            overview.add(step, 1.0 / (step + 1), None, 0.1)
        twin.load(through_json(overview.state()))
        for each in (overview, twin):
            for step in range(count, count + 300):
                each.add(step, 2.0, 1.0, math.nan)
        assert repr(twin) == repr(overview)


class TestTrend:
    def filled(self, values, trend=None):
        trend = trend or Trend()
        for step, value in enumerate(values):
            trend.add(step, value)
        return trend

    def test_follows_the_level_and_knows_its_best(self):
        trend = self.filled(falling_losses(400, noise=0.02))
        assert trend.mean == pytest.approx(0.3, rel=0.05)
        assert trend.first == pytest.approx(2.2, rel=0.1)
        assert trend.best <= trend.mean and trend.best_step > 200

    def test_a_slope_is_no_noise(self):
        trend = self.filled([100.0 - step for step in range(80)])
        assert trend.std <= 1.1

    @pytest.mark.parametrize("at", [25, 100, 399])
    def test_finds_a_spike(self, at):
        values = falling_losses(400)
        values[at] = 9.0
        spikes = self.filled(values).spikes
        assert [(s.first_step, s.last_step, s.value) for s in spikes] == [(at, at, 9.0)]
        assert spikes[0].z > 6

    def test_one_spike_does_not_hide_the_next(self):
        values = falling_losses(400)
        for at in (100, 101, 110, 140):
            values[at] = 9.0
        assert [(s.first_step, s.last_step) for s in self.filled(values).spikes] == [(100, 101), (110, 110), (140, 140)]

    def test_a_wild_beginning_does_not_blind_it(self):
        values = falling_losses(400)
        values[1] = 1e4
        values[60] = 9.0
        trend = self.filled(values)
        assert [s.first_step for s in trend.spikes] == [60]
        assert trend.first < 3.0

    def test_a_new_level_is_learnt(self):
        rng = random.Random(0)
        trend = self.filled([*(rng.gauss(1, 0.1) for _ in range(100)), *(rng.gauss(5, 0.1) for _ in range(150))])
        assert trend.mean == pytest.approx(5.0, abs=0.2)
        assert len(trend.spikes) == 1 and trend.spikes[0].last_step - trend.spikes[0].first_step >= 10

    @given(st.lists(VALUES, max_size=60))
    def test_never_holds_what_is_not_finite(self, values):
        trend = self.filled(values)
        assert trend.count == sum(map(math.isfinite, values))
        assert math.isfinite(trend.mean) and math.isfinite(trend.std)

    @pytest.mark.parametrize("count", [0, 5, 19, 20, 21, 100])
    def test_saved_and_loaded_it_goes_on_the_same(self, count):
        values = falling_losses(200)
        values[150] = 50.0
        trend, twin = self.filled(values[:count]), Trend()
        twin.load(through_json(trend.state()))
        for each in (trend, twin):
            for step in range(count, 200):
                each.add(step, values[step])
        assert repr(twin) == repr(trend)


class TestTensors:
    def test_first_and_usual_norm(self):
        history = layered(200, lambda step, place: 4.0 * (1 + place) * (1 if step < 20 else 0.25))
        track = history.tensors["layers.2.weight"]
        assert math.exp(track.first_log_rms) == pytest.approx(12.0 / 4)
        assert track.norm == pytest.approx(3.0, rel=0.2)
        assert (track.numel, track.num_zero, track.zero_since) == (16, 0, None)

    def test_zeros_since(self):
        history = layered(100, lambda step, place: 0.0 if step >= 40 and place == 1 else 1.0)
        assert history.tensors["layers.1.weight"].zero_since == 47  # the first sample that saw it
        assert history.tensors["layers.0.weight"].zero_since is None

    def test_the_same_gradient_again(self):
        history = layered(60, lambda step, place: 1.0 if place else 1.0 + step)
        assert history.tensors["layers.1.weight"].same_run == history.tensors.num_samples
        assert history.tensors["layers.0.weight"].same_run == 1

    def test_bad_steps_are_not_sampled(self):
        history = TrainingHistory()
        history.add(make_record(0, math.nan))
        history.add(make_record(1, skipped=True))
        assert len(history.tensors) == 0
        history.add(make_record(2))
        assert history.tensors.last_step == 2

    def test_steps_between_samples_grow_with_the_number_of_tensors(self):
        for num_tensors, places in ((10, range(15, 500, 16)), (100, range(15, 500, 16)), (1000, (207, 399))):
            tracks, names = TensorTracks(), [f"t{i}" for i in range(num_tensors)]
            table = make_table([make_row()] * num_tensors, names)
            sampled = []
            for step in range(500):
                before = tracks.num_samples
                tracks.see(step, table)
                if tracks.num_samples > before:
                    sampled.append(step)
            assert sampled[:5] == [0, 1, 2, 5, 10]
            assert sampled[5:] == [*places]

    def test_number_of_tensors_is_bounded(self):
        tracks = TensorTracks()
        many = MAX_TENSORS + 5
        tracks.see(0, make_table([make_row()] * many, [f"t{i}" for i in range(many)]))
        assert (len(tracks), tracks.num_untracked) == (MAX_TENSORS, 5)

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


class TestSampled:
    def test_keeps_the_first_and_the_newest(self):
        history = TrainingHistory()
        for step in range(100):
            history.add(make_record(step, activations=(activity("act", zero=step / 100),)))
        window = history.activations["act"]
        assert (window.first.step, window.count, len(window.recent)) == (0, 100, WINDOW)
        assert [s.step for s in window.recent] == list(range(100 - WINDOW, 100))
        assert window.last.value.stats.num_zeros == 990

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
        ],
    )
    def test_items_survive_json(self, item):
        kind = ModuleActivity if isinstance(item, ModuleActivity) else WeightStats
        plain = through_json(item.to_dict())
        assert repr(kind.from_dict(plain)) == repr(item)
        assert repr(kind.from_dict({**plain, "from_the_future": 1})) == repr(item)


class TestBatchesAndCosines:
    def test_the_first_eight_and_the_newest_are_kept(self):
        history = TrainingHistory()
        for step in range(1000):
            history.add(make_record(step, batches=(make_batch(num_samples=step), make_batch(training=False))))
        assert len(history.batches) == NUM_BATCHES == 256
        steps = [step for step, _ in history.batches]
        assert steps[:8] == [0, 0, 1, 1, 2, 2, 3, 3] and steps[8:] == sorted(steps[8:]) and steps[8] == 876
        assert history.batches[-1] == (999, make_batch(training=False)) and history.batches[2].batch.num_samples == 1

    def test_cosines_are_a_window(self):
        history = TrainingHistory()
        for step in range(600):
            history.add(make_record(step, grad_cosine=None if step % 2 else 1.0 / (step + 1)))
        assert len(history.grad_cosines) == 256 and history.grad_cosines[-1] == (598, 1.0 / 599)

    def test_they_survive_json(self):
        history = TrainingHistory()
        for step in range(20):
            batch = make_batch(input_mean=math.nan, output_abs_max=math.inf, input_digest=2**63 - 1 - step)
            history.add(make_record(step, batches=(batch,), grad_cosine=-0.5))
        saved = history.state_dict()
        twin = TrainingHistory()
        twin.load_state_dict(json.loads(json.dumps(saved, allow_nan=False)))
        assert repr(list(twin.batches)) == repr(list(history.batches)) and twin.grad_cosines == history.grad_cosines
        assert twin.state_dict() == saved == history.copy().state_dict()
        del saved["batches"], saved["grad_cosines"]  # as it was saved before there were any
        twin.load_state_dict(saved)
        assert len(twin.batches) == len(twin.grad_cosines) == 0 and twin.num_steps == 20

    def test_what_is_no_batch_is_named(self):
        state = TrainingHistory().state_dict()
        state["batches"] = [[[3, {**make_batch().to_dict(), "output_width": "wide"}]], []]
        where = "`state['batches']['_first'][0]['batch']['output_width']`"
        with pytest.raises(ValueError, match=re.escape(f"must be a whole number, got 'wide' - at {where}")):
            TrainingHistory().load_state_dict(state)


def test_a_step_costs_few_calls():
    """Counted, not timed: the same on every machine. Tables of 150 tensors are looked at now and then only."""
    names = [f"t{i}" for i in range(150)]
    tables = [make_table([make_row(1.0 + s % 3)] * 150, names) for s in range(20)]
    records = [StepStats(s, tables[s % 20], loss=1.0, lr=0.1) for s in range(1000)]
    for record in records:
        record.tensors.total_row()
    history = TrainingHistory()
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for record in records:
            history.add(record)
    finally:
        sys.setprofile(before)
    assert 1 < calls / len(records) < 60
