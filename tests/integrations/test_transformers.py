"""`FastguardCallback` in the real Trainer, with a GPT-2 of a few thousand parameters made from a config."""

import json
import logging
import math

import pytest
import torch

import fastguard

from framework_helpers import Witness, assert_norms, assert_same_parameters, gist

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
pytestmark = pytest.mark.slow

WIDTH, LENGTH, WORDS = 16, 6, 32


def tiny_model():
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        n_embd=WIDTH, n_layer=1, n_head=2, n_positions=LENGTH, vocab_size=WORDS, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def data(size, *bad):
    """Sequences of vectors; those numbered in `bad` are NaN."""
    torch.manual_seed(1)
    found = []
    for index in range(size):
        vectors = torch.randn(LENGTH, WIDTH)
        if index in bad:
            vectors[0, 0] = math.nan
        found.append({"inputs_embeds": vectors, "labels": torch.randint(WORDS, (LENGTH,))})
    return found


class Watched(transformers.Trainer):
    """Has a witness on its optimizer, and keeps what each micro-batch's loss was."""

    witness: Witness

    def create_optimizer(self, *args, **kwargs):
        is_first = self.optimizer is None
        made = super().create_optimizer(*args, **kwargs)
        if is_first:
            self.witness = Witness(made)
            self.micro_losses = []
        return made

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.micro_losses.append(loss.item())
        return loss


def train(folder, callbacks, *, examples=None, model=None, resume=None, trainer=Watched, **settings):
    """A training of some steps of four sequences."""
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **{**defaults, **settings})
    made = trainer(
        model=tiny_model() if model is None else model,
        args=args,
        train_dataset=data(64) if examples is None else examples,
        callbacks=callbacks,
    )
    made.train(resume_from_checkpoint=None if resume is None else str(resume))
    return made


def callback(**settings):
    sink = fastguard.MemorySink()
    return fastguard.integrations.transformers.FastguardCallback(sinks=[sink], **settings), sink


def test_it_clips_once_in_place_of_the_trainer(tmp_path, caplog):
    limit = 0.2
    plain = train(tmp_path, [], max_grad_norm=limit)
    guarding, sink = callback()
    with caplog.at_level(logging.INFO, "fastguard"):
        guarded = train(tmp_path, [guarding], max_grad_norm=limit)
    assert_norms(sink, guarded.witness.norms)
    assert all(record.clipped and record.norm > limit for record in sink.records)
    assert_same_parameters(plain.model, guarded.model, rtol=1e-5, atol=1e-6)
    assert guarded.args.max_grad_norm == limit  # as it was
    assert {r.levelname for r in caplog.records if "max_grad_norm" in r.getMessage()} == {"INFO"}
    assert guarded.optimizer.guard is guarding.guard


def test_its_figures_are_in_the_trainers_log_and_file(tmp_path):
    guarding, sink = callback(max_norm=0.2)
    trainer = train(tmp_path, [guarding], save_strategy="steps", save_steps=6, max_steps=6)
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    for history in (trainer.state.log_history, state["log_history"]):
        logs = [entry for entry in history if "loss" in entry]
        assert [entry["fastguard/grad/norm"] for entry in logs] == [record.norm for record in sink.records]
        assert [entry["grad_norm"] for entry in logs] == [record.norm for record in sink.records]
        assert [entry["fastguard/num_clipped"] for entry in logs] == [1, 2, 3, 4, 5, 6]
        assert [entry["fastguard/loss"] for entry in logs] == pytest.approx([e["loss"] for e in logs], rel=1e-4)
    assert guarding.guard.history.has_ended


class Reporter(transformers.TrainerCallback):
    """Stands ahead of the guard's callback, as those of the trackers do."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **others):
        self.seen.append(dict(logs))


@pytest.mark.parametrize("accepts_num_items", [True, False])
def test_losses_are_those_of_optimizer_steps(tmp_path, accepts_num_items):
    class Accumulating(Watched):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = accepts_num_items

    guarding, sink = callback()
    reporter = Reporter()
    trainer = train(
        tmp_path,
        [reporter, guarding],
        gradient_accumulation_steps=3,
        max_steps=4,
        max_grad_norm=0.0,
        trainer=Accumulating,
    )
    losses = [sum(trainer.micro_losses[i : i + 3]) for i in range(0, 12, 3)]
    assert [record.loss for record in sink.records] == pytest.approx(losses, rel=1e-6)
    assert all(2.5 < loss < 4.5 for loss in losses)  # about log(32), not a third of it
    assert_norms(sink, trainer.witness.norms)
    assert [logs["fastguard/loss"] for logs in reporter.seen if "loss" in logs] == pytest.approx(losses, rel=1e-6)


def test_a_bad_batch_is_skipped(tmp_path):
    examples = data(24, 13)
    guarding, sink = callback(max_norm=1.0)
    trainer = train(tmp_path, [guarding], examples=examples, train_sampling_strategy="sequential")
    assert [record.skipped for record in sink.records] == [False, False, False, True, False, False]
    assert trainer.witness.was_idle == [record.skipped for record in sink.records]
    bad = sink.records[3]
    assert bad.nonfinite and math.isnan(bad.loss)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["fastguard/num_skipped"] for entry in logs] == [0, 0, 0, 1, 1, 1]


def test_a_resumed_training_is_one_that_was_not_interrupted(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "lr_scheduler_type": "constant"}
    whole, _ = callback(clip=fastguard.Percentile(50.0, window=8, min_steps=2))
    uninterrupted = train(tmp_path / "whole", [whole], **settings)
    resumed, sink = callback(clip=fastguard.Percentile(50.0, window=8, min_steps=2))
    again = train(tmp_path / "again", [resumed], resume=tmp_path / "whole" / "checkpoint-3", **settings)
    assert [record.step for record in sink.records] == [3, 4, 5]
    assert gist(resumed.guard) == gist(whole.guard)
    assert_same_parameters(uninterrupted.model, again.model)


def test_a_checkpoint_without_a_guard_is_told_of(tmp_path, caplog):
    train(tmp_path, [], save_strategy="steps", save_steps=2, max_steps=2)
    guarding, _ = callback()
    with caplog.at_level(logging.WARNING, "fastguard"):
        train(tmp_path, [guarding], resume=tmp_path / "checkpoint-2", max_steps=4)
    assert any("contains no state of the guard" in record.getMessage() for record in caplog.records)
    assert guarding.guard.last.step == 1


def test_evaluation_is_observed(tmp_path):
    guarding, sink = callback()
    args = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}

    class Evaluated(Watched):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, eval_dataset=data(8), **kwargs)

    trainer = train(tmp_path, [guarding], trainer=Evaluated, **args)
    told = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [record.val_loss for record in sink.records] == [None, told[0], None, told[1]]
