"""Kinds of models that users report against other tools: on two ranks as in eager, data and tensor parallel."""

import pytest

from autopar.runtime.launch import CAPTURE, run_ranks_local

BOUND = 1e-9


@pytest.mark.slow
def test_reported_kinds_are_as_in_eager():
    for found in run_ranks_local("tests.end_to_end.reported:errors", 2, {"ranks": 2}, 280, preload=CAPTURE):
        assert len(found) == 16
        for case, error in found.items():
            assert isinstance(error, float), f"{case}: {error}"
            assert error < BOUND, f"{case}: {error}"
