"""autopar/plan.py and autopar/schema.py: plans survive the file, damage does not."""

import copy
import json
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.plan_table import fold, plain_text
from tests.example_plan import plan_data


def test_round_trip_through_a_file(tmp_path):
    plan = Plan.from_dict(plan_data())
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.to_dict() == plan.to_dict() == plan_data()
    assert loaded.digest == plan.digest
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_file_has_the_documented_fields_in_order(tmp_path):
    Plan.from_dict(plan_data()).save(tmp_path / "plan.json")
    assert list(json.loads((tmp_path / "plan.json").read_text()))[:5] == ["version", "model", "mesh", "degrees", "axes"]


def test_optional_fields_may_be_left_out():
    data = plan_data()
    del data["notes"], data["pins"], data["model"]["seq"], data["axes"][0]["role"]
    plan = Plan.from_dict(data)
    assert (plan.notes, plan.pins, plan.axes[0]["role"]) == ((), {}, None)


def test_a_plan_does_not_share_what_it_was_made_of():
    data = plan_data()
    plan = Plan.from_dict(data)
    before = plan.to_dict()
    data["degrees"]["tp"] = 1
    data["params"].clear()
    plan.to_dict()["ops"].clear()
    assert plan.to_dict() == before


def test_the_digest_follows_decisions_and_not_forecasts():
    plan = Plan.from_dict(plan_data())
    faster, other = plan_data(), plan_data()
    faster["predicted"]["step_time_s"] = 0.125
    faster["solver"]["solve_s"] = 9.0
    other["microbatches"] = 4
    assert Plan.from_dict(faster).digest == plan.digest != Plan.from_dict(other).digest
    assert re.fullmatch("[0-9a-f]{64}", plan.digest)


REMOVE = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "version: 2 is not a version this autopar reads; it reads 1"),
        (("zero",), REMOVE, 'field "zero" is missing'),
        (("zero",), 4, "zero: 4 is not an integer from 0 to 3"),
        (("zero",), True, "zero: true is not an integer from 0 to 3"),
        (("zzero",), 1, 'unknown field "zzero"; did you mean "zero"?'),
        (("schedule",), "1fb1", 'schedule: "1fb1" is unknown; did you mean "1f1b"?'),
        (("degrees", "tp"), 0, "degrees.tp: 0 is not an integer of at least 1"),
        (("degrees", "sp"), 1, 'degrees: unknown field "sp"'),
        (("mesh", "shape"), "2x4", 'mesh.shape: "2x4" is not a list'),
        (("mesh", "shape"), [2, 8], "axes: sizes multiply to 8, but mesh.shape has 16 devices"),
        (("axes", 1, "name"), "tp", 'axes: "tp" stands twice'),
        (("axes", 1, "role"), "sp", 'axes[1].role: "sp" is unknown'),
        (("recompute", "Layer"), "some", 'recompute["Layer"]: "some" is unknown'),
        (("stages", 0, "devices"), [8], "stages[0].devices[0]: rank 8 is not in a mesh of 8 devices"),
        (("stages", 0, "devices"), [1, 1], "stages[0].devices: 1 stands twice"),
        (("params", "norm.weight", "layout"), [["tp", "X"]], 'params["norm.weight"].layout[0][1]: "X" is not a layout'),
        (("params", "norm.weight", "layout"), [["tp", "S(-1)"]], 'params["norm.weight"].layout[0][1]: "S(-1)" is not'),
        (("params", "norm.weight", "layout"), [["up", "R"]], 'params["norm.weight"].layout[0][0]: no axis "up"'),
        (("params", "norm.weight", "layout"), [["tp", "R"]] * 2, 'params["norm.weight"].layout: "tp" stands twice'),
        (("ops", "/arange/1", "strategy"), ["I"], 'ops["/arange/1"].strategy: has 1 entries for 2 axes'),
        (("ops", "/arange/1", "read"), {"x": ["I"]}, 'ops["/arange/1"].read["x"]: has 1 entries for 2 axes'),
        (("ops", "/arange/1", "bytes"), -1, 'ops["/arange/1"].bytes: -1 is not a finite number of at least 0'),
        (("ops", "/arange/1", "time_s"), float("nan"), 'ops["/arange/1"].time_s: NaN is not a finite number'),
        (("predicted", "mfu"), float("inf"), "predicted.mfu: Infinity is not a finite number"),
        (("predicted", "memory", "activations"), [1, -5.0], 'predicted.memory["activations"][1]: -5.0 is not'),
        (("predicted", "step_time_s"), 10**400, "predicted.step_time_s: 1000"),
        (("model", "name"), "a\nb", 'model.name: "a\\nb" holds characters that cannot be printed'),
        (("model", "name"), "\ud800", "model.name: "),
        (("pins", "x"), object(), 'pins["x"]: object is not a finite number'),
    ],
)
def test_a_wrong_field_is_named(path, value, message):
    data = plan_data()
    *parents, last = path
    at = data
    for key in parents:
        at = at[key]
    if value is REMOVE:
        del at[last]
    else:
        at[last] = value
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(data)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "line 1 column 1 is no JSON"),
        (b"[1, 2]", "a plan is an object, not [1, 2]"),
        (b'{"version": 1, "zero": NaN}', "NaN is not a number"),
        (b'{"version": 1, "version": 1}', 'field "version" stands twice in one object'),
        (b"\xff\xfe{", "byte "),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b'{"version": ' + b"9" * 5000 + b"}", "cannot be read as JSON"),
        (json.dumps(plan_data()).encode().replace(b'"sp": true', b'"sp": ' + b"[" * 600 + b"]" * 600), ""),
    ],
)
def test_a_file_that_is_no_plan_is_named(tmp_path, data, message):
    (tmp_path / "plan.json").write_bytes(data)
    with pytest.raises(PlanError, match=re.escape(f"{tmp_path / 'plan.json'}: {message}")):
        Plan.load(tmp_path / "plan.json")


def test_a_missing_file_is_a_plan_error(tmp_path):
    with pytest.raises(PlanError, match=r"none\.json: cannot be read: No such file"):
        Plan.load(tmp_path / "none.json")


def test_nothing_in_a_file_is_run(tmp_path):
    (tmp_path / "plan.json").write_bytes(pickle.dumps(plan_data()))
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")


def _survives(path):
    """A damaged file is refused, or it is a plan: then it prints, and writes itself again."""
    try:
        plan = Plan.load(path)
    except PlanError as error:
        refusal = str(error)
        assert refusal.startswith(f"{path}: "), refusal
        assert "\n" not in refusal
        return
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False))) == plan
    assert str(plan)
    assert plan.digest


@given(at=st.integers(0, 5000), cut=st.integers(0, 40), put=st.binary(max_size=12))
@settings(max_examples=150, deadline=None)
def test_damaged_bytes(tmp_path_factory, at, cut, put):
    path = tmp_path_factory.getbasetemp() / "bytes.json"
    data = json.dumps(plan_data()).encode()
    at %= len(data)
    path.write_bytes(data[:at] + put + data[at + cut :])
    _survives(path)


def test_every_cut_short_file_is_refused(tmp_path):
    path, data = tmp_path / "short.json", json.dumps(plan_data()).encode()
    for end in range(0, len(data), 37):
        path.write_bytes(data[:end])
        with pytest.raises(PlanError):
            Plan.load(path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_values(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "values.json"
    tree = plan_data()
    at, key, inside = tree, None, tree
    while isinstance(inside, (dict, list)) and inside and (key is None or data.draw(st.booleans())):
        at, key = inside, data.draw(st.sampled_from(list(inside) if isinstance(inside, dict) else range(len(inside))))
        inside = at[key]
    at[key] = data.draw(_JSON)
    path.write_text(json.dumps(tree))
    _survives(path)


def test_equal_data_of_other_types_make_equal_plans():
    import numpy as np

    data, plain = plan_data(), Plan.from_dict(plan_data())
    data["microbatches"] = np.int64(8)
    data["predicted"]["mfu"] = np.float64(0.31)
    data["mesh"]["shape"] = (2, 4)
    plan = Plan(**data)
    assert plan == plain
    assert json.dumps(plan.to_dict()) == json.dumps(plain.to_dict())


def test_the_text_says_what_was_decided():
    text = str(Plan.from_dict(plan_data()))
    for part in (
        "toy, 8.03B parameters, batch 16 x 128 tokens, training",
        "2x4 h100-sxm; axes tp 4 (nvlink), x0 2 (infiniband)",
        "tp 4",
        "selective (Layer)",
        "250 ms predicted, 8,192 tokens/s, 312.5 TFLOP/s a device, MFU 31 %",
        "64 GiB a device",
        "activations 32 GiB",
        "gap 0.04 %",
        "*.up_proj.weight={tp: S(0)}",
        "ops kept whole on every device\n  /arange/1",
        "one op has no rule: [bold]custom[/bold]",
    ):
        assert part in text, text
    assert re.search(r"layers\.\*\.mlp\.up_proj\.weight +x4 +S\(0\)@tp +0", text)
    assert re.search(r"norm\.weight +whole +1", text)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110


def test_the_ops_table_has_layouts_bytes_and_seconds():
    text = plain_text(Plan.from_dict(plan_data()).table(ops=True), width=160)
    layouts = r"\[R@tp S\(0\)@x0\] \[S\(0\)@tp R@x0\] -> \[S\(2\)@tp S\(0\)@x0\]"
    assert re.search(rf"layers\.\{{0-2\}}\.mlp\.up_proj/linear/1 +x3 +{layouts} +4 KiB +1\.5 ms +250 us", text), text
    assert re.search(r"layers\.3\.mlp\.up_proj/linear/1 .*; x read as \[R@tp S\(0\)@x0\]", text), text
    assert re.search(r"linear +4 +8e\+09 +16 KiB +6 ms +1 ms", text), text


def test_stages_are_listed_when_there_are_several():
    data = plan_data()
    data["stages"] = [
        {"blocks": ["before:layers.0", "layers.0", "layers.1"], "devices": [0, 1, 2, 3]},
        {
            "blocks": ["layers.2", {"first_op": "norm/layer_norm/1", "last_op": "head/linear/1"}],
            "devices": [4, 5, 6, 7],
        },
    ]
    data["predicted"]["peak_memory_bytes"] = [2**35, 2**34]
    text = str(Plan.from_dict(data))
    assert re.search(r"0 +before:layers\.0, layers\.\{0-1\} x2 +0-3", text), text
    assert re.search(r"1 +layers\.2, norm/layer_norm/1 \.\. head/linear/1 +4-7", text), text
    assert "32 GiB a device (stages: 32 GiB, 16 GiB)" in text


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from("ab")), unique=True))
def test_folding_loses_nothing(entries):
    named = [(f"layers.{i}.expert.{j}.w{k}/op/1", k) for i, j, k in entries]
    rows = fold(named)
    assert sorted(name for *_, names in rows for name in names) == sorted(name for name, _ in named)
    assert all(count == len(names) for _, count, _, names in rows)
    assert len({(label, thing) for label, _, thing, _ in rows}) == len(rows)


def test_a_copy_is_equal():
    plan = Plan.from_dict(plan_data())
    assert copy.deepcopy(plan) == plan
