"""Fixtures that all tests share."""

import atexit
import gc
import logging
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from fastguard import BackendUnavailableError, _env, kernels
from fastguard.kernels.registry import BACKENDS

import interpreting
from left_out import LeftOut

settings.register_profile(
    "fastguard",
    max_examples=60 if os.environ.get("CI") else 25,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # `backend` is the same for all examples
)
settings.load_profile("fastguard")

# Tests of what lies in benchmarks/, beside the package, are skipped where only the tests were copied.
ROOT = Path(__file__).resolve().parents[1]
if (ROOT / "benchmarks").is_dir():
    sys.path.append(str(ROOT))

STATUS = kernels.backends()
# Where Triton can neither compile for a GPU nor interprets, there are no tests of it: see left_out.py.
NAMES = [name for name, status in STATUS.items() if status.available or name != "triton"]
INTERPRETING = _env.triton_interpreter() and STATUS["triton"].available


def is_here(device):
    """Whether tensors can be made on `device`."""
    return device == "cpu" or getattr(torch, device).is_available()


if INTERPRETING:
    interpreting.mend()

if not any(map(is_here, ("cuda", "xpu", "mps"))):
    # Its own formats the stack for each kind of accelerator that might come up later: 1.5 ms a call.
    torch.manual_seed = torch.default_generator.manual_seed


def pytest_configure(config):
    config.pluginmanager.register(LeftOut())


def pytest_collection_finish():
    gc.freeze()  # what is there by now stays: tests that collect garbage need not look through it
    # pytest adds its handlers to each logger that does not propagate, six times a test; torch has forty.
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True


def pytest_unconfigure():
    if "triton" in sys.modules:  # after this, as Python ends, its bindings list on stderr what they never free
        atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(params=NAMES)
def backend(request):
    """Every backend; one that cannot run is skipped, with its reason. Tensors are made where it reads them: on a GPU if
    it is a compiled one's turn."""
    status = STATUS[request.param]
    if not status.available:
        pytest.skip(f"backend {request.param!r} cannot run here: {status.reason}")
    accepts = BACKENDS[request.param].accepts
    device = next(name for name in ("cpu", "cuda", "xpu", "mps") if accepts(torch.device(name)) and is_here(name))
    with torch.device(device), warnings.catch_warnings():
        if INTERPRETING:  # NumPy computes: it warns of overflows and NaNs, and of what the interpreter asks of it
            warnings.simplefilter("ignore", RuntimeWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
        yield request.param


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test of an operation that a backend does not have is skipped, with the reason."""
    try:
        return (yield)
    except BackendUnavailableError as error:
        if "backend" in pyfuncitem.fixturenames and " has no " in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def interpreted():
    """For tests that run the GPU kernels on CPU tensors; they are left out where Triton does not interpret."""
    with warnings.catch_warnings():  # NumPy computes, and warns of overflows and NaNs
        warnings.simplefilter("ignore", RuntimeWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(20240)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Most tensors here are tiny: threads that wait for one another would only cost time."""
    used = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(used)


@pytest.fixture
def threads():
    """Sets the number of threads, for tests that are about threads or set it; afterwards it is one again."""
    yield torch.set_num_threads
    torch.set_num_threads(1)


@pytest.fixture
def one_process(tmp_path):
    """torch.distributed with this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("this torch was built without gloo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
