"""State on four real ranks: state dicts, checkpoints between plans, clipping, modes, other sizes, own batches."""

import pytest

from autopar.runtime.launch import CAPTURE
from tests.ahead import Ahead, scratch
from tests.end_to_end.state import CHECKS

RUN = Ahead(
    "tests.end_to_end.state:run_checks",
    4,
    lambda items: {"checks": list(CHECKS), "folder": scratch()},
    500,
    (*CAPTURE, "torch.distributed.checkpoint.state_dict", "transformers.models.gpt2.modeling_gpt2"),
)
"""For each check what every rank says."""


@pytest.mark.reads(RUN)
@pytest.mark.parametrize("name", CHECKS)
def test_state(name):
    failed = {rank: told[name] for rank, told in enumerate(RUN.results()) if told[name]}
    assert not failed, f"ranks {list(failed)}: {next(iter(failed.values()))}"
