"""autopar/repeated.py: lowering equal blocks once gives the graphs, node for node, that lowering all of them gives."""

import functools
from collections import Counter
from dataclasses import dataclass

import functorch.compile
import pytest
import torch
from torch import nn

import autopar
from autopar import repeated
from autopar.models import GPT, GPTConfig, Llama, LlamaConfig, MoE, MoEConfig
from autopar.passes import outline
from autopar.passes.cast import Cast
from autopar.passes.shard import Shard
from autopar.pipeline import carry_out, choose, prepare
from autopar.program import record
from autopar.request import make_request
from autopar.traced import trace

SIZES = {"vocab": 64, "context": 16, "heads": 4, "width": 16}
MODELS = {
    "gpt": lambda n: GPT(GPTConfig(**SIZES, layers=n, ff_width=32, tied=True)),
    "llama": lambda n: Llama(LlamaConfig(**SIZES, layers=n, kv_heads=2, ff_width=24)),
    "moe": lambda n: MoE(MoEConfig(**SIZES, layers=n, kv_heads=2, ff_width=24, experts=4, capacity=1.5)),
    "hf-gpt2": lambda n: _with_dropout(n),
}


def _with_dropout(layers):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=layers, n_head=4, n_positions=16))


@functools.cache
def prepared(name, layers):
    model = MODELS[name](layers).train()
    ids = torch.randint(1, 64, (8, 8))
    args, kwargs = ((), {"input_ids": ids, "labels": ids}) if name == "hf-gpt2" else ((ids, ids), {})
    return prepare(model, args, kwargs, name=name, outputs="auto")


@dataclass
class Case:
    """A program of one rank. level: of recomputation, "mixed": of one block alone. reduce: parameters are stored in
    float64 and computed with in float32. fused: ops are joined to kernels."""

    name: str
    layers: int
    mesh: str
    pin: dict
    level: str = "none"
    rank: int = 0
    reduce: torch.dtype | None = None
    fused: bool = False

    def __str__(self):
        return "-".join(map(str, (self.name, self.mesh, *self.pin.items(), self.level)))

    @functools.cached_property
    def sharded(self):
        """The local program, its mesh and the rank's place in it."""
        found = prepared(self.name, self.layers)
        topology = autopar.Mesh(self.mesh, device="cpu")
        request = make_request(topology, self.pin, None, None, "adamw", "auto", None, "aot", False, False, None, "off")
        chosen = choose(found, topology, request.profile, request.settings, recompute=("none",))
        carried, decisions = carry_out(found, chosen, request.profile, request.settings)
        at = carried.mesh.coordinate(self.rank)
        program = Shard(found.analysis, decisions, carried.mesh, request.profile, at).run(found.program)
        if self.reduce is not None:
            paths = [s.path for s in program.sources if s.kind == "parameter"]
            program = Cast(dict.fromkeys(paths, torch.float64), self.reduce).run(program)
        return program, carried.mesh, at

    def lowered(self):
        """Both graphs."""
        program, mesh, at = self.sharded
        levels = {b: self.level for c in program.classes for b in c.blocks}
        levels = {"layers.1": "full"} if self.level == "mixed" else levels
        return trace(program, mesh, at, recompute=levels, fused=self.fused).graphs


class Signed:
    """Graphs up to the names and the order of nodes: for each node what it does, to what, and all that is known of it.
    Signatures are numbers, equal for equal nodes of all graphs that are signed here."""

    def __init__(self):
        self.numbers = {}

    def number(self, *what):
        return self.numbers.setdefault(what, len(self.numbers))

    def graph(self, module, inputs):
        """The signature of each node; inputs: those of the placeholders."""
        found, inputs = {}, iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                found[node] = next(inputs)
                continue
            target = str(node.target)
            if node.op == "call_module":
                target = module.get_submodule(node.target).code.printed.text
            args = str(torch.fx.map_arg((node.args, node.kwargs), lambda n: Signature(found[n])))
            tag = node.meta.get("partitioner_tag")
            found[node] = self.number(node.op, target, args, str(record(node)), str(form(node)), tag)
        return found

    def graphs(self, graphs):
        """(forward, results, what is saved; backward, gradients) in signatures, nodes counted."""
        places = graphs.forward.graph.find_nodes(op="placeholder")
        forward = self.graph(graphs.forward, [("input", i) for i in range(len(places))])
        *calls, end = graphs.forward.graph.nodes
        outputs = [forward.get(o, o) for o in end.args[0]]
        results, saved = outputs[: graphs.results], outputs[graphs.results :]
        tangents = len(graphs.backward.graph.find_nodes(op="placeholder")) - len(saved)
        backward = self.graph(graphs.backward, [*saved, *(("gradient", i) for i in range(tangents))])
        *late, end = graphs.backward.graph.nodes
        grads = [backward.get(o, o) for o in end.args[0]]
        return (
            Counter(forward[n] for n in calls), results, Counter(saved), Counter(backward[n] for n in late), grads,
            Counter(graphs.saved.values()),
        )  # fmt: skip


@dataclass(frozen=True)
class Signature:
    number: object


def form(node):
    value = node.meta.get("val")
    return (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else None


@pytest.fixture
def traces(monkeypatch):
    """Grows by one for every function that AOTAutograd traces."""
    seen, original = [], functorch.compile.aot_function

    def counting(*args, **kwargs):
        seen.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(functorch.compile, "aot_function", counting)
    return seen


def check_both_ways(case, monkeypatch, traces):
    """The graphs of equal blocks lowered once are those of the whole program; two functions are traced for them."""
    once = case.lowered()
    assert len(traces) == 2
    with monkeypatch.context() as patch:
        patch.setattr(outline, "_WORTHWHILE", 10**9)
        whole = case.lowered()
    assert len(traces) == 3
    signed = Signed()
    assert signed.graphs(once) == signed.graphs(whole)


ZERO3 = {"dp": 2, "tp": 2, "zero": 3}
CASES = [
    Case("gpt", 3, "2x2", ZERO3, "selective"),
    Case("gpt", 3, "4", {"dp": 4, "zero": 0}, "full"),
    Case("gpt", 3, "2x2", ZERO3, reduce=torch.float64),
    Case("gpt", 3, "3", {"tp": 3}, rank=2),
    Case("hf-gpt2", 3, "2x2", ZERO3, "full"),
    Case("llama", 3, "4", {"tp": 4, "sp": True}, "full"),
    Case("llama", 4, "2x2", ZERO3, rank=3),
    Case("llama", 3, "1", {}, "mixed", fused=True),
    Case("moe", 3, "2x2", ZERO3, "selective"),
    Case("moe", 3, "2", {"dp": 2, "zero": 3}, fused=True),
]


def test_the_same_graphs_node_for_node(monkeypatch, traces):
    check_both_ways(Case("gpt", 3, "2", {"dp": 2, "zero": 0}, "selective"), monkeypatch, traces)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_graphs_for_every_way_to_split(monkeypatch, traces, case):
    check_both_ways(case, monkeypatch, traces)


@pytest.mark.slow
def test_more_layers_are_traced_no_more(traces):
    Case("llama", 6, "2", {"dp": 2, "zero": 3}).lowered()
    assert len(traces) == 2


class Stack(nn.Module):
    """Layers one after another, and a loss."""

    def __init__(self, layer, count=3, end=None):
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Linear(4, 4, dtype=torch.float64)  # so that the first layer's input takes a gradient, too
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.end = end or (lambda x: x.square().mean())

    def forward(self, x):
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


class Layer(nn.Module):
    """Long enough to be worth a block."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64)
        self.norm = nn.LayerNorm(4, dtype=torch.float64)

    def forward(self, x):
        h = self.up(self.norm(x))
        return x + self.down(h.sin() * h.tanh() + h.cos() * h.sigmoid() + 0.5 * h)


class Aside(Layer):
    """Hands on a second value, through which no gradient comes back."""

    def forward(self, pair):
        x, seen = pair if isinstance(pair, tuple) else (pair, pair.sum())
        y = super().forward(x) + 0.1 * seen.detach()
        return y, y.sin().sum()


class Turned(Layer):
    """Its result lies transposed in memory."""

    def forward(self, x):
        return super().forward(x).t().contiguous().t()


class Viewed(Layer):
    """Hands on a view of what it was handed."""

    def forward(self, pair):
        x, rows = pair if isinstance(pair, tuple) else (pair, pair[:1])
        return super().forward(x) + rows, x[1:2]


class Normed(Layer):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x):
        return super().forward(self.batch(x))


class Dropping(Layer):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.4)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad  # tells itself from autograd's


class Own(Layer):
    def forward(self, x):
        return super().forward(Twice.apply(x))


def frozen():
    layer = Layer()
    return layer.requires_grad_(False)


STACKS = {
    "plain": (Layer, None, 2),
    "aside": (Aside, lambda pair: (pair[0] * pair[1].detach()).sum(), 3),
    "turned": (Turned, None, 3),  # the first layer's input is not turned
    "expanded gradient": (Layer, lambda x: x.sum(), 3),  # the last layer's
    "transposed gradient": (Layer, lambda x: x.t().reshape(-1).square().mean(), 3),
    "view": (Viewed, lambda pair: pair[0].square().mean() + pair[1].sin().mean(), 3),  # refused: traced whole
    "batch norm": (Normed, None, 2),
    "own backward": (Own, None, 2),
    "frozen": (frozen, None, 3),
}
"""Layer, loss, and how many functions are traced: the program, and a layer for each way that values lie."""
IN_SHORT = ("aside", "view")


@pytest.mark.parametrize("name", [n if n in IN_SHORT else pytest.param(n, marks=pytest.mark.slow) for n in STACKS])
def test_loss_gradients_and_buffers_are_those_of_the_model(name, traces):
    layer, end, count = STACKS[name]
    model = Stack(layer, end=end)
    if name == "frozen":
        model.layers[2].requires_grad_(True)
    x = torch.randn(5, 4, dtype=torch.float64)
    m = autopar.parallelize(model, autopar.Mesh("1"), example_args=(x,))
    for _ in range(2):
        expected, found = model(x), m(x)
        expected.backward()
        found.backward()
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(
        {k: p.grad for k, p in m.named_parameters() if p.grad is not None}, wanted, rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(dict(m.named_buffers()), dict(model.named_buffers()), rtol=1e-12, atol=1e-12)
    (run,) = m._cache.values()
    assert len(run.run.graphs) == 1
    assert len(traces) == count


def test_each_block_draws_its_own_numbers(traces):
    x = torch.randn(5, 4, dtype=torch.float64)
    results = []
    for backend in ("aot", "eager"):
        m = autopar.parallelize(Stack(Dropping).train(), autopar.Mesh("1"), example_args=(x,), backend=backend)
        m.manual_seed(7)
        loss = m(x)
        loss.backward()
        results.append((loss, [p.grad for p in m.parameters()]))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert len(traces) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_inductor_is_handed_equal_blocks_too(traces):
    """Its ops are taken apart otherwise."""
    x = torch.randn(5, 4, dtype=torch.float64)
    model = Stack(Layer)
    m = autopar.parallelize(model, autopar.Mesh("1"), example_args=(x,), backend="inductor")
    expected, found = model(x), m(x)
    expected.backward()
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = {k: p.grad for k, p in model.named_parameters()}
    torch.testing.assert_close({k: p.grad for k, p in m.named_parameters()}, wanted, rtol=1e-12, atol=1e-12)
    assert len(traces) == 2


def test_blocks_that_cannot_share_a_trace_are_told_in_the_dump(tmp_path, monkeypatch):
    def refused(*_):
        raise repeated.Unequal("for this test")

    monkeypatch.setattr(repeated, "_trace", refused)
    model, ids = MODELS["gpt"](3), torch.randint(1, 64, (2, 8))
    expected = model(ids, ids)
    m = autopar.parallelize(MODELS["gpt"](3), "1", example_args=(ids, ids), dump_dir=str(tmp_path))
    m.load_state_dict(model.state_dict())
    loss = m(ids, ids)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for text in tmp_path.glob("**/*lower_*"):
        assert text.read_text().count("# equal blocks are traced one by one: Unequal: for this test\n") == 1
    assert len(list(tmp_path.glob("**/*lower_*"))) == 2
