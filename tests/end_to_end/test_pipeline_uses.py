"""What training loops do with a pipeline: scaling, other batches, evaluation, checkpoints, gradients of inputs."""

from autopar.runtime.launch import CAPTURE, run_ranks_local

BOUND = 1e-9
EXACT = ("scaled", "another batch", "eval", "sharded batch", "loaded", "input gradient", "dropout")


def test_uses():
    for found in run_ranks_local("tests.end_to_end.pipeline_uses:uses", 2, {}, 250, preload=CAPTURE):
        for use in EXACT:
            assert isinstance(found[use], float), f"{use}: {found[use]}"
            assert found[use] <= BOUND, f"{use}: {found[use]}"
        assert "handed over once" in found["twice"]
        assert "outputs='gather'" in found["another output"]
        done, of = found["handed over"].split(" of ")
        assert done == of


def test_a_checkpoint_goes_into_another_layout(tmp_path):
    payload = {"path": str(tmp_path / "checkpoint")}
    for found in run_ranks_local("tests.end_to_end.pipeline_uses:save_and_load", 2, payload, 200, preload=CAPTURE):
        assert found == 0.0
