"""Functional collectives on gloo by our own kernels: the same values, and nothing left behind."""

import pytest

pytestmark = [pytest.mark.part("gloo"), pytest.mark.timeout(1200)]


def test_values_are_those_of_the_ops(on_two_ranks):
    for rank in on_two_ranks("gloo"):
        assert len(rank["equal"]) == 15
        for what, (found, expected) in rank["equal"].items():
            assert found == expected, what


def test_no_work_is_left(on_two_ranks):
    assert [rank["left"] for rank in on_two_ranks("gloo")] == [0, 0]
