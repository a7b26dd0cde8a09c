"""Blocks are the outermost repeated modules; classes hold the equal ones, node by node."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.program import record


class Layer(nn.Module):
    def __init__(self, width=4, hidden=8, act=torch.relu):
        super().__init__()
        self.up, self.down, self.act = nn.Linear(width, hidden), nn.Linear(hidden, width), act

    def forward(self, x, extra=None):
        y = self.act(self.up(x))
        return x + self.down(y if extra is None else y * extra)


class Stack(nn.Module):
    def __init__(self, layers, between=False):
        super().__init__()
        self.emb, self.layers, self.head = nn.Linear(4, 4), nn.ModuleList(layers), nn.Linear(4, 2)
        self.between = between

    def forward(self, x):
        x = self.emb(x)
        for layer in self.layers:
            x = layer(x) * 2 if self.between else layer(x)
        return self.head(x)


def blocks_of(model, *args):
    program = capture(model, args or (torch.ones(3, 4),), {})
    program.graph.lint()
    members = {}
    for node in program.calls:
        members.setdefault(record(node).block, []).append(node.name)
    assert tuple(members) == program.blocks  # in execution order, each call in exactly one
    in_classes = [(b, n) for c in program.classes for b, n in zip(c.blocks, c.nodes, strict=True)]
    assert {b: list(n) for b, n in in_classes} == members
    assert len(in_classes) == len(program.blocks)
    return program


def sizes(program):
    return {c.name: len(c.blocks) for c in program.classes}


def test_four_layers():
    program = blocks_of(Stack([Layer() for _ in range(4)]))
    layers = tuple(f"layers.{i}" for i in range(4))
    assert program.blocks == ("before:layers.0", *layers, "after:layers.3")
    assert sizes(program) == {"before:layers.0": 1, "layers.*": 4, "after:layers.3": 1}
    equal = next(c for c in program.classes if c.name == "layers.*")
    nodes = {n.name: n for n in program.calls}
    for position in zip(*equal.nodes, strict=True):
        assert len({nodes[n].target for n in position}) == 1
        assert len({record(nodes[n]).op.split("/", 1)[0].split(".")[-1] for n in position} - set("0123")) <= 1


def test_code_between_layers():
    program = blocks_of(Stack([Layer() for _ in range(3)], between=True))
    assert program.blocks == (
        "before:layers.0", "layers.0", "before:layers.1", "layers.1", "before:layers.2", "layers.2", "after:layers.2",
    )  # fmt: skip
    assert sizes(program)["before:layers.*"] == 2
    assert sizes(program)["layers.*"] == 3


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ([Layer(hidden=6), Layer(), Layer(hidden=6), Layer()], [("layers.0", "layers.2"), ("layers.1", "layers.3")]),
        ([Layer(hidden=6), Layer(), Layer()], [("layers.0",), ("layers.1", "layers.2")]),
        ([Layer(act=torch.tanh), Layer(), Layer()], [("layers.0",), ("layers.1", "layers.2")]),
    ],
)
def test_unequal_layers_are_other_classes(layers, expected):
    program = blocks_of(Stack(layers))
    assert [c.blocks for c in program.classes if c.blocks[0].startswith("layers")] == expected


def test_frozen_layers_are_another_class():
    model = Stack([Layer() for _ in range(4)])
    model.layers[:2].requires_grad_(False)
    found = [c.blocks for c in blocks_of(model).classes if c.blocks[0].startswith("layers")]
    assert found == [("layers.0", "layers.1"), ("layers.2", "layers.3")]


def test_shared_layer_called_again():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Layer()

        def forward(self, x):
            for _ in range(3):
                x = self.layer(x)
            return x.sum()

    program = blocks_of(Recurrent())
    assert program.blocks == ("layer", "layer#2", "layer#3", "after:layer#3")
    assert sizes(program)["layer"] == 3


def test_shared_layer_under_several_names():
    program = blocks_of(Stack([Layer()] * 3))
    assert program.blocks == ("before:layers.0", "layers.0", "layers.1", "layers.2", "after:layers.2")
    assert sizes(program)["layers.*"] == 3
    assert program.ties["layers.2.up.weight"] == "layers.0.up.weight"


def test_two_stacks_and_nested_repetition():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Stack([Layer(), Layer()]), Stack([Layer(hidden=6), Layer(hidden=6)])
            self.decoder.emb = nn.Linear(2, 4)

        def forward(self, x):
            return self.decoder(self.encoder(x))

    program = blocks_of(Both())
    assert [b for b in program.blocks if ":" not in b] == [
        "encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1",
    ]  # fmt: skip


def test_outermost_repetition_wins():
    program = blocks_of(nn.Sequential(*(nn.Sequential(Layer(), Layer()) for _ in range(3))))
    assert program.blocks == ("0", "1", "2")


def test_unequal_stages_are_looked_into():
    stages = [nn.Sequential(Layer(hidden=h), Layer(hidden=h)) for h in (4, 6, 8)]
    assert blocks_of(nn.Sequential(*stages)).blocks == ("0.0", "0.1", "1.0", "1.1", "2.0", "2.1")


def test_stage_without_an_equal_pair_has_blocks_too():
    stages = [nn.Sequential(Layer(), Layer()), nn.Sequential(Layer(hidden=5), Layer(hidden=6)), nn.Linear(4, 1)]
    assert blocks_of(nn.Sequential(*stages)).blocks == ("0.0", "0.1", "1.0", "1.1", "after:1.1")


def test_same_class_under_names_without_numbers():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.head = Layer(), Layer(), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.right(self.left(x)))

    program = blocks_of(Named())
    assert program.blocks == ("left", "right", "after:right")
    assert next(c.blocks for c in program.classes if len(c.blocks) == 2) == ("left", "right")


def test_numbered_layers_of_one_class_without_an_equal_pair():
    program = blocks_of(nn.Sequential(nn.Linear(4, 4), Stack([Layer(hidden=5), Layer(hidden=6)])))
    assert [b for b in program.blocks if ":" not in b] == ["1.layers.0", "1.layers.1"]


def test_repeated_details_make_no_blocks():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2, self.act = nn.LayerNorm(4), nn.LayerNorm(4), nn.GELU()
            self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x):
            x = self.act(self.first(self.norm1(x).sin().cos().exp().tanh().neg()))
            return self.act(self.second(x).abs().sqrt().sin().cos()) + self.norm2(x[:, :4])

    assert [b for b in blocks_of(Net()).blocks if ":" not in b] == ["norm1", "first", "second", "norm2"]


def test_without_repetition_the_children_are_blocks():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert blocks_of(model).blocks == ("0", "before:2", "2")


def test_without_modules_there_is_one_block():
    class Plain(nn.Module):
        def forward(self, x):
            return x.sin().cos()

    program = capture(Plain(), (torch.ones(2),), {}, name="plain")
    assert program.blocks == ("plain",)
    assert sizes(program) == {"plain": 1}


def test_hundred_layers_take_little_time():
    from autopar.capture.blocks import find_blocks

    program = capture(Stack([Layer() for _ in range(100)]), (torch.ones(3, 4),), {})
    start = time.process_time()
    _, classes, _ = find_blocks(program.graph, {}, "model")
    assert time.process_time() - start < 1
    assert max(len(c.blocks) for c in classes) == 100
