"""The demo from beginning to end: a guarded training, and what becomes of its poisoned batch."""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import os
import sys
import sysconfig
import time
import webbrowser
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastguard

from ... import kernels
from ..._text import prose, shown
from ..cli import EXIT_FAILED, CommandError

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


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model: nn.Module, prompt: str, num_bytes: int, generator: torch.Generator, temperature: float = 0.7) -> str:
    """`prompt`, continued by the model; what is not printable ASCII is shown as `?`."""
    device = next(model.parameters()).device
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(num_bytes):
        logits = model(text[:, -CONTEXT:])[0, -1].float().cpu() / temperature
        drawn = torch.multinomial(logits.softmax(0), 1, generator=generator)
        text = torch.cat([text, drawn.to(device)[None]], dim=1)
    return "".join(chr(b) if 32 <= b < 127 or b == 10 else "?" for b in text[0].tolist())


def library_text(max_bytes: int = _MAX_BYTES) -> bytes:
    """The standard library's top-level modules, one after another by name, cut off at `max_bytes`."""
    folders = [Path(sysconfig.get_path("stdlib")), Path(os.__file__).parent]
    for folder in folders:
        text = bytearray()
        for path in sorted(folder.glob("*.py")):
            text += path.read_bytes().replace(b"\r\n", b"\n")
            if len(text) >= max_bytes:
                break
        if len(text) > 100 * CONTEXT:
            return bytes(text[:max_bytes])
    tried = " nor in ".join(map(str, dict.fromkeys(folders)))
    raise CommandError(f"found no *.py files of the standard library to train on, neither in {tried}")


class Corpus:
    """Batches from a text, the last twentieth of it held out."""

    def __init__(self, text: bytes, batch_size: int, seed: int, device: torch.device) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch_size = batch_size
        self.device = device
        self._num_train = int(len(text) * (1 - _HELD_OUT))
        self._generator = torch.Generator().manual_seed(seed)

    def _cut(self, low: int, high: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(low, high - CONTEXT, (count, 1), generator=generator)
        window = self.text[starts + torch.arange(CONTEXT + 1)].long().to(self.device)
        return window[:, :-1], window[:, 1:]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets [B, T] from random places of the training text."""
        return self._cut(0, self._num_train, self.batch_size, self._generator)

    def held_out(self, count: int = 64) -> tuple[Tensor, Tensor]:
        """Inputs and targets from the held-out text: the same ones at every call."""
        return self._cut(self._num_train, len(self.text), count, torch.Generator().manual_seed(1))


def run(arguments: argparse.Namespace) -> int:
    """Trains, reports, samples; the exit code."""
    started = time.perf_counter()
    try:
        kernels.resolve_backend("auto")
    except ValueError as error:
        raise CommandError(str(error)) from None
    has_cuda, device = torch.cuda.is_available(), arguments.device
    if device == "cuda" and not has_cuda:
        raise CommandError("--device cuda: torch finds no CUDA device here. Leave it out, or take --device cpu.")
    device = torch.device(("cuda" if has_cuda else "cpu") if device == "auto" else device)
    text, log = library_text(), arguments.out / "run.jsonl"
    print(f"data:   {len(text) / 1e6:.1f} MB of Python's standard library, as bytes; nothing is downloaded")
    print(f"log:    {shown(log)} (one line a step)")
    print(f"device: {device}, threads: {torch.get_num_threads()}; {arguments.steps} steps of {BATCH_SIZE} texts\n")

    corpus = Corpus(text, BATCH_SIZE, arguments.seed, device)
    torch.manual_seed(arguments.seed)
    model = CharTransformer().to(device)
    handler = logging.StreamHandler(sys.stdout)  # for warnings of the guard
    handler.setFormatter(logging.Formatter("fastguard: %(message)s"))
    handler.setLevel(logging.WARNING)
    logging.getLogger("fastguard").addHandler(handler)
    optimizer = fastguard.wrap(
        _optimizer(model),
        model,
        max_norm=MAX_NORM,
        sinks=[fastguard.JsonlSink(log, append=False, tensors_every=20)],
        activations={"overhead_budget": None},  # a budget goes by the clock, and no two logs would be the same
        weights=100,
    )
    is_right = train(model, optimizer, corpus, arguments.steps)
    guard = fastguard.Guard.of(optimizer)
    print("\n$ print(optimizer.guard.report())\n")
    print(guard.report())
    guard.close()
    if not is_right:
        print(f"\nTHE DEMO FAILED at step {arguments.steps // 2}: see above. The log is {shown(log)}")
        return EXIT_FAILED

    print("\na sample of what the model writes\n")
    generator = torch.Generator().manual_seed(arguments.seed)
    sample = write(model, "def ", 120 if arguments.quick else 320, generator)
    print("\n".join(f"    {line[:96]}".rstrip() for line in sample.splitlines()))

    print("\ncost of guarding: `fastguard bench --quick` compares it with clip_grad_norm_", flush=True)
    its_page = page_line(log, arguments.out / "run.html", opens=arguments.open)
    print(f"\ndone in {time.perf_counter() - started:.0f} s; the log is {shown(log)}\n{its_page}")
    return 0


def _optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def train(model: CharTransformer, optimizer: torch.optim.Optimizer, corpus: Corpus, num_steps: int) -> bool:
    """Trains under guard; whether the poisoned step in the middle was skipped, and changed nothing."""
    schedule = fastguard.tools.warmup_cosine(optimizer, num_steps // 10, num_steps, min_lr=0.1 * LEARNING_RATE)
    guard, block = fastguard.Guard.of(optimizer), model.blocks[POISONED_BLOCK]
    losses: list[float] = []
    is_right = False
    for step in range(num_steps):
        is_poisoned = step == num_steps // 2
        with block.register_forward_hook(_poison) if is_poisoned else contextlib.nullcontext():
            loss = loss_of(model, *corpus.batch())
            loss.backward()
        if is_poisoned:
            is_right = _is_skipped(model, optimizer, step, loss.item())
        else:
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        is_checked = step + 1 == num_steps or (step + 1) % max(1, num_steps // _NUM_VALIDATIONS) == 0
        with torch.no_grad():
            guard.observe(loss=loss, val_loss=loss_of(model, *corpus.held_out()) if is_checked else None)
        losses.append(loss.item())
        if step % max(1, num_steps // _NUM_LINES) == 0 or step + 1 == num_steps:
            assert guard.last is not None
            seen = f"grad norm {guard.last.norm:.3f}, clipped {guard.history.clip_rate:.0%}"
            print(f"step {step:>4} of {num_steps}: loss {losses[-1]:.3f}, {seen}", flush=True)
    last = losses[-max(1, num_steps // 20) :]
    print(f"\ntrained {num_steps} steps: loss {losses[0]:.2f} -> {sum(last) / len(last):.2f}")
    return is_right


def _poison(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    """A forward hook: one element of the gradient at the output becomes Inf, as by an overflow in float16."""

    def put_inf(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[0, -1, 0] = torch.inf
        return gradient

    output.register_hook(put_inf)


def _is_skipped(model: CharTransformer, optimizer: torch.optim.Optimizer, step: int, loss: float) -> bool:
    """Takes the poisoned step, compares everything with what it was before, and says what happened."""
    where = f"blocks.{POISONED_BLOCK}"
    print(
        f"\nstep {step}: poisoned on purpose. On the way back, one element of the gradient at the output of\n"
        f"  {where} becomes Inf, as an overflow in float16 would make it. The loss does not show it: {loss:.3f}."
    )
    before = _snapshot(model, optimizer)
    copied = copy.deepcopy(model)
    unguarded = _optimizer(copied)
    unguarded.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    optimizer.step()

    after = _snapshot(model, optimizer)
    num_changed = abs(len(after) - len(before)) + sum(not torch.equal(a, b) for a, b in zip(after, before))
    record = fastguard.Guard.of(optimizer).last
    assert record is not None
    for ours, theirs in zip(model.parameters(), copied.parameters()):
        theirs.grad = None if ours.grad is None else ours.grad.clone()
    torch.nn.utils.clip_grad_norm_(copied.parameters(), MAX_NORM)
    unguarded.step()
    num_ruined = sum(int((~p.isfinite()).sum()) for p in copied.parameters())
    num_parameters = sum(p.numel() for p in model.parameters())
    expected = [name for name, _ in model.named_parameters() if name.startswith(f"{where}.")][-1]
    named = record.nonfinite[0] if record.nonfinite else None
    is_right = record.skipped and num_changed == 0 and named == expected
    if is_right:
        print(
            f"checked: all {len(before)} tensors of parameters and optimizer state are bit-identical to\n"
            f"  before, and the first tensor with Inf is {named}, as reported."
        )
    else:
        print(
            f"NOT AS IT SHOULD BE: skipped {record.skipped}; {num_changed} of {len(before)} tensors "
            f"changed; first bad tensor {named}, should be {expected}."
        )
    print(
        f"without a guard: the same gradients, clip_grad_norm_ and AdamW on a copy of the model leave\n"
        f"  {num_ruined:,} of {num_parameters:,} parameters NaN or Inf.\n"
    )
    return is_right


def _snapshot(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of all parameters and of the optimizer's state."""
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *state)]


def page_line(log: Path, page: Path, *, opens: bool) -> str:
    """Writes the page of `log` over what is at `page`; returns a line that names it, or says how to get it."""
    by_hand = f"fastguard report {shown(log)} makes a page of it"
    try:
        from ...page import build_page, save_page

        save_page(build_page(log, title="fastguard demo", command="fastguard demo"), page, force=True)
    except ImportError:
        return f"{by_hand}; it needs: pip install 'fastguard[report]'"
    except OSError as error:  # a full disk, a page that may not be written over
        return f"{by_hand}; here it could not be written: {prose(error)}"
    if opens and not webbrowser.open(page.resolve().as_uri()):
        return f"the page (no browser could be opened): {shown(page)}"
    return f"the page, to open in a browser: {shown(page)}"
