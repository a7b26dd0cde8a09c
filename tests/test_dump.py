"""autopar/dump.py: the text is what a person reads and a golden compares; the log has a line a stage."""

import logging
import operator

import torch
from torch.fx import Graph
from torch.utils import _pytree as pytree

from autopar.dump import Dump, program_text
from autopar.layout import I as Invariant
from autopar.layout import Parts, S, whole
from autopar.program import BlockClass, OutputRef, Program, Record, Sink, Source, set_record

aten = torch.ops.aten


def _program(extra_op=False):
    """x, w -> linear -> split in two; a buffer that counts up; a layout on the linear."""
    graph = Graph()

    def put(node, value, **fields):
        node.meta["val"] = value
        set_record(node, Record(**fields))
        return node

    weight = put(graph.placeholder("p_weight"), torch.empty(6, 4), op="up.weight", block="")
    steps = put(graph.placeholder("b_steps"), torch.empty((), dtype=torch.int64), op="steps", block="")
    x = put(graph.placeholder("x"), torch.empty(2, 3, 4), op="args[0]", block="")
    first = put(
        graph.call_function(aten.linear.default, (x, weight)),
        torch.empty(2, 3, 6),
        op="up/linear/1",
        block="up",
        where="/home/user/model.py:42",
        parts=Parts(((2,), (3,), (2, 3))),
        layout=(S(3), Invariant, S(0)),
    )
    if extra_op:
        first = put(graph.call_function(aten.relu.default, (first,)), torch.empty(2, 3, 6), op="up/relu/1", block="up")
    halves = put(
        graph.call_function(aten.split.Tensor, (first, 3), {"dim": -1}),
        (torch.empty(2, 3, 3), torch.empty(2, 3, 3)),
        op="/split/1",
        block="after:up",
        where="model.py:43",
        note="kept whole",
    )
    half = put(
        graph.call_function(operator.getitem, (halves, 1)), torch.empty(2, 3, 3), op="/getitem/1", block="after:up"
    )
    more = put(graph.call_function(aten.add.Tensor, (steps, 1)), steps.meta["val"], op="/add/1", block="after:up")
    graph.output((half, more))
    leaf = pytree.tree_structure(0)
    return Program(
        graph=graph,
        sources=(
            Source("p_weight", "parameter", "up.weight", trainable=False),
            Source("b_steps", "buffer", "steps"),
            Source("x", "input", "args[0]"),
        ),
        sinks=(Sink("user"), Sink("state", "steps")),
        state={},
        ties={"head.weight": "up.weight"},
        in_spec=leaf,
        in_values=(None,),
        in_tensors=(True,),
        out_spec=leaf,
        out_values=(OutputRef(0),),
        classes=(BlockClass("Up", ("up", "up#2"), ((), ())),),
        name="toy",
    )


TEXT = """\
program toy: training, 3 placeholders, 4 calls
class Up: up, up#2
tie head.weight = up.weight
  %p_weight : float32[6, 4] = parameter up.weight (frozen)
  %b_steps : int64[] = buffer steps
  %x : float32[2, 3, 4] = input args[0]
block up:
  %linear_default : float32[2, 3, 6] [S(2,2)@tp S(0)@dp] = aten.linear.default(%x, %p_weight)  # up, model.py:42
block after:up:
  %split_tensor : (float32[2, 3, 3], float32[2, 3, 3]) = aten.split.Tensor(%linear_default, 3, dim=-1)  # model.py:43, kept whole
  %getitem : float32[2, 3, 3] = getitem(%split_tensor, 1)
  %add_tensor : int64[] = aten.add.Tensor(%b_steps, 1)
return %getitem, state steps <- %add_tensor"""  # noqa: E501 - as a dump has it


def test_the_text_of_a_program():
    assert program_text(_program(), axes=("tp", "cp", "dp")) == TEXT


def test_a_layout_without_axis_names_lists_every_axis():
    assert " [S(2,2) I S(0)] = aten.linear.default" in program_text(_program())


def test_a_tensor_that_no_axis_cuts_is_invariant():
    program = _program()
    set_record(program.placeholders[2], parts=whole((2, 3, 4)), layout=(Invariant, Invariant))
    assert "%x : float32[2, 3, 4] [I] = input args[0]" in program_text(program, axes=("tp", "dp"))


def test_arguments_have_no_addresses_and_no_module_prefix():
    program = _program()
    graph = program.graph
    with graph.inserting_before(program.output):
        graph.call_function(
            torch.full, ([2, 3], object()), {"dtype": torch.bfloat16, "device": torch.device("cpu"), "names": (None,)}
        )
    assert "full([2, 3], object, dtype=bfloat16, device=cpu, names=(None,))" in program_text(program)


def test_files_are_numbered_and_hold_what_was_given(tmp_path):
    dump = Dump(tmp_path / "new" / "folder", axes=("tp", "cp", "dp"))
    dump.write("capture", _program())
    dump.write("solve", None, extra="the problem\n")
    dump.write("shard", _program(), extra="below")
    files = {p.name: p.read_text() for p in (tmp_path / "new" / "folder").iterdir()}
    assert files == {
        "01_after_capture.txt": TEXT + "\n",
        "02_after_solve.txt": "the problem\n",
        "03_after_shard.txt": TEXT + "\n\nbelow\n",
    }


def test_the_log_has_a_line_a_stage(caplog, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, logger="autopar"):
        dump = Dump(None)
        dump.write("capture", _program())
        dump.write("solve", None)
        dump.write("shard", _program(extra_op=True))
        dump.write("fuse", _program())
    first, second, third, last = caplog.messages
    assert first.startswith("capture: 0.")
    assert first.endswith(" s, 4 nodes")
    assert second.startswith("solve: 0.")
    assert second.endswith(" s")
    assert third.endswith(" s, 4 -> 5 nodes (+1 aten.relu.default)")
    assert last.endswith(" s, 5 -> 4 nodes (-1 aten.relu.default)")
    assert [entry.stage for entry in caplog.records] == ["capture", "solve", "shard", "fuse"]
    assert list(tmp_path.iterdir()) == []
