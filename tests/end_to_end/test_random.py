"""A model with dropout and noise trains on every mesh as on one device, resumes, and drops nothing in eval mode."""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.end_to_end.random_ranks import parallel, train

TWO = [{"pin": {"dp": 2}}, {"pin": {"tp": 2, "sp": True}}]
LOWERED = [{"pin": {"tp": 2, "recompute": "full"}, "backend": "aot"}]
FOUR = [{"pin": {"dp": 2, "tp": 2}}]


@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (2, LOWERED), (4, FOUR)])
def test_masks_are_those_of_one_device(world, cases):
    results = run_ranks_local("tests.end_to_end.random_ranks:compare", world, {"cases": cases}, 250, preload=CAPTURE)
    for rank, found in enumerate(results):
        for options, errors in zip(cases, found, strict=True):
            where = f"{options} on rank {rank} of {world}: {errors}"
            assert max(errors[what] for what in ("train", "resumed", "eval", "seeded")) < 1e-9, where
            assert errors["same batch, other mask"] > 1e-6, where
            assert errors["full"], where


def test_two_modules_of_one_seed_are_alike_and_of_two_are_not():
    a, b, c = (train(parallel("1", seed), (0,))[0][0] for seed in (3, 3, 4))
    assert a == b != c
