"""One of two processes that train together, by gloo, under each framework; writes what it saw as JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=... python two_processes.py FOLDER
"""

import json
import logging
import math
import os
import sys
import warnings
from pathlib import Path

os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE="2", GROUP_RANK="0", TORCHELASTIC_RUN_ID="test")
warnings.simplefilter("ignore")

import lightning  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from torch import nn  # noqa: E402

import fastguard  # noqa: E402
from fastguard.integrations.accelerate import attach  # noqa: E402
from fastguard.integrations.lightning import FastguardCallback as LightningCallback  # noqa: E402
from fastguard.integrations.transformers import FastguardCallback  # noqa: E402

from framework_helpers import Witness, norm64  # noqa: E402

RANK = int(os.environ["RANK"])
BAD = 5  # a sample that only rank 1 sees


class Net(nn.Module):
    """Takes what the Trainer hands over, and what the others do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def data():
    """Sixteen samples; rank r sees those whose number is r modulo 2."""
    torch.manual_seed(1)
    made = [{"x": torch.randn(6), "labels": torch.randn(1)} for _ in range(16)]
    made[BAD]["x"][0] = math.nan
    return made


def told(model, guard, norms, log):
    """What this process saw of one training."""
    guard.flush()
    recent = guard.history.recent
    return {
        "recorded": [entry.norm for entry in recent],
        "norms": norms,
        "skipped": [entry.skipped for entry in recent],
        "losses": [entry.loss for entry in recent],
        "names": list(guard.last.tensors.names),
        "log": log,
        "parameters": [value for p in model.parameters() for value in p.detach().flatten().tolist()],
    }


def with_transformers(folder):
    class Watched(transformers.Trainer):
        def create_optimizer(self, *args, **kwargs):
            made = super().create_optimizer(*args, **kwargs)
            self.witness = Witness(made)
            return made

    sink = fastguard.JsonlSink(folder / "transformers.jsonl")
    args = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_grad_norm=0.5,
    )
    model = Net()
    trainer = Watched(model, args, train_dataset=data(), callbacks=[FastguardCallback(sinks=[sink])])
    trainer.train()
    log = [entry["fastguard/grad/norm"] for entry in trainer.state.log_history if "loss" in entry]
    return told(model, trainer.optimizer.guard, trainer.witness.norms, log)


def with_accelerate(folder):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, sink = Net(), fastguard.JsonlSink(folder / "accelerate.jsonl")
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    witness, log = Witness(inner), []
    loader = torch.utils.data.DataLoader(data(), batch_size=1)
    wrapped, optimizer, loader = accelerator.prepare(model, inner, loader)
    fastguard.wrap(optimizer, wrapped, max_norm=0.5, sinks=[sink])
    attach(accelerator, optimizer)
    for batch in loader:
        with accelerator.accumulate(wrapped):
            loss = wrapped(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            optimizer.guard.observe(loss=loss)
            log.append(optimizer.guard.last.norm)
    return told(model, optimizer.guard, witness.norms, log)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
        self.norms = []

    def training_step(self, batch, batch_idx):
        return self.net(**batch)["loss"]

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(norm64(self.parameters()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def with_lightning(folder):
    sink, model = fastguard.JsonlSink(folder / "lightning.jsonl"), Module()
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        logger=lightning.pytorch.loggers.CSVLogger(folder / str(RANK)),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LightningCallback(sinks=[sink])],
    )
    trainer.fit(model, torch.utils.data.DataLoader(data(), batch_size=1, shuffle=False))
    log = [float(trainer.callback_metrics["fastguard/grad/norm"])]
    return told(model.net, trainer.optimizers[0].guard, model.norms, log)


if __name__ == "__main__":
    logging.getLogger("fastguard").setLevel(logging.ERROR)
    out = Path(sys.argv[1])
    found = {make.__name__: make(out) for make in (with_transformers, with_accelerate, with_lightning)}
    (out / f"rank{RANK}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
