"""The demo from beginning to end: a guarded training, and what becomes of its poisoned batch."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

import fastguard

from ... import kernels
from ..._text import prose, shown
from ..cli import EXIT_FAILED, CommandError, write_page

VOCABULARY = 256
CONTEXT = 64
_MAX_BYTES = 3_000_000
_HELD_OUT = 0.05
BATCH_SIZE = 16
LEARNING_RATE = 2e-3
MAX_NORM = 1.0
POISONED_BLOCK = 1
_NUM_VALIDATIONS = 5
_NUM_LINES = 10


class TransformerBlock(nn.Module):
    """Attention and a two-layer MLP, each behind a LayerNorm and with a residual connection."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        B, T, W = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, W))
        return x + self.mlp(self.norm2(x))


class CharTransformer(nn.Module):
    """Logits [B, T, 256] of the next byte, for bytes [B, T]; 1.9 million parameters by default."""

    def __init__(self, width: int = 192, num_heads: int = 4, num_blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def library_text(max_bytes: int = _MAX_BYTES) -> bytes:
    """The standard library's top-level modules, one after another by name, cut off at `max_bytes`."""
    folders = [Path(sysconfig.get_path("stdlib")), Path(os.__file__).parent]
    for folder in folders:
        text = b"".join(path.read_bytes().replace(b"\r\n", b"\n") for path in sorted(folder.glob("*.py")))
        if len(text) > 100 * CONTEXT:
            return text[:max_bytes]
    tried = " nor in ".join(map(str, dict.fromkeys(folders)))
    raise CommandError(f"found no *.py files of the standard library to train on, neither in {tried}")


class Corpus:
    """Batches [B, T] of inputs and targets from random places of a text, the last twentieth of it held out."""

    def __init__(self, text: bytes, device: torch.device) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._device = device
        self._num_train = int(len(text) * (1 - _HELD_OUT))
        self._generator = torch.Generator().manual_seed(0)

    def loss_of(self, model: nn.Module, *, is_held_out: bool = False) -> Tensor:
        """Mean cross-entropy of the next byte, on another batch, or on the held-out one."""
        low, high = (self._num_train, len(self._text)) if is_held_out else (0, self._num_train)
        generator = torch.Generator().manual_seed(1) if is_held_out else self._generator
        starts = torch.randint(low, high - CONTEXT, (64 if is_held_out else BATCH_SIZE, 1), generator=generator)
        window = self._text[starts + torch.arange(CONTEXT + 1)].long().to(self._device)
        return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def run(num_steps: int, folder: Path) -> int:
    """Trains and reports; the exit code."""
    started = time.perf_counter()
    try:
        kernels.resolve_backend("auto")
    except ValueError as error:
        raise CommandError(str(error)) from None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text, log = library_text(), folder / "run.jsonl"
    print(f"data:   {len(text) / 1e6:.1f} MB of Python's standard library, as bytes; nothing is downloaded")
    print(f"log:    {shown(log)} (one line a step)")
    print(f"device: {device}, threads: {torch.get_num_threads()}; {num_steps} steps of {BATCH_SIZE} texts\n")

    torch.manual_seed(0)
    model = CharTransformer().to(device)
    handler = logging.StreamHandler(sys.stdout)  # for warnings of the guard
    handler.setFormatter(logging.Formatter("fastguard: %(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger("fastguard").addHandler(handler)
    optimizer = fastguard.wrap(
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
        model,
        max_norm=MAX_NORM,
        sinks=[fastguard.JsonlSink(log, append=False, tensors_every=20)],
        activations={"overhead_budget": None},  # a budget goes by the clock, and no two logs would be the same
        weights=100,
    )
    is_right = _train(model, optimizer, Corpus(text, device), num_steps)
    guard = fastguard.Guard.of(optimizer)
    print(f"\n$ print(optimizer.guard.report())\n\n{guard.report()}")
    guard.close()
    if not is_right:
        print(f"\nTHE DEMO FAILED at step {num_steps // 2}: see above. The log is {shown(log)}")
        return EXIT_FAILED
    print("\ncost of guarding: `fastguard bench` compares it with clip_grad_norm_", flush=True)
    its_page = page_line(log, folder / "run.html")
    print(f"\ndone in {time.perf_counter() - started:.0f} s; the log is {shown(log)}\n{its_page}")
    return 0


def _train(model: CharTransformer, optimizer: torch.optim.Optimizer, corpus: Corpus, num_steps: int) -> bool:
    """Trains under guard; whether the poisoned step in the middle was skipped, and changed nothing."""
    num_first = num_steps // 10
    rise = LinearLR(optimizer, 0.01, total_iters=num_first)
    fall = CosineAnnealingLR(optimizer, num_steps - num_first, 0.1 * LEARNING_RATE)
    schedule = SequentialLR(optimizer, [rise, fall], [num_first])
    guard, block = fastguard.Guard.of(optimizer), model.blocks[POISONED_BLOCK]
    is_right = False
    for step in range(num_steps):
        is_poisoned = step == num_steps // 2
        with block.register_forward_hook(_poison) if is_poisoned else contextlib.nullcontext():
            loss = corpus.loss_of(model)
            loss.backward()
        if is_poisoned:
            is_right = _is_skipped(model, optimizer, step, loss.item())
        else:
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        is_last = step + 1 == num_steps
        with torch.no_grad():
            is_checked = is_last or (step + 1) % (num_steps // _NUM_VALIDATIONS) == 0
            guard.observe(loss=loss, val_loss=corpus.loss_of(model, is_held_out=True) if is_checked else None)
        if step % (num_steps // _NUM_LINES) == 0 or is_last:
            assert guard.last is not None
            seen = f"grad norm {guard.last.norm:.3f}, clipped {guard.history.clip_rate:.0%}"
            print(f"step {step:>4} of {num_steps}: loss {loss.item():.3f}, {seen}", flush=True)
    return is_right


def _poison(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """A forward hook: one element of the gradient at the output becomes Inf, as by an overflow in float16."""
    place = torch.zeros_like(output, dtype=torch.bool)
    place[0, -1, 0] = True
    output.register_hook(lambda gradient: gradient.masked_fill(place, torch.inf))


def _is_skipped(model: CharTransformer, optimizer: torch.optim.Optimizer, step: int, loss: float) -> bool:
    """Takes the poisoned step, compares everything with what it was before, and says what happened."""
    where = f"blocks.{POISONED_BLOCK}"
    print(
        f"\nstep {step}: poisoned on purpose. On the way back, one element of the gradient at the output of\n"
        f"  {where} becomes Inf, as an overflow in float16 would make it. The loss does not show it: {loss:.3f}."
    )
    before = _snapshot(model, optimizer)
    optimizer.step()
    after = _snapshot(model, optimizer)
    num_changed = abs(len(after) - len(before)) + sum(not torch.equal(a, b) for a, b in zip(after, before))
    record = fastguard.Guard.of(optimizer).last
    assert record is not None
    expected = [name for name, _ in model.named_parameters() if name.startswith(f"{where}.")][-1]
    named = next(iter(record.nonfinite), None)
    is_right = record.skipped and num_changed == 0 and named == expected
    wrong = f"NOT AS IT SHOULD BE: skipped {record.skipped}; {num_changed} tensors changed; "
    wrong += f"first bad tensor {named}, should be {expected}."
    right = f"checked: all {len(before)} tensors of parameters and optimizer state are bit-identical to\n"
    right += f"  before, and the first tensor with Inf is {named}, as reported."
    print(f"{right if is_right else wrong}\n")
    return is_right


def _snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all parameters and of the optimizer's state."""
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def page_line(log: Path, page: Path) -> str:
    """Writes the page of `log` over what is at `page`; returns a line that names it, or says how to get it."""
    problem = write_page(log, page, "fastguard demo")
    by_hand = f"fastguard report {shown(log)} makes a page of it; {prose(problem)}"
    return by_hand if problem else f"the page, to open in a browser: {shown(page)}"
