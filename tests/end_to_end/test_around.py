"""What users do around a parallel module on two gloo ranks: one device's numbers, or one clear line on every rank."""

import pytest

from tests.end_to_end.around import ACROSS, EQUAL, SAID

pytestmark = [pytest.mark.part("around"), pytest.mark.timeout(1200)]

PLAN, TORCH = "PlanError: ", "RuntimeError: Error(s) in loading state_dict for ParallelModule:\n\t"
EXPECTED = {
    "pickled": f"{PLAN}a parallel module belongs to its process group and cannot be pickled",
    "saved": f"{PLAN}a parallel module belongs to its process group and cannot be pickled",
    "shared": f"{PLAN}a parallel module's shards cannot be moved to shared memory",
    "called": f"{PLAN}Linear is a part of a parallel module and cannot be called alone",
    "hooked": f"{PLAN}Linear: a hook on it would not run",
    "halved": f"{PLAN}weight: torch.float64 on cpu cannot become torch.float16",
    "activated": f"{PLAN}Dropout.p: the model was captured",
    "missing": f'{TORCH}Missing key(s) in state_dict: "down.weight". ',
    "missing tied": f'{TORCH}Missing key(s) in state_dict: "tied.weight". ',
    "wrong shape": f"{TORCH}size mismatch for down.weight: copying a param with shape torch.Size([3])",
    "no tensor": f'{TORCH}While copying the parameter named "down.weight", expected torch.Tensor',
    "extra state": f'{TORCH}Unexpected key(s) in state_dict: "_extra_state". ',
    "other dtype": f"{TORCH}up.bias is torch.float32, and the plan's torch.float64",
    "optimizer of one device": f"{PLAN}AdamW: exp_avg is one device's",
    "optimizer of another stage": f"{PLAN}AdamW was loaded with groups of parameters of other stages",
    "frozen on one rank": "RuntimeMismatchError: the inputs of this call differ between ranks in shape, dtype",
    "on meta": "",
    "on meta, not persistent": f"{PLAN}once: a buffer on meta",
}


@pytest.fixture
def found(on_two_ranks):
    return on_two_ranks("around")


@pytest.mark.parametrize("what", EQUAL)
def test_equal_to_one_device(found, what):
    assert max(rank["equal"][what] for rank in found) <= 1e-9


@pytest.mark.parametrize("what", SAID)
def test_said_on_every_rank(found, what):
    for rank in found:
        said = rank["said"][what]
        assert said.startswith(EXPECTED[what]), said
        assert EXPECTED[what] or not said


def test_a_state_dict_of_another_mesh_is_loaded(found):
    for rank in found:
        assert len(rank["across"]) == len(ACROSS)
        assert max(rank["across"].values()) <= 1e-12


def test_gone_on_with_in_another_plan(found):
    assert max(rank["resumed"] for rank in found) <= 1e-9
