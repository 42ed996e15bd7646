"""The history counts everything, keeps bounded memory, and lets nothing bad into a baseline."""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastguard.records import NUM_FIRST_EVENTS, NUM_LAST_EVENTS, StepStats, TensorRow, TrainingHistory
from fastguard.records.columns import ROW_BYTES
from fastguard.records.history import entry_of
from fastguard.records.running import Running, quantiles

from records import make_bad_record, make_history, make_record, make_row, make_table

NORMS = st.lists(st.floats(1e-30, 1e30) | st.sampled_from([math.nan, math.inf, 0.0]), max_size=40)


def view(history):
    """Everything that a history says, comparable even where it is NaN."""
    public = {name: getattr(history, name) for name in dir(history) if not name.startswith("_")}
    del public["revision"]  # how often, not what
    running = {name: public.pop(name).state() for name in ("log_norm", "losses", "val_losses", "lrs")}
    values = {name: value for name, value in public.items() if not callable(value)}
    return repr((values, running, history.norm_quantiles(), history.overhead_quantiles()))


class TestCounting:
    def test_empty(self):
        history = TrainingHistory()
        assert (history.num_steps, history.clip_rate, history.skip_rate) == (0, 0.0, 0.0)
        assert all(map(math.isnan, history.norm_quantiles()))
        assert history.loss == history.grad_norm == history.step == []

    def test_rates(self):
        history = TrainingHistory()
        for step in range(10):
            history.add(make_record(step, clip_coef=0.5 if step < 3 else 1.0, skipped=step >= 8))
        assert (history.num_steps, history.num_clean, history.num_clipped, history.num_skipped) == (10, 8, 3, 2)
        assert (history.clip_rate, history.skip_rate) == (3 / 8, 0.2)

    def test_skip_runs(self):
        history = TrainingHistory()
        for step, flag in enumerate("..SS.SSS.S"):
            history.add(make_record(step, skipped=flag == "S"))
        assert (history.skip_run, history.longest_skip_run, history.longest_skip_run_end) == (1, 3, 7)

    def test_clipped_but_skipped_is_not_clipped(self):
        history = TrainingHistory()
        history.add(make_record(0, clip_coef=0.5, skipped=True))
        history.add(make_record(1, math.nan, clip_coef=math.nan))
        assert history.num_clipped == 0

    def test_overhead(self):
        history = TrainingHistory()
        for step, seconds in enumerate([4e-5, None, 1e-5, 1.5e-4]):
            history.add(make_record(step), overhead_s=seconds)
        assert history.overhead_total_s == pytest.approx(2e-4, rel=1e-12)
        assert history.num_timed == 3
        assert history.overhead_quantiles((0.5,)) == (4e-5,)

    def test_last_is_the_record_itself(self):
        history, record = TrainingHistory(), make_record(3)
        history.add(record)
        assert history.last is record

    def test_scaled_steps(self):
        history = make_history([1.0, math.inf, 2.0], loss_scale=65536.0)
        assert history.num_scaled == 3
        assert history.first_events[0].loss_scale == 65536.0

    @pytest.mark.parametrize("window", [0, -1])
    def test_window_must_be_positive(self, window):
        with pytest.raises(ValueError, match=f"`window` must be at least 1, got {window}"):
            TrainingHistory(window)


class TestBaselines:
    @given(NORMS, st.integers(1, 10))
    def test_only_clean_steps_enter(self, norms, window):
        history = TrainingHistory(window)
        rng = random.Random(0)
        clean = []
        for step, norm in enumerate(norms):
            record = make_record(step, norm, skipped=rng.random() < 0.3, loss=rng.choice([None, math.nan, 2.0]))
            history.add(record)
            if record.is_finite and not record.skipped:
                clean.append(record)
        assert [entry.step for entry in history.clean] == [record.step for record in clean[-window:]]
        assert history.num_clean == len(clean)
        assert history.norm_max == max((record.norm for record in clean), default=-math.inf)
        assert history.norm_min == min((record.norm for record in clean), default=math.inf)
        logs = [math.log(record.norm) for record in clean if record.norm]
        assert history.log_norm.count == len(logs)
        if logs:
            assert history.log_norm.mean == pytest.approx(statistics.fmean(logs), rel=1e-9, abs=1e-9)
        assert all(map(math.isfinite, history.norm_quantiles())) or not clean
        assert history.step == list(range(len(norms)))[-window:]

    def test_running_loss_leaves_nan_out(self):
        history = TrainingHistory()
        for step, loss in enumerate([2.0, math.nan, math.inf, None, 4.0]):
            history.add(make_record(step, loss=loss, val_loss=loss, lr=loss))
        for running in (history.losses, history.val_losses, history.lrs):
            assert (running.count, running.mean, running.min, running.max) == (2, 3.0, 2.0, 4.0)

    def test_lists_show_nan_but_not_the_unknown(self):
        history = make_history([1.0, math.inf])
        history.add(make_record(2, loss=math.nan, lr=0.1, val_loss=3.0))
        assert history.grad_norm == [1.0, math.inf, 1.0]
        assert repr(history.loss) == "[nan]"
        assert (history.learning_rate, history.val_loss) == ([0.1], [3.0])


class TestNonFinite:
    def test_events_hold_names_in_backward_order_and_counts(self):
        history = TrainingHistory()
        history.add(make_bad_record(4, ["a", "b"]))
        history.add(make_bad_record(5, ["c"]))
        history.add(make_bad_record(6, ["b"], skipped=False))
        event = history.first_events[0]
        assert (event.step, event.names, event.num_tensors, event.num_nans, event.num_infs) == (4, ("b", "a"), 2, 2, 0)
        assert history.first_nonfinite == {"b": 2, "c": 1}
        assert (history.num_nonfinite, history.num_nonfinite_applied, history.num_skipped) == (3, 1, 2)

    def test_first_and_last_events_are_kept(self):
        history = TrainingHistory()
        for step in range(1000):
            history.add(make_bad_record(step, ["a"]))
        assert [event.step for event in history.first_events] == list(range(NUM_FIRST_EVENTS))
        assert [event.step for event in history.last_events] == list(range(1000 - NUM_LAST_EVENTS, 1000))
        assert history.num_nonfinite == 1000

    def test_names_of_an_event_are_bounded(self):
        names = [f"layer{i}" for i in range(100)]
        history = TrainingHistory()
        history.add(make_bad_record(0, names, names))
        assert history.first_events[0].names == tuple(f"layer{i}" for i in range(99, 91, -1))
        assert history.first_events[0].num_tensors == 100

    @pytest.mark.parametrize("norm", [math.inf, 1.5e308])
    def test_overflowed_norm_is_not_finite(self, norm):
        row = TensorRow(1, math.inf, 1.5e308, 1.5e308, 1.5e308, finite_norm=norm)
        history = TrainingHistory()
        history.add(StepStats(0, make_table([row, row], ["a", "b"]), skipped=True))
        assert history.num_nonfinite == 1 and not history.clean
        assert history.grad_norm == [math.inf]
        assert history.first_events[0].names == (("b", "a") if math.isinf(norm) else ())

    def test_norm_whose_square_overflows_is_as_any_other(self):
        history = TrainingHistory()
        for step in range(3):
            row = TensorRow(4, math.inf, 0.0, 1e200, 1e200, sum_sq_dev=math.inf, finite_norm=2e200)
            history.add(StepStats(step, make_table([row], ["a"])))
        assert history.num_nonfinite == 0 and history.grad_norm == [2e200] * 3
        assert history.tensors["a"].log_rms == pytest.approx(math.log(1e200))

    def test_names_of_finite_steps_are_asked_for_only_where_tensors_are_sampled(self):
        asked = []

        def names_of(step):
            def ask():
                asked.append(step)
                return ["w"]

            return ask

        history = TrainingHistory()
        for step in range(60):
            history.add(StepStats(step, make_table([make_row()], names_of(step))))
        assert asked == [0, 1, 2, 5, 10, 15, 31, 47]


class TestEqualRun:
    @pytest.mark.parametrize(
        ("norms", "expected"),
        [
            ([], 0),
            ([1.0], 1),
            ([1.0, 1.0005, 1.0009], 3),
            ([1.0, 1.0009, 0.9995], 1),  # each near its neighbour, but not all near one another
            ([1.0, 2.0, 2.0], 2),
            ([1.0, math.nan, 1.0], 2),  # non-finite steps neither count nor break it
            ([0.0, 0.0], 2),
        ],
    )
    def test_length(self, norms, expected):
        assert make_history(norms).equal_run == expected

    def test_norm_is_the_middle_of_the_run(self):
        assert make_history([5.0, 1.0, 1.0004]).equal_norm == pytest.approx(1.0002, rel=1e-12)


class TestToolkitInterface:
    def test_record(self):
        history = TrainingHistory()
        history.record(0, 2.5, 1.0, 1e-3)
        history.record(step=1, loss=2.0, grad_norm=0.5, lr=1e-3, val_loss=2.25)
        assert history.step == [0, 1]
        assert history.loss == [2.5, 2.0]
        assert history.grad_norm == [1.0, 0.5]
        assert history.learning_rate == [1e-3, 1e-3]
        assert history.val_loss == [2.25]

    def test_same_storage_as_add(self):
        by_record, by_numbers = make_history([1.0, 2.0], loss=1.0, lr=0.1), TrainingHistory()
        by_record.last = None
        by_record.tensors = by_numbers.tensors  # numbers alone tell nothing of tensors
        for step, norm in enumerate([1.0, 2.0]):
            by_numbers.record(step, 1.0, norm, 0.1)
        assert view(by_record) == view(by_numbers)

    def test_nan_norm_is_a_non_finite_step_that_was_taken(self):
        history = TrainingHistory()
        history.record(0, math.nan, math.nan, 0.1)
        assert (history.num_nonfinite, history.num_nonfinite_applied, len(history.clean)) == (1, 1, 0)
        assert history.first_nonfinite == {}


class TestState:
    def filled(self, window=8):
        history = TrainingHistory(window)
        for step in range(30):
            norm = {7: math.nan, 8: math.inf, 29: math.nan}.get(step, 1.0 + step / 3)
            skipped = not math.isfinite(norm) and step != 8
            fields = {"loss": math.nan if step == 28 else 1 / (step + 1), "lr": 0.1, "clip_coef": 1 / norm}
            history.add(make_record(step, norm, skipped=skipped, **fields), overhead_s=step * 1e-6)
        history.add(make_bad_record(30, ["a", "c"], loss_scale=math.inf))
        return history

    @pytest.mark.parametrize("make", [TrainingHistory, filled], ids=["empty", "filled"])
    def test_round_trip_through_strict_json_is_exact(self, make):
        history = self.filled() if make is not TrainingHistory else TrainingHistory(8)
        state = json.loads(json.dumps(history.state_dict(), allow_nan=False))
        twin = TrainingHistory(8)
        twin.record(99, 1.0, 1.0, 1.0)  # what was there before must go
        twin.load_state_dict(state)
        history.last = None
        assert view(twin) == view(history)
        assert twin.state_dict() == history.state_dict()

    def test_goes_on_as_if_never_saved(self):
        history, twin = self.filled(), TrainingHistory(8)
        twin.load_state_dict(history.state_dict())
        for step in range(31, 60):
            record = make_record(step, 1.0 + step % 3, loss=0.5)
            history.add(record)
            twin.add(record)
        assert view(twin) == view(history)

    def test_a_smaller_window_keeps_the_newest(self):
        history, small = self.filled(), TrainingHistory(2)
        small.load_state_dict(history.state_dict())
        assert small.step == history.step[-2:]
        assert small.num_steps == history.num_steps

    def test_state_is_a_copy(self):
        history = self.filled()
        state = history.state_dict()
        before = json.dumps(state)
        history.add(make_bad_record(31, ["b"]))
        assert json.dumps(state) == before

    def test_other_versions_are_refused(self):
        with pytest.raises(ValueError, match=r"`state` must be of version 2, got None - at `state\['version'\]`"):
            TrainingHistory().load_state_dict({})


def test_memory_is_bounded():
    history = TrainingHistory(64)

    def run(num_steps):
        for step in range(num_steps):
            norm = math.nan if step % 50 == 0 else 1.0 + step % 7
            history.add(make_record(step, norm, skipped=step % 50 == 0, loss=1.0, lr=0.1), overhead_s=1e-5)

    tracemalloc.start()
    run(2048)
    gc.collect()  # empties CPython's lists of tuples to use again
    after_some = tracemalloc.get_traced_memory()[0]
    run(3 * 2048)  # the overview has merged its buckets two times more, and stands where it stood
    gc.collect()
    after_many = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after_many - after_some < 20_000  # 6 000 steps more, not four bytes each


def test_cost_of_a_step_does_not_depend_on_the_number_of_tensors():
    record = StepStats(0, make_table([make_row()] * 1000))
    total = record.tensors.total_row()
    lean = StepStats(0, type(record.tensors)(bytes(ROW_BYTES * 1000), None, total))
    history = TrainingHistory()
    history.add(lean)  # rows of zeros with a given total: had the rows been read, the norm would be 0
    assert history.grad_norm == [record.norm]


class TestRunning:
    @given(st.lists(st.floats(-1e100, 1e100), min_size=1, max_size=50))
    def test_is_the_mean_and_spread_of_what_it_was_given(self, values):
        running = Running()
        for value in [math.nan, *values, math.inf]:
            running.add(value)
        scale = max(map(abs, values))
        assert running.count == len(values)
        assert running.mean == pytest.approx(statistics.fmean(values), abs=1e-12 * scale)
        # The spread is a root of squares: half of the digits, and squares below 1e-308 vanish.
        assert running.std == pytest.approx(statistics.pstdev(values), abs=1e-7 * scale + 1e-150)
        assert (running.min, running.max) == (min(values), max(values))

    def test_nothing_given(self):
        assert Running().count == 0 and math.isnan(Running().std)


class TestQuantiles:
    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
    def test_agrees_with_numpy(self, values, q):
        numpy = pytest.importorskip("numpy")
        assert quantiles(values, (q,))[0] == pytest.approx(numpy.quantile(values, q), rel=1e-9, abs=1e-9)

    def test_of_nothing(self):
        assert all(map(math.isnan, quantiles([], (0.0, 1.0))))


def test_records_taken_together_are_what_they_are_apart():
    apart, together = TrainingHistory(window=50), TrainingHistory(window=50)
    records = [make_record(step, 1.0 + step / 7) for step in range(40)]
    records[35] = make_bad_record(35, ["b"])
    for record in records:
        apart.add(record, overhead_s=1e-5)
    together.extend([entry_of(record, 1e-5) for record in records], records)
    assert together.num_steps == 40 and together.num_nonfinite == 1 and together.last is records[-1]
    assert together.state_dict() == apart.state_dict()
