"""passes/cast.py: shards are cast before they are gathered, gradients before they are reduced, and nothing else is."""

import pytest
import torch
from torch.fx import Graph, Interpreter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from autopar.dump import program_text
from autopar.passes.cast import Cast
from autopar.program import Program, Record, Sink, Source, set_record
from autopar.runtime.moves import load, move
from tests.golden_files import check_golden
from tests.passes.local_group import one_rank

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(autouse=True)
def _group(tmp_path):
    with one_rank(tmp_path, "dp", "tp"):
        yield


UNCUT = ((2,), (3,))


def moved(*users):
    """A program of one parameter (S0 on dp, R on tp once gathered) and what reads it: w, g or h."""
    graph = Graph()
    w = graph.placeholder("w")
    g = graph.call_function(move, (w, "dp", "S0", "R", UNCUT))
    h = graph.call_function(move, (g, "tp", "I", "R"))
    made = [graph.call_function(torch.ops.aten.mul.Tensor, ({"w": w, "g": g, "h": h}[u], 2.0)) for u in users]
    graph.output(tuple(made))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 3, dtype=BF16)
        set_record(node, Record(op=node.name, block=""))
    empty = tree_flatten(((), {}))[1]
    sources, sinks = (Source("w", "parameter", "w", True),), tuple(Sink("user") for _ in made)
    return Program(graph, sources, sinks, {}, {}, empty, (), (), empty, ())


def run(program, w):
    return Interpreter(torch.fx.GraphModule({}, program.graph)).run(w)


def loads(program):
    return [n for n in program.graph.nodes if n.target is load]


def test_golden(request):
    program = Cast({"w": FP32}, FP32).run(moved("h", "h"))
    check_golden(request, "cast_gathered_parameter", program_text(program, ("dp", "tp")))


def test_one_load_takes_all_moves_in_the_computing_dtype():
    program = Cast({"w": FP32}, FP64).run(moved("h", "h"))
    (node,) = loads(program)
    assert node.args[1:] == (BF16, FP64, (("dp", "S0", "R", UNCUT), ("tp", "I", "R", ())))
    assert not [n for n in program.graph.nodes if n.target is move]
    assert program.placeholders[0].meta["val"].dtype == FP32
    w = torch.randn(2, 3, requires_grad=True)
    a, b = run(program, w)
    assert a.dtype == b.dtype == BF16
    torch.testing.assert_close(a, w.detach().to(BF16) * 2)
    (a.sum() + b.sum()).backward()
    assert w.grad.dtype == FP32
    assert (w.grad == 4).all()


@pytest.mark.parametrize(("users", "count", "moves"), [("gh", 1, 1), ("wh", 2, 0), ("w", 1, 0), ("wgh", 2, 1)])
def test_moves_after_a_value_with_several_readers_stay(users, count, moves):
    """A gathered value that several read is gathered once."""
    program = Cast({"w": FP32}, FP32).run(moved(*users))
    assert len(loads(program)) == count
    assert len([n for n in program.graph.nodes if n.target is move]) == moves
    w = torch.randn(2, 3, requires_grad=True)
    outs = run(program, w)
    assert all(o.dtype == BF16 for o in outs)
    sum(o.sum() for o in outs).backward()
    assert (w.grad == 2 * len(users)).all()


def test_nothing_is_to_be_done():
    same = Cast({"w": BF16}, BF16).run(moved("h"))
    assert not loads(same)
    assert not loads(Cast({"other": FP32}, FP32).run(moved("h")))
    (reduced_wider,) = loads(Cast({"w": BF16}, FP32).run(moved("h")))
    assert reduced_wider.args[1:3] == (BF16, FP32)
    assert not loads(Cast({"w": BF16}, FP32).run(moved("w")))


def test_the_program_handed_in_is_not_changed():
    program = moved("h")
    before = str(program.graph)
    Cast({"w": FP32}, FP32).run(program)
    assert str(program.graph) == before
    assert program.placeholders[0].meta["val"].dtype == BF16


def test_shards_come_from_the_host_and_gradients_go_back():
    """Cast before they are sent; each copy is made by one op of its own, where host and device are one memory, too."""
    cpu = torch.device("cpu")
    program = Cast({"w": FP32}, None, cpu, frozenset({"w"})).run(moved("h", "w"))
    assert [n.args[1:] for n in loads(program)] == [
        (BF16, BF16, (), cpu),
        (BF16, BF16, (("dp", "S0", "R", UNCUT), ("tp", "I", "R", ())), cpu),
    ]
    w, seen = torch.randn(2, 3, requires_grad=True), []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func.namespace == "autopar":
                assert out.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr()
                seen.append((func._opname, args[0].dtype))
            return out

    with Watch():
        a, b = run(program, w)
        (a.sum() + b.sum()).backward()
    assert seen == [("fetch", BF16)] * 2 + [("put", BF16)] * 2
    assert w.grad.dtype == FP32
    assert (w.grad == 4).all()


def test_only_what_lies_on_the_host_is_fetched():
    program = Cast({"w": BF16}, None, torch.device("cpu"), frozenset({"other"})).run(moved("h", "w"))
    assert not loads(program)
