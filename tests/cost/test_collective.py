"""Collectives: hand-computed times, properties, and published measurements."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.collective import collective_s, lines
from autopar.cost.hardware import Link, load_profile
from autopar.mesh import Axis, Mesh, factor_axes

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
INNER = Link("inner", 100e9, 1e-6)
OUTER = Link("outer", 10e9, 10e-6)
H100 = load_profile("h100-sxm")
TWO_LEVELS = dataclasses.replace(H100, links=(INNER, OUTER))


def axis(*spans):
    return Axis("a", math.prod(ranks for _, ranks in spans), None, spans, 1)


# 4 ranks in a node, 1 GB: 100 GB/s, 1 us a hop.
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_gather", 3 * 1e-6 + 0.75 * 1e9 / 100e9),
        ("reduce_scatter", 3 * 1e-6 + 0.75 * 1e9 / 100e9),
        ("all_reduce", 6 * 1e-6 + 1.5 * 1e9 / 100e9),
        ("all_to_all", 3 * 1e-6 + 0.75 * 1e9 / 100e9),
        ("broadcast", 3 * 1e-6 + 1e9 / 100e9),
        ("send", 1e-6 + 1e9 / 100e9),
        ("none", 0.0),
    ],
)
def test_inside_a_node(kind, seconds):
    assert collective_s(kind, 1e9, axis((0, 4)), TWO_LEVELS) == pytest.approx(seconds, rel=1e-12)


def test_a_library_without_a_reduce_scatter():
    gloo = dataclasses.replace(H100, links=(dataclasses.replace(INNER, scatter_traffic=2.0),))
    for size in (1e3, 1e9):
        everywhere = collective_s("all_reduce", size, axis((0, 4)), gloo)
        assert collective_s("reduce_scatter", size, axis((0, 4)), gloo) == pytest.approx(everywhere)
        assert collective_s("all_gather", size, axis((0, 4)), gloo) == pytest.approx(everywhere / 2)


# 3 nodes of 4: a ring of 12 crosses each node's four links at once, 40 GB/s; 9 hops inside nodes, 2 between them.
@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_gather", 9 * 1e-6 + 2 * 10e-6 + 11 / 12 * 1e9 / 40e9),
        ("reduce_scatter", 9 * 1e-6 + 2 * 10e-6 + 11 / 12 * 1e9 / 40e9),
        ("all_reduce", 2 * (9 * 1e-6 + 2 * 10e-6) + 2 * 11 / 12 * 1e9 / 40e9),
        ("all_to_all", 3 * 1e-6 + 2 * 10e-6 + 8 / 12 * 1e9 / 10e9),
        ("broadcast", 9 * 1e-6 + 2 * 10e-6 + 1e9 / 40e9),
        ("send", 10e-6 + 1e9 / 10e9),
    ],
)
def test_across_nodes(kind, seconds):
    assert collective_s(kind, 1e9, axis((0, 4), (1, 3)), TWO_LEVELS) == pytest.approx(seconds, rel=1e-12)


def test_an_axis_of_nodes_uses_one_link_a_device():
    time_s = collective_s("all_gather", 1e9, axis((1, 4)), TWO_LEVELS)
    assert time_s == pytest.approx(3 * 10e-6 + 0.75 * 1e9 / 10e9)


def test_small_all_reduce_takes_the_tree():
    # 16 nodes: 2 x 4 hops of a tree, not 2 x 15 of a ring.
    assert collective_s("all_reduce", 1, axis((1, 16)), TWO_LEVELS) == pytest.approx(8 * 10e-6, rel=1e-3)


def test_two_nodes_send_their_sums_once():
    # Over 2 nodes of 8 with 5 GB/s a device each node sends its sum once: S / (8 x 5 GB/s). A ring sends 15/8 of it.
    slow = dataclasses.replace(TWO_LEVELS, links=(INNER, Link("slow", 5e9, 10e-6)))
    assert collective_s("all_reduce", 1e12, axis((0, 8), (1, 2)), slow) == pytest.approx(1e12 / 40e9, rel=1e-4)
    assert collective_s("all_reduce", 1e12, axis((0, 8), (1, 4)), slow) == pytest.approx(
        31 / 16 * 1e12 / 40e9, rel=1e-4
    )


def test_switch_adds_from_five_ranks_on():
    switch = dataclasses.replace(TWO_LEVELS, links=(dataclasses.replace(INNER, reduce_bytes_per_s=80e9), OUTER))
    assert collective_s("all_reduce", 1e12, axis((0, 8)), switch) == pytest.approx(1e12 / 80e9, rel=1e-4)
    assert collective_s("all_reduce", 1e12, axis((0, 4)), switch) == pytest.approx(1.5e12 / 100e9, rel=1e-4)
    assert collective_s("all_gather", 1e12, axis((0, 8)), switch) == pytest.approx(0.875e12 / 100e9, rel=1e-4)


def test_without_a_switch_two_ranks_share_one_wire():
    wires = dataclasses.replace(TWO_LEVELS, links=(dataclasses.replace(INNER, peers=7), OUTER))
    pair, eight = (Axis("x", n, None, ((0, n),), 1) for n in (2, 8))
    assert collective_s("all_gather", 1e9, eight, wires) == collective_s("all_gather", 1e9, eight, TWO_LEVELS)
    assert collective_s("all_gather", 1e9, pair, wires) == pytest.approx(1e-6 + 0.5 * 1e9 / (100e9 / 7))


def test_small_packets_then_bulk():
    link = Link("wire", 100e9, 1e-6, bulk_latency_s=50e-6, small_fraction=0.5)
    profile = dataclasses.replace(H100, links=(link,))
    assert collective_s("send", 1e6, axis((0, 2)), profile) == pytest.approx(1e-6 + 1e6 / 50e9)
    assert collective_s("send", 1e9, axis((0, 2)), profile) == pytest.approx(51e-6 + 1e9 / 100e9)


@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_arrays(kind):
    sizes = np.array([[0, 1, 1000], [10**6, 10**9, 10**12]])
    times = collective_s(kind, sizes, axis((0, 8), (1, 2)), H100)
    assert times.shape == sizes.shape
    assert times.dtype == np.float64
    single = [[collective_s(kind, size, axis((0, 8), (1, 2)), H100) for size in row] for row in sizes.tolist()]
    np.testing.assert_allclose(times, single, rtol=1e-15)
    assert isinstance(single[0][0], float)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_and_no_bytes_are_free(kind):
    assert collective_s(kind, 1e9, axis(), H100) == 0.0
    assert collective_s(kind, 1e9, axis((0, 1)), H100) == 0.0
    assert collective_s(kind, 0, axis((0, 8)), H100) == 0.0


def test_unknown_kind():
    with pytest.raises(ValueError, match="unknown collective 'gather'"):
        collective_s("gather", 1, axis((0, 2)), H100)


PROFILES = [TWO_LEVELS, *map(load_profile, ("h100-sxm", "a100-sxm-80gb", "v100-sxm-16gb", "b200", "cpu"))]
sizes_of_buffers = st.floats(1, 1e13)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(PROFILES),
    st.integers(1, 16),
    st.integers(1, 64),
    sizes_of_buffers,
    sizes_of_buffers,
)
def test_monotone_and_concave_in_size(kind, profile, near, far, a, b):
    group = axis((0, near), (1, far))
    low, high = sorted((a, b))
    time_low, time_high, time_middle = collective_s(kind, np.array([low, high, (low + high) / 2]), group, profile)
    assert 0 <= time_low <= time_high
    assert time_middle >= (time_low + time_high) / 2 * (1 - 1e-12)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), st.sampled_from(PROFILES), st.integers(2, 16), st.integers(2, 64), sizes_of_buffers)
def test_hierarchical_lies_between_inner_and_outer(kind, profile, near, far, size):
    all_inner = collective_s(kind, size, axis((0, near * far)), dataclasses.replace(profile, links=(profile.link(0),)))
    mixed = collective_s(kind, size, axis((0, near), (1, far)), profile)
    all_outer = collective_s(kind, size, axis((1, near * far)), profile)
    if kind != "all_to_all":  # where pairs in a node and between nodes go at the same time
        # A tree between nodes has fewer hops than a chain inside one.
        hops = 2 * near * far * profile.link(0).latency_s + profile.link(0).bulk_latency_s
        assert mixed >= (all_inner - hops) * (1 - 1e-12)
    small = min(profile.link(0).small_fraction, profile.link(1).small_fraction)
    slower_start = 2 * near * far * profile.link(1).latency_s + sum(link.bulk_latency_s for link in profile.links)
    assert mixed <= all_outer / small + slower_start


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_more_nodes_cost_no_less(kind, size):
    times = [collective_s(kind, size, axis((0, 8), (1, nodes)), TWO_LEVELS) for nodes in (1, 2, 4, 8, 16, 32)]
    assert times == sorted(times)


def test_axis_of_a_mesh():
    logical = factor_axes(Mesh("2x8", "h100-sxm"), {"tp": 8})
    tp_s, dp_s = (collective_s("all_gather", 1e9, axis, H100) for axis in logical.axes)
    assert tp_s == pytest.approx(0.875e9 / 365e9, rel=0.05)
    assert dp_s == pytest.approx(0.5e9 / 45e9, rel=0.05)


def test_lines_are_shared_between_calls():
    spans = ((0, 8), (1, 2))
    assert lines("all_reduce", spans, H100) is lines("all_reduce", spans, H100)


# Published nccl-tests all-reduces: (profile, spans, buffer bytes, measured seconds, bound of the error).
MEASURED = [
    ("h100-sxm", ((0, 8),), 2**10, 16.9e-6, 0.15),
    ("h100-sxm", ((0, 8),), 2**20, 27.4e-6, 0.15),
    ("h100-sxm", ((0, 8),), 2**24, 123.8e-6, 0.15),
    ("h100-sxm", ((0, 8),), 2**28, 1112.5e-6, 0.10),
    ("h100-sxm", ((0, 8),), 2**34, 62648e-6, 0.05),
    ("h200-sxm", ((0, 8),), 2**26, 338.9e-6, 0.05),
    ("h200-sxm", ((0, 4),), 2**32, 1.5 * 2**32 / 363.3e9, 0.03),
    ("b200", ((0, 8),), 2**34, 35551e-6, 0.05),
    ("a100-sxm-80gb", ((0, 8),), 2**15, 43.8e-6, 0.10),
    ("a100-sxm-80gb", ((0, 8),), 2**30, 8203.9e-6, 0.05),
    ("h100-sxm", ((0, 8), (1, 4)), 2**30, 6173e-6, 0.06),
    ("h100-sxm", ((0, 8), (1, 64)), 2**25, 761e-6, 0.25),
    ("h100-sxm", ((0, 8), (1, 64)), 2**34, 97979e-6, 0.05),
    ("h100-sxm", ((0, 8), (1, 512)), 2**27, 1636e-6, 0.25),
    ("h100-sxm", ((0, 8), (1, 512)), 2**34, 99569e-6, 0.05),
    ("b200", ((0, 8), (1, 4)), 2**34, 87182e-6, 0.05),
]


@pytest.mark.parametrize(("name", "spans", "size", "measured_s", "bound"), MEASURED)
def test_published_all_reduce(name, spans, size, measured_s, bound):
    predicted_s = collective_s("all_reduce", size, axis(*spans), load_profile(name))
    assert abs(predicted_s / measured_s - 1) <= bound
