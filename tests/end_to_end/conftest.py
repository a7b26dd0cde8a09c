"""Cases of several test files on one pair of ranks, started once: to start ranks costs as much as some cases."""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.end_to_end import lowered, offload, precision

HERE = "tests.end_to_end"
PARTS = {
    "lowered": [f"{HERE}.lowered:run_cases", {"mesh": "2", "cases": lowered.pairwise()}],
    "offload": [f"{HERE}.offload:run_cases", {"cases": offload.SOME}],
    "optimizers": [f"{HERE}.optimizers:run_cases", {}],
    "precision": [f"{HERE}.precision:run_cases", {"cases": precision.CASES}],
    "scaler": [f"{HERE}.precision:run_scaler", {}],
}


@pytest.fixture(scope="session")
def on_two_ranks(request):
    """A function of a part's name: what it gave on each rank. Runs the parts that the chosen tests ask for."""
    asked = {mark.args[0] for item in request.session.items for mark in item.iter_markers("part")}
    parts = {name: PARTS[name] for name in PARTS if name in asked}
    preload = (*CAPTURE, "functorch.compile", "torch.distributed.fsdp")
    ranks = run_ranks_local(f"{HERE}.together:run", 2, {"parts": parts}, 1200, preload=preload)

    def found(name):
        for rank in ranks:
            if "error" in rank[name]:
                pytest.fail(rank[name]["error"], pytrace=False)
        return [rank[name]["found"] for rank in ranks]

    return found
