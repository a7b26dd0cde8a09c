"""Options and settings of the whole test run."""

from __future__ import annotations

import os

import pytest
import torch

from tests import ahead
from tests.warm import warm_launchers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# in ranks too: a program that was not lowered after all, a kernel that a fault of ours cost
os.environ.setdefault("PYTHONWARNINGS", "error:backend='aot',error:no kernel for")
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the files under tests/golden")


@pytest.hookimpl(trylast=True)  # of those that are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ahead.last(items)


@pytest.fixture(autouse=True, scope="session")
def _ranks(request: pytest.FixtureRequest):
    """Ranks start from a process that has imported what they need; those that tests read run beside the others."""
    with warm_launchers() as warm:
        runs = ahead.Runs()
        runs.start(request.session.items)
        yield
        runs.end(warm.stop)
