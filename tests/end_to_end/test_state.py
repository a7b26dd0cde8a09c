"""State on four real ranks: state dicts, checkpoints between plans, clipping, modes, other sizes, own batches."""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.end_to_end.state import CHECKS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """For each check what every rank says: all run in one group of ranks."""
    payload = {"checks": list(CHECKS), "folder": str(tmp_path_factory.mktemp("checkpoint"))}
    preload = (*CAPTURE, "torch.distributed.checkpoint.state_dict", "transformers.models.gpt2.modeling_gpt2")
    return run_ranks_local("tests.end_to_end.state:run_checks", 4, payload, 280, preload=preload)


@pytest.mark.parametrize("name", CHECKS)
def test_state(results, name):
    failed = {rank: told[name] for rank, told in enumerate(results) if told[name]}
    assert not failed, f"ranks {list(failed)}: {next(iter(failed.values()))}"
