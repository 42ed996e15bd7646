"""Tests against the real frameworks: slow, and skipped with a reason where one is not installed."""

import gc
import warnings
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path, config):
    """A run without slow tests does not import the frameworks, which takes seconds."""
    needs_one = collection_path.name.startswith("test_") and collection_path.name != "test_common.py"
    return True if needs_one and config.getoption("markexpr") == "not slow" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Warnings of the frameworks about one another are theirs; ours stay errors."""
    for item in items:
        if Path(item.path).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("error:::fastguard"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.fixture(autouse=True, scope="module")
def _leave_nothing_open():
    """Files that a framework has left open are closed here, and not where the last warning is an error."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "WANDB_DISABLED"):
        monkeypatch.setenv(name, "1")
