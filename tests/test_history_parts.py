"""The parts of a history: the whole run in buckets, averages with spikes, tensors and samples now and then."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastguard.records import Overview, StepStats, TrainingHistory, Trend, strict_json
from fastguard.records.running import NUM_BUCKETS, Running
from fastguard.records.sampled import NUM_BATCHES, WINDOW
from fastguard.records.samples import ModuleActivity, WeightStats

from made_runs import activity, falling_losses
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


class TestTrend:
    def filled(self, values):
        trend = Trend()
        for step, value in enumerate(values):
            trend.add(step, value)
        return trend

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


class TestTensors:
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
