"""A model with dropout and noise trains on every mesh as on one device, resumes, and drops nothing in eval mode."""

import pytest

from tests.ahead import Ahead
from tests.end_to_end.random_ranks import parallel, train

TWO = [{"pin": {"dp": 2}}, {"pin": {"tp": 2, "sp": True}}]
LOWERED = [{"pin": {"tp": 2, "recompute": "full"}, "backend": "aot"}]
FOUR = [{"pin": {"dp": 2, "tp": 2}}]


RUNS = [
    pytest.param(world, cases, run, marks=pytest.mark.reads(run), id=f"{world}-{len(cases)}")
    for world, cases in ((2, [*TWO, *LOWERED]), (4, FOUR))
    for run in [Ahead("tests.end_to_end.random_ranks:compare", world, {"cases": cases}, 500)]
]


@pytest.mark.parametrize(("world", "cases", "run"), RUNS)
def test_masks_are_those_of_one_device(world, cases, run):
    for rank, found in enumerate(run.results()):
        for options, errors in zip(cases, found, strict=True):
            where = f"{options} on rank {rank} of {world}: {errors}"
            assert max(errors[what] for what in ("train", "resumed", "eval", "seeded")) < 1e-9, where
            assert errors["same batch, other mask"] > 1e-6, where
            assert errors["full"], where


def test_two_modules_of_one_seed_are_alike_and_of_two_are_not():
    a, b, c = (train(parallel("1", seed), (0,))[0][0] for seed in (3, 3, 4))
    assert a == b != c
