"""A pytest plug-in that guards every optimizer that tests make, from the end of its constructor on.

The tests of this folder run so in all modes. Tests from elsewhere, as those of a checkout of PyTorch, run guarded with

    PYTHONPATH=tests/torch_suite python -m pytest -p guard_everything --guard-everything "max_norm=1e9" test_optim.py

and have to give what they give with `--guard-everything off`.
Copies made by `copy.deepcopy` and `pickle` are not guarded: no constructor makes them.
"""

import contextlib
import functools
import weakref

import pytest
import torch
from torch.optim import Optimizer

import fastguard

# Arguments of `wrap`; None where nothing is guarded.
MODES = {
    "off": None,
    "idle": {},
    "max_norm=1e9": {"max_norm": 1e9},
    "skip_nonfinite=False": {"skip_nonfinite": False},
    # Records are delivered, weights sampled and rules asked at every step: none goes the short way.
    "watched": {"max_norm": 1e9, "weights": 1, "check_every": 1, "sinks": [lambda record: None]},
}


def _all_classes(cls):
    yield cls
    for subclass in cls.__subclasses__():
        yield from _all_classes(subclass)


@contextlib.contextmanager
def guarding(settings):
    """Within, every optimizer is guarded as it is made, also of classes defined there. Gives the guards; holds none."""
    guards = []
    if settings is None:
        yield guards
        return
    inits = []

    def patch(cls):
        if "__init__" not in cls.__dict__:
            return  # it has its parent's
        init = cls.__init__

        @functools.wraps(init)
        def guarded_init(self, *args, **kwargs):
            init(self, *args, **kwargs)
            if type(self).__init__ is guarded_init:  # the outermost constructor is over
                guards.append(weakref.ref(fastguard.wrap(self, **settings).guard))

        inits.append((cls, init))
        cls.__init__ = guarded_init

    def patch_new(cls, **kwargs):
        super(Optimizer, cls).__init_subclass__(**kwargs)
        patch(cls)

    for cls in list(dict.fromkeys(_all_classes(Optimizer))):
        patch(cls)
    Optimizer.__init_subclass__ = classmethod(patch_new)
    try:
        yield guards
    finally:
        del Optimizer.__init_subclass__
        for cls, init in reversed(inits):
            cls.__init__ = init


def pytest_addoption(parser):
    parser.addoption(
        "--guard-everything", choices=list(MODES), default="off", help="guard every optimizer that a test makes"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with guarding(MODES[item.config.getoption("--guard-everything")]):
        return (yield)


def pytest_report_header(config):
    mode = config.getoption("--guard-everything")
    return f"optimizers: guarded by fastguard {fastguard.__version__}, {mode}; torch {torch.__version__}"
