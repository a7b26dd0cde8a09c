"""A call of a block becomes the block's own nodes, forward and backward, under the names of where it stands."""

import torch
from torch.fx import GraphModule, Interpreter

from autopar.passes.inline import Inline
from autopar.passes.lower import trace_joint
from autopar.program import record
from autopar.repeated import Repeats
from tests.golden_files import check_golden
from tests.passes.test_outline import chain


def inlined(blocks=2):
    """(text of the joint graph with calls, joint graph inlined, values) of a chain of equal blocks."""
    repeats = Repeats(chain(blocks))
    values = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(blocks + 1)]
    with repeats.known():
        joint, _ = trace_joint(Interpreter(torch.nn.Module(), graph=repeats.graph).run, values, None)
        return str(joint), Inline(repeats.places).run(GraphModule({}, joint)), values


def test_forward_and_backward_are_written_out(request):
    before, module, values = inlined()
    assert before.count("autopar.block.default") == before.count("autopar.block_backward.default") == 2
    assert "autopar" not in str(module.graph)
    check_golden(request, "inline_two_blocks", str(module.graph))
    grad = torch.randn(2, dtype=torch.float64)
    found = Interpreter(module).run(*values, grad)
    expected = GraphModule({}, chain(2))(*values)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(tuple(found[1:]), torch.autograd.grad(expected, values, grad))


def test_nodes_have_the_records_of_their_own_block():
    _, module, _ = inlined(3)
    for target in (torch.ops.aten.sin.default, torch.ops.aten.cos.default):
        blocks = [record(n).block for n in module.graph.find_nodes(op="call_function", target=target)]
        assert sorted(blocks) == sorted(f"layers.{i}" for i in range(3) for _ in range(4))
