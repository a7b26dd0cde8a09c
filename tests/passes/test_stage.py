"""The stage pass: what crosses a cut and what does not. That its stages compute the same is proved by running them."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from autopar.dump import program_text
from autopar.errors import PlanError
from autopar.layout import P
from autopar.passes.normalize import Normalize
from autopar.passes.stage import Stage, between, once_for_all
from autopar.program import Program
from autopar.runtime.moves import move
from autopar.runtime.pipeline_program import StageProgram
from autopar.runtime.random import Draw, drawing
from tests.golden_files import check_golden
from tests.passes.test_microbatch import made, random
from tests.rules.prove import program_of

OPS = ("linear", "linear_1", "linear_2", "linear_3")


def skipping(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Four layers: the first one's result is read by the second and the last; the mask is doubled everywhere."""
    scale = mask.to(torch.float64) * 2
    a = F.linear(x, w) * scale
    b = F.linear(a, v) * scale
    c = F.linear(b, w) * scale
    return F.linear(c + a, v) * scale


def tensors() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(s, dtype=torch.float64, generator=generator) for s in ((4, 6), (6, 6), (6, 6)))
    return x, w.requires_grad_(), v.requires_grad_(), torch.tensor([1, 0, 1, 1, 0, 1])


def stages_of(program: Program) -> dict[str, int]:
    """A stage for each linear layer and what follows it."""
    found, at = {}, -1
    for node in program.calls:
        at += "linear" in node.name
        found[node.name] = max(at, 0)
    found["add"] = 3
    return found


def cut(stage_of: dict[str, int] | None = None) -> tuple[Program, tuple[StageProgram, ...]]:
    program = program_of(skipping, tensors())
    return program, Stage(stage_of or stages_of(program), 4).run(program)


def run(stages: tuple[StageProgram, ...], values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The stages one after the other."""
    sent: dict[str, torch.Tensor] = {}
    result = None
    for stage in stages:
        inside = [*(values[s.path] for s in stage.sources), *(sent[v.name] for _, v in stage.receives)]
        outs = torch.fx.GraphModule(torch.nn.Module(), stage.program.graph)(*inside)
        sent |= {v.name: out for (v, _), out in zip(stage.sends, outs, strict=False)}
        result = outs[-1] if stage.sinks else result
    assert result is not None
    return result


def test_golden(request: pytest.FixtureRequest) -> None:
    _, stages = cut()
    text = "\n".join(
        f"{s.program.name}: receives {[(a, v.name) for a, v in s.receives]}, "
        f"sends {[(v.name, r) for v, r in s.sends]}\n{program_text(s.program, ())}"
        for s in stages
    )
    check_golden(request, "stage_skip", text)


def test_a_value_goes_straight_to_all_its_readers() -> None:
    _, stages = cut()
    assert [[r for _, r in s.sends] for s in stages] == [[(1, 3)], [(2,)], [(3,)], []]
    assert [[a for a, _ in s.receives] for s in stages] == [[], [0], [1], [0, 2]]


def test_what_is_made_of_inputs_alone_is_made_where_it_is_read() -> None:
    _, stages = cut()
    for stage in stages:
        assert any("to" in n.name for n in stage.program.calls), stage.index
        assert [s.path for s in stage.sources if s.kind == "input"]


def test_stages_together_are_the_program() -> None:
    program, stages = cut()
    values = dict(zip((s.path for s in program.sources), tensors(), strict=True))
    torch.testing.assert_close(run(stages, values), skipping(*tensors()))


def test_integers_cross_without_gradients() -> None:
    def routed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, w)
        return y * 2 + y.argmax(-1, keepdim=True)

    x, w, *_ = tensors()
    program = program_of(routed, (x, w))
    order = [n.name for n in program.calls]
    at = next(i for i, n in enumerate(order) if n.startswith("mul"))
    last = next(i for i, n in enumerate(order) if n.startswith("add"))
    stages = Stage({n: int(i >= min(last, at) and n.startswith("add")) for i, n in enumerate(order)}, 2).run(program)
    assert [(v.dtype, v.grad) for _, v in stages[1].receives] == [(torch.float64, True), (torch.int64, False)]


def test_refuses_a_stage_that_reads_a_later_one() -> None:
    program = program_of(skipping, tensors())
    wrong = stages_of(program) | {"linear": 2}
    with pytest.raises(PlanError, match=r"reads .*, which stage 2 makes"):
        Stage(wrong, 4).run(program)


def test_moves_of_parameters_that_cost_nothing_forward_are_made_once() -> None:
    program = program_of(skipping, tensors())
    w = program.placeholders[1]
    graph = program.graph
    with graph.inserting_after(program.placeholders[-1]):
        moved = graph.call_function(move, (w, "dp", "I", "R"))
    moved.meta = dict(w.meta)
    w.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)
    without, moves = once_for_all(program)
    assert moves == {program.source(w).path: (("dp", "I", "R"),)}
    assert not any(n.target is move for n in without.graph.nodes)


def test_micro_batches_of_one_size_are_one_program() -> None:
    """Slices of inputs and keys of random numbers are parted from it, so it is lowered once for all of them."""

    def dropped(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.linear(x, w), 0.4, training=True).square().mean()

    tensors = (random(8, 6), random(6, 6, grad=True))
    _, divided, programs = made(dropped, tensors, 4)
    stages = [Stage({}, 1).run(p)[0] for p in programs]
    assert len({str(s.program.graph) for s in stages}) == 1
    assert divided.sinks == {0: P}
    values = dict(zip((s.path for s in programs[0].sources), tensors, strict=True))
    with drawing(Draw(3, 0)):
        found, kept = [], []
        for stage in stages:
            assert stage.cuts is not None
            cuts = stage.cuts.run(*(values[path] for path in stage.cuts.paths))
            kept.append(next(c for c in cuts if c.dtype == torch.int64))
            sources = [values[s.path] for s in stage.sources]
            found.append(torch.fx.GraphModule(torch.nn.Module(), stage.program.graph)(*sources, *cuts)[0])
        whole = Normalize().run(program_of(dropped, tensors))
        expected = torch.fx.GraphModule(torch.nn.Module(), whole.graph)(*tensors)[0]
    assert [key[1].item() for key in kept] == [0, 12, 24, 36]
    for k in range(4):  # the same as read off the first and the last
        read_off = between(stages[0], stages[-1], Fraction(k, 3))
        assert read_off is not None
        assert str(read_off.cuts.graph) == str(stages[k].cuts.graph)  # type: ignore[union-attr]
    assert between(stages[0], stages[-1], Fraction(1, 2)) is not None
    assert between(stages[0], stages[-1], Fraction(1, 5)) is None
    torch.testing.assert_close(torch.stack(found).sum(), expected)
