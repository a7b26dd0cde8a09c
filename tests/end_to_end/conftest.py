"""Cases of several test files on one pair of ranks, started once: to start ranks costs as much as some cases."""

import pytest

from autopar.runtime.launch import CAPTURE
from tests.ahead import Ahead
from tests.end_to_end import lowered, offload, precision

HERE = "tests.end_to_end"
PARTS = {
    "around": [f"{HERE}.around:run_cases", {}],
    "gloo": [f"{HERE}.gloo:run_cases", {}],
    "loops": [f"{HERE}.loops:run_cases", {}],
    "lowered": [f"{HERE}.lowered:run_cases", {"mesh": "2", "cases": lowered.pairwise()}],
    "offload": [f"{HERE}.offload:run_cases", {"cases": offload.SOME}],
    "optimizers": [f"{HERE}.optimizers:run_cases", {}],
    "precision": [f"{HERE}.precision:run_cases", {"cases": precision.CASES}],
    "scaler": [f"{HERE}.precision:run_scaler", {}],
}


def payload(items):
    """The parts that the chosen tests ask for."""
    asked = {mark.args[0] for item in items for mark in item.iter_markers("part")}
    return {"parts": {name: PARTS[name] for name in PARTS if name in asked}}


RUN = Ahead(
    f"{HERE}.together:run",
    2,
    payload,
    1200,
    (*CAPTURE, "functorch.compile", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
)


@pytest.hookimpl(tryfirst=True)  # before the tests are put in order
def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("part"):
            item.add_marker(pytest.mark.reads(RUN))


@pytest.fixture(scope="session")
def on_two_ranks():
    """A function of a part's name: what it gave on each rank."""

    def found(name):
        for rank in RUN.results():
            if "error" in rank[name]:
                pytest.fail(rank[name]["error"], pytrace=False)
        return [rank[name]["found"] for rank in RUN.results()]

    return found
