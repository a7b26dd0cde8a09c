"""Equal runs of calls become calls of one function; what differs in an op, a constant, a read or a reader does not."""

import itertools
import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

from autopar.passes.outline import Outline, repeated
from autopar.program import Record, set_record
from tests.golden_files import check_golden

aten = torch.ops.aten
DEPTH = 4


def chain(blocks=3, changed=None, key=False):
    """`blocks` runs of DEPTH multiplications, sines and a residual; changed(graph, block, last) spoils some."""
    graph = Graph()
    x = graph.placeholder("x")
    weights = [graph.placeholder(f"w{i}") for i in range(blocks)]
    for block, weight in enumerate(weights):
        start = x

        def call(target, *args, block=block):
            node = graph.call_function(target, args)
            node.meta["val"] = torch.empty(2, device="meta")
            set_record(node, Record(op=f"layers.{block}/{target}/{len(graph.nodes)}", block=f"layers.{block}"))
            return node

        for _ in range(DEPTH):
            x = call(aten.sin.default, call(aten.mul.Tensor, x, weight))
        if key:
            x = call(torch.ops.autopar.dropout.default, x, call(torch.ops.autopar.key.default, block), 0.5)
        x = call(aten.add.Tensor, x, start)
        if changed is not None:
            x = changed(call, block, x) or x
    graph.output(x)
    return graph


def called(graph):
    return [n for n in graph.nodes if n.target is block_function]


def block_function(number, *values):
    raise AssertionError("not run")


def outline(graph):
    return Outline(block_function, itertools.count()).run(graph)


def test_equal_blocks_are_called(request):
    made, blocks = outline(chain())
    assert len(called(made)) == len(blocks) == 3
    assert {b.kind for b in blocks.values()} == {0}
    assert [n.op for n in made.nodes if n.target not in (block_function, operator.getitem)] == [
        *["placeholder"] * 4,
        "output",
    ]
    check_golden(request, "outline_of_three_blocks", str(made))


def test_each_block_alone_is_what_it_was():
    graph = chain()
    made, blocks = outline(graph)
    values = [torch.randn(2, dtype=torch.float64) for _ in range(4)]
    alone = {number: GraphModule({}, block.alone()) for number, block in blocks.items()}
    for node in called(made):
        node.target = lambda number, *inputs: alone[number](*inputs)
    torch.testing.assert_close(
        torch.fx.Interpreter(GraphModule({}, Graph()), graph=made).run(*values), GraphModule({}, graph)(*values)
    )


def test_records_of_one_block_are_told_from_those_of_another():
    first, _, third = repeated(chain())
    renamed = third.records(first)
    assert {r.block for r in renamed} == {"layers.0"}
    assert {r.block for r in renamed.values()} == {"layers.2"}
    assert len(renamed) == 2 * DEPTH + 1


@pytest.mark.parametrize(
    "changed",
    [
        lambda call, block, x: call(aten.cos.default, x) if block == 1 else call(aten.sin.default, x),
        lambda call, block, x: call(aten.mul.Tensor, x, block == 1),
        lambda call, block, x: call(aten.mul.Tensor, x, float(block == 1)),
        lambda call, block, x: call(aten.mul.Tensor, x, 1 if block == 1 else True),
        lambda call, block, x: call(aten.add.Tensor, x, x if block == 1 else x.args[1]),
    ],
    ids=["op", "constant", "float", "type", "read"],
)
def test_a_block_that_differs_stays(changed):
    graph = chain(changed=changed)
    found = repeated(graph)
    assert [b.calls[0].meta["custom"]["autopar"].block for b in found] == ["layers.0", "layers.2"]


def test_another_reader_makes_another_block():
    inner = {}

    def reads(call, block, x):
        inner[block] = x.args[0]
        return call(aten.add.Tensor, x, inner[0]) if block == 3 else call(aten.neg.default, x)

    found = repeated(chain(4, reads))
    assert [b.calls[0].meta["custom"]["autopar"].block for b in found] == ["layers.1", "layers.2"]


def test_keys_stay_outside():
    made, blocks = outline(chain(key=True))
    assert len(blocks) == 3
    keys = made.find_nodes(op="call_function", target=torch.ops.autopar.key.default)
    assert [k.args for k in keys] == [(0,), (1,), (2,)]
    assert all(keys[number] in node.args for number, node in enumerate(called(made)))


def test_records_that_join_calls_elsewhere_make_another_block():
    """What one op of the user's is made of is decided together: records must correspond one to one."""

    def same(call, block, x):
        y = call(aten.neg.default, x)
        if block == 1:
            set_record(y, x.meta["custom"]["autopar"])
        return y

    assert len(repeated(chain(changed=same))) == 2


def test_what_hands_on_several_values_stays():
    def several(call, block, x):
        pair = call(aten.max.dim, x, 0)
        pair.meta["val"] = (x.meta["val"], x.meta["val"])
        return pair

    assert repeated(chain(changed=several)) == []
