"""Set B: DeepFD's seeded faults (Cao et al., ICSE 2022): learning rate, loss, epochs, optimizer, last activation."""

from __future__ import annotations

from ..bases import Recipe, head_of, maker
from ..case import Case, Truth
from ..harm import below_base

BASES = {
    "blob": Recipe("blob", hidden=(16, 16), lr=1e-2, num_epochs=15, least=0.75),
    "circle": Recipe("circle", hidden=(24, 16), loss="bce-logits", lr=1e-2, num_epochs=20, least=0.75),
    "digits": Recipe("digits", hidden=(64,), lr=3e-3, num_epochs=10, least=0.9),
    "wine": Recipe("wine", hidden=(16,), activation="tanh", lr=1e-2, batch_size=16, num_epochs=30, least=0.9),
    "images": Recipe("digit-images", "cnn", hidden=(8,), lr=3e-3, num_epochs=6, least=0.9),
    "friedman": Recipe("friedman", hidden=(32, 32), loss="mse", lr=1e-2, num_epochs=12, least=0.75),
}
_TOO_HIGH = Truth(("lr", "explosion", "loss", "weights", "nonfinite", "units"), ("learning-rate-too-high",))
_TOO_LOW = Truth(("lr", "loss", "weights"), ("learning-rate-too-low",))
_WRONG_LOSS = Truth(("output", "setup", "loss", "explosion"), ("wrong-loss",))
_ENDLESS_LOSS = Truth((*_WRONG_LOSS.families, "nonfinite"), ("wrong-loss",))
_TOO_SHORT = Truth(("loss", "setup"), ("stopped-too-early",))
_OPTIMIZER_TOO_SLOW = Truth(("lr", "loss", "weights", "setup"), ("learning-rate-too-low", "wrong-optimizer-settings"))


def _case(base: str, fault: str, variant: str, truth: Truth, **changes: object) -> Case:
    sound = BASES[base]
    recipe = sound.but(**changes)
    name = f"B/{base}/{fault}/{variant}"
    title = f"{fault}: {variant}"
    proof, place = below_base(), [*BASES].index(base)
    return Case(
        name, "B", f"{base}/{fault}", title, maker(recipe), __name__, truth, maker(sound), proof, place=place
    )  # fmt: skip


def _lr(base: str, lr: float) -> Case:
    return _case(base, "lr", f"{lr:g}", _TOO_HIGH if lr >= 1 else _TOO_LOW, lr=lr)


def _loss(base: str, loss: str, **changes: object) -> Case:
    return _case(base, "loss", loss, _ENDLESS_LOSS if loss == "minus-ce" else _WRONG_LOSS, loss=loss, **changes)


def _epoch(base: str, divisor: int) -> Case:
    return _case(base, "epoch", f"1-{divisor}", _TOO_SHORT, num_epochs=max(1, BASES[base].num_epochs // divisor))


def _optimizer(base: str, name: str) -> Case:
    """Another optimizer with the learning rate kept: each wants its own."""
    return _case(base, "optimizer", name, _OPTIMIZER_TOO_SLOW, optimizer=name)


def _activation(base: str, output: str) -> Case:
    layers = head_of(BASES[base].but(output=output))
    truth = Truth(("output", "setup", "loss", "units", "vanishing"), ("wrong-output-layer",), layers)
    return _case(base, "activation", output, truth, output=output)


CASES: tuple[Case, ...] = (
    *(_lr(base, lr) for base, lr in (("blob", 5.0), ("blob", 1e-12), ("circle", 3.0), ("circle", 1e-10))),
    *(_lr(base, lr) for base, lr in (("digits", 7.0), ("digits", 1e-13), ("wine", 9.0), ("wine", 1e-11))),
    *(_lr(base, lr) for base, lr in (("images", 2.0), ("images", 1e-10), ("friedman", 4.0), ("friedman", 1e-10))),
    *(_loss(base, loss) for base, loss in (("blob", "mape"), ("blob", "mae"), ("blob", "nll"))),
    *(_loss(base, loss) for base, loss in (("circle", "mape"), ("circle", "mae"))),
    *(_loss(base, loss) for base, loss in (("digits", "mape"), ("digits", "nll"), ("digits", "minus-ce"))),
    *(_loss(base, loss) for base, loss in (("wine", "mape"), ("images", "mape"), ("images", "nll"))),
    *(
        _loss(base, loss)
        for base, loss in (("friedman", "bce-logits"), ("friedman", "mape"), ("friedman", "broadcast-mse"))
    ),
    *(_epoch(base, divisor) for base, divisor in (("blob", 20), ("circle", 20), ("digits", 10), ("wine", 30))),
    *(_epoch(base, divisor) for base, divisor in (("images", 10), ("friedman", 20))),
    *(_optimizer(base, name) for base, name in (("blob", "adadelta"), ("blob", "adagrad"), ("circle", "sgd"))),
    *(_optimizer(base, name) for base, name in (("circle", "adadelta"), ("digits", "adadelta"), ("digits", "adagrad"))),
    *(_optimizer(base, name) for base, name in (("digits", "sgd"), ("wine", "adadelta"), ("wine", "sgd"))),
    *(_optimizer(base, name) for base, name in (("images", "adadelta"), ("images", "sgd"), ("friedman", "adadelta"))),
    *(_activation(base, output) for base, output in (("blob", "relu"), ("blob", "sigmoid"), ("blob", "softsign"))),
    *(
        _activation(base, output)
        for base, output in (("circle", "relu"), ("circle", "softplus"), ("circle", "softmax"))
    ),
    *(
        _activation(base, output)
        for base, output in (("digits", "relu"), ("digits", "softsign"), ("digits", "softmax"))
    ),
    *(_activation(base, output) for base, output in (("wine", "relu"), ("wine", "softmax"), ("images", "relu"))),
    *(
        _activation(base, output)
        for base, output in (("friedman", "sigmoid"), ("friedman", "tanh"), ("friedman", "softmax"))
    ),
)
