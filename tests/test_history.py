"""The history: laws that hold for any run (split and merge, resume, copy), what it counts, and bounded memory."""

import gc
import json
import logging
import math
import random
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastguard.records import NUM_FIRST_EVENTS, NUM_LAST_EVENTS, Entry, StepStats, TensorRow, TrainingHistory, running
from fastguard.records import history as core
from fastguard.records.columns import ROW_BYTES
from fastguard.records.history import entry_of
from fastguard.records.samples import WeightStats

from made_runs import activity
from records import make_bad_record, make_batch, make_history, make_record, make_row, make_table

NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
LOSSES = st.none() | st.floats(-1e3, 1e3) | NOT_FINITE | st.just(1e200)
SAMPLES = st.sampled_from(
    [
        *[{}] * 5,
        {"activations": (activity("act"), activity("bad", nans=1)), "grad_cosine": 0.5},
        {"weights": (WeightStats("w", 40, 2.0, 0.5, 1.0, 0.2, 0.1),), "batches": (make_batch(),)},
    ]
)


@st.composite
def runs(draw, max_size=40):
    """Pairs of a record and the seconds that guarding took, for any run."""
    steps = []
    for step in range(draw(st.integers(0, max_size))):
        norm = draw(st.floats(1e-30, 1e30) | st.sampled_from([1.0, 1.0, 0.0, math.nan, math.inf]))
        record = make_record(
            step,
            norm,
            skipped=draw(st.booleans()) if not math.isfinite(norm) else draw(st.integers(0, 9)) == 0,
            clip_coef=draw(st.sampled_from([1.0, 1.0, 0.5])),
            loss=draw(LOSSES),
            val_loss=draw(st.none() | LOSSES),
            lr=draw(st.none() | st.just(0.1)),
            loss_scale=draw(st.none() | st.just(1024.0)),
            **draw(SAMPLES),
        )
        steps.append((record, draw(st.none() | st.floats(0.0, 1e-3))))
    return steps


def history_of(steps, history=None):
    history = TrainingHistory(8) if history is None else history
    for record, seconds in steps:
        history.add(record, seconds)
    return history


def state_of(history):
    """All that is saved, as text: NaN is equal to itself."""
    return json.dumps(history.state_dict(), allow_nan=False)


class TestLaws:
    @given(runs(), st.data())
    def test_steps_taken_together_are_to_the_bit_what_they_are_apart(self, steps, data):
        together, at = TrainingHistory(8), 0
        while at < len(steps):
            some = steps[at : at + data.draw(st.integers(1, 20))]
            together.extend([entry_of(*pair) for pair in some], [record for record, _ in some])
            at += len(some)
        assert state_of(together) == state_of(history_of(steps))

    @pytest.mark.parametrize(("num", "oddity", "seed"), [(900, 0.02, 1), (600, 0.2, 2), (9000, 0.001, 3)])
    def test_the_extension_does_what_python_does(self, num, oddity, seed, monkeypatch):
        entries, rng = random_entries(num, seed, oddity), random.Random(seed)
        in_python, together, at = TrainingHistory(64), TrainingHistory(64), 0
        while at < num:
            size = rng.choice((1, 3, 4, 19, 32))
            together.extend(entries[at : at + size])
            at += size
        monkeypatch.setattr(core, "_fold_usual", None)
        in_python.extend(entries)
        assert state_of(together) == state_of(in_python)
        assert {type(one) for one in together.recent} == {Entry}
        assert {type(bucket.loss) for bucket in together.overview.buckets} == {running.Summary}

    @given(runs(), st.integers(0, 40))
    def test_resumed_or_copied_it_goes_on_as_if_nothing_had_happened(self, steps, at):
        whole, first = history_of(steps), history_of(steps[:at])
        resumed = TrainingHistory(8)
        resumed.record(99, 1.0, 1.0, 1.0)  # is replaced
        resumed.load_state_dict(json.loads(state_of(first)))
        before, twin = state_of(first), first.copy()
        assert state_of(resumed) == state_of(twin) == before and twin.last is first.last
        for history in (resumed, twin):
            assert state_of(history_of(steps[at:], history)) == state_of(whole)
        assert state_of(first) == before

    @given(runs())
    def test_only_clean_steps_enter_the_baseline(self, steps):
        history, records = history_of(steps), [record for record, _ in steps]
        clean = [record for record in records if record.is_finite and not record.skipped]
        assert [entry.step for entry in history.clean] == [record.step for record in clean[-8:]]
        assert (history.num_steps, history.num_clean) == (len(records), len(clean))
        assert history.num_skipped == sum(record.skipped for record in records)
        assert history.num_clipped == sum(record.clipped for record in clean)
        assert history.num_nonfinite_applied == sum(not (one.is_finite or one.skipped) for one in records)
        losses = [one.loss for one in clean if one.loss is not None and math.isfinite(one.loss)]
        assert (history.losses.count, history.losses.max) == (len(losses), max(losses, default=-math.inf))
        assert history.norm_max == max((record.norm for record in clean), default=-math.inf)
        assert all(map(math.isfinite, history.norm_quantiles())) or not clean
        assert history.step == [record.step for record in records][-8:]

    def test_a_smaller_window_keeps_the_newest(self):
        history, small = make_history([1.0] * 30), TrainingHistory(2)
        small.load_state_dict(history.state_dict())
        assert small.step == [28, 29] and small.num_steps == 30
        with pytest.raises(ValueError, match="`window` must be at least 1, got 0"):
            TrainingHistory(0)


def random_entries(num, seed, oddity):
    rng, entries = random.Random(seed), []
    odd = [
        {"norm": 90.0, "loss": 70.0},
        {"loss": math.nan},
        {"loss": None},
        {"loss": 1e160},
        {"val_loss": 3.0},
        {"skipped": True, "clip_coef": 0.0},
        {"norm": math.nan},
        {"norm": 0.0},
        {"lr": None},
        {"loss_scale": 512.0},
        {"overhead_s": None},
        {"clip_coef": 0.5},
    ]
    for step in range(num):
        norm, loss = rng.lognormvariate(0, 0.3), 2.0 + rng.random()
        entry = Entry(step, norm, 1.0, False, loss, None, 1e-3, None, 1e-6 * rng.random())
        entries.append(entry._replace(**rng.choice(odd)) if rng.random() < oddity else entry)
    return entries


class TestSavedStates:
    def test_an_error_names_the_place_and_changes_nothing(self):
        history = make_history([1.0])
        before, state = state_of(history), TrainingHistory().state_dict()
        state["batches"] = [[3, {**make_batch().to_dict(), "output_width": "wide"}]]
        place = r"`state\['batches'\]\[0\]\['batch'\]\['output_width'\]`"
        for wrong, message in (
            (state, f"must be a whole number, got 'wide' - at {place}"),
            ({}, r"`state` must be of version 3, got None - at `state\['version'\]`"),
        ):
            with pytest.raises(ValueError, match=message):
                history.load_state_dict(wrong)
        assert state_of(history) == before


class TestCounting:
    def test_rates_and_skip_runs(self):
        history = TrainingHistory()
        for step, flag in enumerate("..SSc.SSS.S"):
            history.add(make_record(step, clip_coef=0.5 if flag in "cS" else 1.0, skipped=flag == "S"))
        assert (history.skip_run, history.longest_skip_run, history.longest_skip_run_end) == (1, 3, 8)
        assert (history.clip_rate, history.skip_rate) == (1 / 5, 6 / 11)  # a skipped step is not clipped


class TestNonFinite:
    def test_events_hold_names_in_backward_order_and_counts(self):
        history = TrainingHistory()
        history.add(make_bad_record(4, ["a", "b"], loss_scale=65536.0))
        history.add(make_bad_record(5, ["c"]))
        history.add(make_bad_record(6, ["b"], skipped=False))
        event = history.first_events[0]
        assert (event.step, event.names, event.num_tensors, event.num_nans, event.num_infs) == (4, ("b", "a"), 2, 2, 0)
        assert event.loss_scale == 65536.0 and history.first_nonfinite == {"b": 2, "c": 1}
        assert (history.num_nonfinite, history.num_nonfinite_applied, history.num_skipped) == (3, 1, 2)

    def test_the_first_and_the_newest_events_and_a_few_names_are_kept(self):
        names, history = [f"layer{i}" for i in range(100)], TrainingHistory()
        for step in range(1000):
            history.add(make_bad_record(step, names if not step else ["a"], names if not step else ["a"]))
        assert [event.step for event in history.first_events] == list(range(NUM_FIRST_EVENTS))
        assert [event.step for event in history.last_events] == list(range(1000 - NUM_LAST_EVENTS, 1000))
        assert history.first_events[0].names == tuple(f"layer{i}" for i in range(99, 91, -1))
        assert history.num_nonfinite == 1000 and history.first_events[0].num_tensors == 100

    @pytest.mark.parametrize("norm", [math.inf, 1.5e308])
    def test_a_norm_that_overflowed_is_not_finite(self, norm):
        row = TensorRow(1, math.inf, 1.5e308, 1.5e308, 1.5e308, finite_norm=norm)
        history = TrainingHistory()
        history.add(StepStats(0, make_table([row, row], ["a", "b"]), skipped=True))
        assert history.num_nonfinite == 1 and not history.clean and history.grad_norm == [math.inf]
        assert history.first_events[0].names == (("b", "a") if math.isinf(norm) else ())


class TestCost:
    def test_memory_is_bounded(self):
        history = TrainingHistory(64)

        def run(num_steps):
            for step in range(num_steps):
                norm = math.nan if step % 50 == 0 else 1.0 + step % 7
                history.add(make_record(step, norm, skipped=step % 50 == 0, loss=1.0, lr=0.1), overhead_s=1e-5)

        tracemalloc.start()
        run(2048)
        gc.collect()  # empties CPython's free lists
        after_some = tracemalloc.get_traced_memory()[0]
        run(3 * 2048)  # the overview has merged its buckets twice more, and is as large as before
        gc.collect()
        after_many = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert after_many - after_some < 20_000  # for 6,000 more steps

    def test_rows_and_names_are_read_at_a_few_steps_only(self):
        record = StepStats(0, make_table([make_row()] * 1000))
        lean = StepStats(0, type(record.tensors)(bytes(ROW_BYTES * 1000), None, record.tensors.total_row()))
        history, read = TrainingHistory(), []
        history.add(lean)  # rows of zeros with another total: had the rows been added up, the norm would be 0
        assert history.grad_norm == [record.norm]
        for step in range(1, 60):
            names = lambda step=step: read.append(step) or ["w"]  # noqa: E731
            history.add(StepStats(step, make_table([make_row()], names)))
        assert read == [1, 2, 5, 10, 15, 31, 47]

    @pytest.mark.skipif(core._fold_usual is None, reason="needs the C++ extension")
    def test_a_batch_of_usual_steps_is_one_call(self):
        usual = [entry._replace(norm=1.0, loss=2.0) for entry in random_entries(1132, 0, 0.0)]
        history = TrainingHistory()
        history.extend(usual[:1100])
        assert calls_of(lambda: history.extend(usual[1100:])) < 10 and history.num_steps == 1132


def calls_of(run):
    """How many Python functions `run` calls."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


RANDOM = [*((20, seed) for seed in range(3)), *(pytest.param(240, seed, marks=pytest.mark.slow) for seed in (100, 101))]


@pytest.mark.parametrize(("number", "seed"), RANDOM)
def test_random_histories_logs_and_states_crash_nothing(number, seed, caplog):
    histories = pytest.importorskip("benchmarks.reliability.histories", reason="no benchmarks/ here")
    with caplog.at_level(logging.getLogger("fastguard").level, "fastguard"):  # which it sets
        found = histories.run(number, seed)
    assert not found["failed"], found["failed"]
    assert sum(found["outcomes"].values()) == found["num_cases"] == number
    assert number < 240 or {outcome.partition(":")[0] for outcome in found["outcomes"]} == histories.CASES.keys()
