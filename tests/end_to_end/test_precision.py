"""Mixed precision on real gloo ranks: errors as small as those of FSDP2 and DDP under the same policy."""

import pytest

from tests.end_to_end.precision import CASES

ROUGH = 1.5
"""Errors to the float64 result: ours over the peers'."""
pytestmark = [pytest.mark.part("precision"), pytest.mark.timeout(1200)]


@pytest.fixture
def found(on_two_ranks):
    return on_two_ranks("precision")


def test_as_exact_as_the_peers(found):
    for rank in found:
        peers = rank["peers"]
        for case, mine in zip(CASES, rank["cases"], strict=True):
            peer = peers.get(case[0], peers["policy"])
            for what in ("loss", "grads"):
                others = max(peer[what], peers["one device"][what])
                assert mine[what] <= ROUGH * others, f"{case}: {what}: {mine[what]:.2e}, the peers' {others:.2e}"
            assert mine["losses"] == pytest.approx(peer["losses"], rel=0.01), case
            assert mine["losses"][-1] < mine["losses"][0]


def test_weights_are_stored_and_updated_in_fp32(found):
    for mine in found[0]["cases"]:
        assert mine["masters"] == mine["gradients"] == ["torch.float32"]
    assert found[0]["cases"][0]["loss dtype"] == "torch.bfloat16"
    assert found[0]["cases"][4]["loss dtype"] == "torch.float64"


def test_what_is_sent(found):
    """Shards are cast before they are gathered: half the bytes; gradients are reduced in the asked dtype."""
    zero_3, zero_0 = found[0]["cases"][0]["sent"], found[0]["cases"][3]["sent"]
    assert zero_3["forward all_gather_into_tensor"] < 0.05  # a sum of the loss is taken in float32
    assert zero_3["backward all_gather_into_tensor"] == 0
    assert zero_3["backward reduce_scatter_tensor"] == 1
    assert zero_0["backward all_reduce"] < 0.05


@pytest.mark.part("scaler")
def test_a_loss_scaler_agrees_on_all_ranks(on_two_ranks):
    """A gradient that overflowed on one rank alone: no rank steps, all halve the scale."""
    for steps in on_two_ranks("scaler"):
        assert steps == [[True, 256.0], [False, 128.0], [True, 128.0]]
