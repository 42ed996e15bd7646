"""Lines of logs, as text."""

import json

from made_runs import falling_losses, noisy_norms

ROW = [4, 4.0, 4.0, 1.0, 1.0, 0, 0, 0]


def line(**keys):
    return json.dumps({"step": 0, "loss": 1.0, "grad/norm": 1.0, **{k.replace("__", "/"): v for k, v in keys.items()}})


def healthy_log(num_steps=200, **more):
    pairs = zip(falling_losses(num_steps), noisy_norms(num_steps))
    return "".join(line(step=i, loss=loss, grad__norm=norm, **more) + "\n" for i, (loss, norm) in enumerate(pairs))
