"""What a transition costs besides its collective: copies into buckets, launches of each micro-batch."""

import dataclasses

import pytest

from autopar.cost.collective import collective_s
from autopar.cost.compute import memory_bound_s
from autopar.cost.hardware import load_profile
from autopar.cost.route import Wire, routes
from autopar.layout import I, P, Parts, S
from autopar.mesh import Mesh, factor_axes

CPU, MESH = load_profile("cpu"), factor_axes(Mesh("4", device="cpu"), {"dp": 4})
SIZE_BYTES = 4096 * 256 * 4


def step_s(source, target, wire):
    """Of the transition itself, whether or not another way is cheaper."""
    found = routes(Parts(((4096,), (256,))), 4, False, (0,), MESH, CPU, 1, wire)
    return found.step_s[found.index[source,], found.index[target,]]


def test_a_bucket_is_copied_together_and_apart():
    alone = Wire(together=8.0)
    for source, target in ((S(0), I), (P, S(0))):
        copies_s = step_s(source, target, dataclasses.replace(alone, copied=True)) - step_s(source, target, alone)
        assert copies_s == pytest.approx(memory_bound_s(2 * SIZE_BYTES * 1.25, CPU), rel=1e-6)


def test_each_micro_batch_waits_anew():
    once, four = (step_s(P, I, Wire(pieces=n)) for n in (1, 4))
    axis = MESH.axes[0]
    assert once == pytest.approx(collective_s("all_reduce", SIZE_BYTES, axis, CPU), rel=1e-3)
    assert four == pytest.approx(4 * collective_s("all_reduce", SIZE_BYTES / 4, axis, CPU), rel=1e-3)
    assert four > once
