"""`fastguard bench` on tiny cases. Nothing here asserts a time."""

import pytest
import torch

from fastguard.commands import bench

SHAPES = ((3,), (70, 50), (), (1,), (4096,), (2, 3, 5, 7))


def test_clipping_is_compared():
    times = [turn for turns in bench.measure_clipping(0.0, SHAPES) for turn in turns]
    assert all(turn.keys() == {"fastguard", "torch"} and min(turn.values()) > 0 for turn in times)


def test_whole_steps_train_to_the_same_bits_and_are_compared():
    times = [turn for turns in bench.measure_steps(0.0, width=8) for turn in turns]
    assert all(turn.keys() == {"plain", "fastguard", "torch"} for turn in times)
    assert len({tuple(turn) for turn in times}) > 1  # the order changes


def test_other_parameters_are_refused():
    with pytest.raises(bench.WrongResultError, match="of the torch run"):
        bench.require_equal({"plain": [torch.ones(2)], "torch": [torch.zeros(2)]})


def test_another_norm_is_refused(monkeypatch):
    monkeypatch.setattr(bench.fastguard, "clip_grad_norm_", lambda parameters, limit: torch.tensor(1.0))
    with pytest.raises(bench.WrongResultError, match="by torch"):
        bench.measure_clipping(0.0, SHAPES)


def test_a_row_has_medians_and_the_ratio_of_what_is_added():
    turn = {"plain": 500_000, "torch": 700_000, "fastguard": 550_000}
    assert bench.row("tiny", [[turn]] * 3).split() == ["tiny", "200", "us", "50", "us", "0.25", "0.25", "–", "0.25"]
    assert bench.row("tiny", [[{**turn, "torch": 0}]]).split()[-1] == "us"


def test_the_command_prints_a_table(monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure_steps", lambda: bench.in_turn(dict.fromkeys(("torch", "fastguard"), int), 0.0))
    monkeypatch.setattr(bench, "measure_clipping", bench.measure_steps)
    assert bench.main([]) == 0
    printed = capsys.readouterr().out
    assert "clip, GPT-2" in printed and torch.__version__ in printed and "min – max" in printed
