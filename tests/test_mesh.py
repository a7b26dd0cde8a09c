"""Topologies, logical axes, coordinates and groups."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import MeshError
from autopar.mesh import ROLES, Axis, LogicalMesh, Mesh, factor_axes, free_factorisations


@pytest.mark.parametrize(("text", "shape"), [("4", (4,)), ("2x8", (2, 8)), ("4x2x8", (4, 2, 8)), ("1", (1,))])
def test_shape_text(text, shape):
    mesh = Mesh(text, device="h100-sxm")
    assert mesh.shape == shape
    assert mesh.size == math.prod(shape)
    assert str(mesh) == text
    assert mesh.device == "h100-sxm"
    assert mesh == Mesh(shape, "h100-sxm")
    assert mesh != Mesh(text, "cpu")
    assert hash(mesh) == hash(Mesh(shape, "h100-sxm"))


def test_one_number_is_one_node():
    assert Mesh(4) == Mesh("4") == Mesh([4])


def test_frozen():
    with pytest.raises(AttributeError):
        Mesh("4").device = "cpu"


@pytest.mark.parametrize(
    "shape", ["", "x", "2x", "x2", "0", "2x0", "-2", "2x-8", "2*8", "a", "2 x 8", "٢", "2\n", "2.0"]
)
def test_bad_text_is_one_line(shape):
    with pytest.raises(MeshError) as error:
        Mesh(shape)
    assert "\n" not in str(error.value)
    assert repr(shape) in str(error.value)


@pytest.mark.parametrize("shape", [(), (2, 0), (2, -1), (2.0,), (True,), 0, -3, None, 2.5, ("2", "8")])
def test_bad_tuple(shape):
    with pytest.raises(MeshError, match="positive integers"):
        Mesh(shape)


def test_bad_device():
    with pytest.raises(MeshError, match="hardware profile"):
        Mesh("4", device=None)


def device_mesh(ranks, names, kind="cpu"):
    return SimpleNamespace(mesh=torch.tensor(ranks), mesh_dim_names=names, device_type=kind)


def test_device_mesh_names_pin_degrees():
    mesh, pins = Mesh.from_device_mesh(device_mesh([[0, 1, 2, 3], [4, 5, 6, 7]], ("dp", "tp"), "cuda"))
    assert mesh == Mesh("2x4", "h100-sxm")
    assert pins == {"dp": 2, "tp": 4}


def test_device_mesh_other_names_pin_nothing():
    mesh, pins = Mesh.from_device_mesh(device_mesh([[0], [1]], ("replicate", "tp")))
    assert (mesh, pins) == (Mesh("2x1", "cpu"), {"tp": 1})
    assert Mesh.from_device_mesh(device_mesh([0, 1], None)) == (Mesh("2"), {})


@pytest.mark.parametrize("ranks", [[2, 3], [1, 0], [[0, 2], [1, 3]]])
def test_device_mesh_of_other_ranks_is_refused(ranks):
    with pytest.raises(MeshError, match="in order"):
        Mesh.from_device_mesh(device_mesh(ranks, None))


def spans(logical):
    return [(axis.name, axis.role, axis.size, axis.spans, axis.stride) for axis in logical.axes]


def test_pins_come_first_and_nearest():
    logical = factor_axes(Mesh("2x8"), {"pp": 2, "tp": 4})
    assert spans(logical) == [
        ("tp", "tp", 4, ((0, 4),), 1),
        ("pp", "pp", 2, ((0, 2),), 4),
        ("x0", None, 2, ((1, 2),), 8),
    ]
    assert logical.group(0, (0, 1, 1)) == (12, 13, 14, 15)
    assert logical.group(1, (3, 0, 0)) == (3, 7)
    assert logical.group(2, (3, 1, 0)) == (7, 15)


def test_no_pins_gives_an_axis_a_level():
    assert spans(factor_axes(Mesh("4x2x8"), {})) == [
        ("x0", None, 8, ((0, 8),), 1),
        ("x1", None, 2, ((1, 2),), 8),
        ("x2", None, 4, ((2, 4),), 16),
    ]


def test_an_axis_spans_levels():
    logical = factor_axes(Mesh("2x8"), {"tp": 16})
    assert spans(logical) == [("tp", "tp", 16, ((0, 8), (1, 2)), 1)]
    assert logical.group(0, (5,)) == tuple(range(16))


def test_an_axis_takes_the_common_divisor_of_a_level():
    logical = factor_axes(Mesh("2x6"), {"tp": 4})
    assert spans(logical) == [("tp", "tp", 4, ((0, 2), (1, 2)), 1), ("x0", None, 3, ((0, 3),), 2)]
    assert logical.group(0, (0, 1)) == (2, 3, 8, 9)


def test_parts_divide_a_pin():
    logical = factor_axes(Mesh("8"), {"tp": 4, "dp": 2}, parts={"tp": (2, 2)})
    assert spans(logical) == [
        ("tp0", "tp", 2, ((0, 2),), 1),
        ("tp1", "tp", 2, ((0, 2),), 2),
        ("dp", "dp", 2, ((0, 2),), 4),
    ]
    assert [axis.name for axis in factor_axes(Mesh("8"), {"tp": 4}, parts={"tp": (4,)}).axes] == ["tp", "x0"]


def test_free_says_how_levels_are_divided():
    logical = factor_axes(Mesh("4x8"), {"tp": 2}, free=((2, 2), (4,)))
    assert [(axis.name, axis.size, axis.stride) for axis in logical.axes] == [
        ("tp", 2, 1),
        ("x0", 2, 2),
        ("x1", 2, 4),
        ("x2", 4, 8),
    ]


@pytest.mark.parametrize("free", [((4,),), ((2, 2), (2,)), ((4,), (4,), (1,)), ((), (4,)), ((-2, -2), (4,))])
def test_free_must_multiply(free):
    with pytest.raises(MeshError, match=r"free axes .* multiply"):
        factor_axes(Mesh("4x8"), {"tp": 2}, free=free)


@pytest.mark.parametrize(
    ("pin", "text"),
    [
        ({"tp": 3}, "tp=3 multiply to 3, which does not divide the 16 of 2x8"),
        ({"tp": 8, "pp": 4}, "tp=8, pp=4 multiply to 32"),
        ({"tp": 0}, "tp=0 is not a positive integer"),
        ({"tp": -2}, "tp=-2"),
        ({"tp": 2.0}, r"tp=2\.0"),
        ({"tp": True}, "tp=True"),
        ({"sp": 2}, "'sp' is no role"),
    ],
)
def test_bad_pins(pin, text):
    with pytest.raises(MeshError, match=text) as error:
        factor_axes(Mesh("2x8"), pin)
    assert "\n" not in str(error.value)
    with pytest.raises(MeshError, match=text):
        free_factorisations(Mesh("2x8"), pin)


@pytest.mark.parametrize("parts", [{"tp": (2,)}, {"tp": (2, 4)}, {"dp": (2,)}, {"tp": (-2, -2)}])
def test_bad_parts(parts):
    with pytest.raises(MeshError, match="parts"):
        factor_axes(Mesh("8"), {"tp": 4}, parts=parts)


def test_free_factorisations():
    assert free_factorisations(Mesh("2x8"), {}) == [((8,), (2,)), ((2, 4), (2,)), ((4, 2), (2,))]
    assert free_factorisations(Mesh("4x8"), {"tp": 8}) == [((4,),), ((2, 2),)]
    assert free_factorisations(Mesh("2x8"), {"tp": 16}) == [()]
    for free in free_factorisations(Mesh("4x12"), {"tp": 2}):
        assert factor_axes(Mesh("4x12"), {"tp": 2}, free=free).size == 48


def test_axes_must_cover_the_mesh():
    half = Axis("a", 2, None, ((0, 2),), 1)
    with pytest.raises(MeshError, match=r"take \[2\] ranks of the levels \[4\]"):
        LogicalMesh(Mesh("4"), (half,))
    with pytest.raises(MeshError, match="not unique"):
        LogicalMesh(Mesh("4"), (half, half))
    with pytest.raises(MeshError, match="level 1"):
        LogicalMesh(Mesh("4"), (Axis("a", 4, None, ((1, 4),), 1),))
    with pytest.raises(MeshError, match="spans"):
        Axis("a", 4, None, ((0, 2),), 1)
    with pytest.raises(MeshError, match="role"):
        Axis("a", 2, "sp", ((0, 2),), 1)


def test_out_of_range():
    logical = factor_axes(Mesh("2x4"), {"tp": 2})
    assert logical.axis("tp").role == "tp"
    with pytest.raises(MeshError, match="no axis 'dp'; the mesh has tp, x0, x1"):
        logical.axis("dp")
    for rank in (-1, 8):
        with pytest.raises(MeshError, match="not in mesh"):
            logical.coordinate(rank)
    with pytest.raises(MeshError, match="out of range"):
        logical.rank((2, 0, 0))
    with pytest.raises(MeshError, match="3 axes"):
        logical.rank((0, 0))


@st.composite
def logical_meshes(draw):
    mesh = Mesh(tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))))
    pin, left = {}, mesh.size
    for role in draw(st.permutations(ROLES)):
        pin[role] = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        left //= pin[role]
    parts = {}
    if pin["tp"] > 1:
        near = draw(st.sampled_from([d for d in range(1, pin["tp"] + 1) if pin["tp"] % d == 0]))
        parts["tp"] = (near, pin["tp"] // near)
    return factor_axes(mesh, pin, parts, draw(st.sampled_from(free_factorisations(mesh, pin)))), pin


@settings(max_examples=200, deadline=None)
@given(logical_meshes())
def test_coordinates_round_trip(case):
    logical, pin = case
    array = logical.rank_array()
    assert array.shape == logical.sizes
    assert sorted(array.flatten().tolist()) == list(range(logical.size))
    for rank in range(logical.size):
        coordinate = logical.coordinate(rank)
        assert logical.rank(coordinate) == rank
        assert array[coordinate] == rank
        for index in range(len(logical.axes)):
            group = logical.group(index, coordinate)
            assert group == tuple(array[(*coordinate[:index], slice(None), *coordinate[index + 1 :])].tolist())
    for role, degree in pin.items():
        assert math.prod(axis.size for axis in logical.axes if axis.role == role) == degree
    for index, axis in enumerate(logical.axes):
        ranks = logical.group(index, (0,) * len(logical.axes))
        assert ranks[1] - ranks[0] == axis.stride
        levels = [ranks_of for _, ranks_of in axis.spans]
        # Members of one group inside a node: exactly what the spans say.
        inside = logical.topology.levels[0]
        expected = levels[0] if axis.spans[0][0] == 0 else 1
        assert np.bincount(np.array(ranks) // inside).max() == expected


def test_pinned_axes_are_laid_tp_cp_ep_dp_pp():
    logical = factor_axes(Mesh("4x8"), {"pp": 2, "dp": 2, "ep": 2, "cp": 2, "tp": 2})
    assert [axis.name for axis in logical.axes] == ["tp", "cp", "ep", "dp", "pp"]
    assert [axis.stride for axis in logical.axes] == [1, 2, 4, 8, 16]


def test_between_two_places_of_an_axis():
    axis = Axis("pp", 12, "pp", ((0, 2), (1, 3), (2, 2)), 1)
    assert axis.between(0, 1).spans == axis.between(3, 2).spans == ((0, 2),)
    assert axis.between(1, 2).spans == axis.between(0, 4).spans == ((0, 2), (1, 3))
    assert axis.between(5, 6) == axis
    assert axis.between(7, 7).size == 1
