"""Capture: the program computes what the model does, its interface is the model's, the model is untouched."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import call_program, capture, run_program
from autopar.capture.graph import is_check
from autopar.program import record


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, s, e = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, e))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tiny(nn.Module):
    """A GPT of a few thousand parameters, its head tied to the embedding on request."""

    def __init__(self, layers=4, tied=True, width=8, vocab=11, context=6):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.layers = nn.ModuleList(Layer(width, 2) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.spare = nn.Linear(3, 3)  # never called
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids, labels=None):
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(vocab=11, shape=(3, 5)):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(3))


def same_loss_and_gradients(model, args, kwargs, loss_of=lambda out: out, tolerance=1e-12):
    """Eager against captured; both on the model's own parameters. Returns the program and the captured output."""
    program = capture(model, args, kwargs)
    loss_of(model(*args, **kwargs)).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    loss = loss_of(model(*args, **kwargs)).detach()
    model.zero_grad()
    found = call_program(program, args, kwargs)
    torch.testing.assert_close(loss_of(found).detach(), loss, rtol=tolerance, atol=tolerance)
    loss_of(found).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None), name
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=tolerance, atol=tolerance)
    return program, found


@pytest.mark.parametrize("tied", [True, False])
def test_gpt(tied):
    torch.manual_seed(0)
    ids = tokens()
    program, _ = same_loss_and_gradients(Tiny(tied=tied).double(), (ids, ids), {})
    inputs = [s for s in program.sources if s.kind == "input"]
    assert [s.path for s in inputs] == ["args[0]", "args[1]"]  # though both are one tensor
    assert not [n for n in program.graph.nodes if is_check(n)]


def test_ties_and_unused_parameters():
    model = Tiny(tied=True)
    program = capture(model, (tokens(), tokens()), {})
    parameters = [s for s in program.sources if s.kind == "parameter"]
    assert [s.path for s in parameters] == [n for n, _ in model.named_parameters()]
    assert program.ties == {"head.weight": "emb.weight"}
    spare = next(n for n in program.placeholders if program.source(n).path == "spare.weight")
    assert not spare.users
    assert spare.meta["val"].shape == (3, 3)
    assert program.state["emb.weight"] is model.emb.weight
    used = next(n for n in program.placeholders if program.source(n).path == "emb.weight")
    assert {record(u).op for u in used.users} == {"emb/embedding/1", "head/linear/1"}


def test_placeholders_stand_first_in_order():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("passing", torch.ones(3), persistent=False)
            self.register_buffer("kept", torch.ones(3))
            self.register_buffer("idle", torch.ones(3))
            self.linear = nn.Linear(3, 3)
            self.linear.bias.requires_grad_(False)
            self.plain = torch.full((3,), 2.0)

        def forward(self, x, y):
            return self.linear(x) * self.passing + self.kept + torch.tensor([1.0, 2.0, 3.0]) * self.plain + y

    model = Net()
    program = capture(model, (torch.ones(2, 3),), {"y": torch.ones(3)})
    nodes = list(program.graph.nodes)
    assert [n.op for n in nodes[: len(program.sources)]] == ["placeholder"] * len(program.sources)
    assert [n.name for n in program.placeholders] == [s.node for s in program.sources]
    kinds = [s.kind for s in program.sources]
    assert kinds == ["parameter"] * 2 + ["buffer"] * 3 + ["constant"] * 2 + ["input"] * 2
    by_path = {s.path: s for s in program.sources}
    assert by_path["linear.weight"].trainable
    assert not by_path["linear.bias"].trainable
    assert {s.path: s.persistent for s in program.sources if s.kind == "buffer"} == {
        "passing": False, "kept": True, "idle": True,
    }  # fmt: skip
    assert all(s.path in program.state for s in program.sources if s.kind != "input")
    x = torch.randn(2, 3)
    torch.testing.assert_close(call_program(program, (x,), {"y": torch.ones(3)}), model(x, torch.ones(3)))


def test_meta_model_with_real_inputs():
    with torch.device("meta"):
        model = Tiny()
    program = capture(model, (tokens(), tokens()), {})
    assert all(t.is_meta for t in program.state.values())
    assert program.output.args[0][0].meta["val"].shape == ()
    assert len(program.classes[1].blocks) == 4


class Touchy(nn.Module):
    """Changes itself in every way that a forward can."""

    def __init__(self):
        super().__init__()
        self.bn, self.drop = nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.last = self.calls
        self.count += 1
        self.count = self.count * 1
        return self.drop(self.bn(x))


def test_model_and_random_state_are_unchanged():
    model = Touchy()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    buffer, state = model.count, torch.get_rng_state()
    program = capture(model, (torch.randn(4, 3, generator=torch.Generator().manual_seed(0)),), {})
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls == 0
    assert not hasattr(model, "last")
    assert model.count is buffer
    assert model.training
    assert all(m.training for m in model.modules())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert {s.path for s in program.sinks if s.kind == "state"} == {n for n, _ in model.named_buffers()}


def test_what_a_first_call_installs_is_installed_once():
    class Watched(nn.Module):
        """Collects what its layer gives through a hook that the first call adds, as transformers does."""

        def __init__(self):
            super().__init__()
            self.layer, self.ready, self.seen, self.names = nn.Linear(3, 3), False, {}, []

        def forward(self, x):
            if not self.ready:
                self.layer.register_forward_hook(lambda module, args, out: self.names.append("layer"))
                self.ready = True
            self.names.clear()
            self.seen["out"] = self.layer(x)
            return self.seen["out"] * len(self.names)

    model, x = Watched(), torch.ones(2, 3)
    model.names.append("mine")
    for _ in range(2):
        program = capture(model, (x,), {})
        assert (len(model.layer._forward_hooks), model.ready, model.seen, model.names) == (0, False, {}, ["mine"])
    torch.testing.assert_close(call_program(program, (x,), {}), model(x))
    assert len(model.layer._forward_hooks) == 1


def test_modes_are_captured_as_they_are():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    x = torch.ones(2, 3)
    train, evaluate = capture(model, (x,), {}), capture(model.eval(), (x,), {})
    assert (train.training, evaluate.training) == (True, False)
    assert [record(n).op for n in train.calls] == ["0/linear/1", "1/dropout/1"]
    assert [record(n).op for n in evaluate.calls] == ["0/linear/1"]
    torch.testing.assert_close(call_program(evaluate, (x,), {}), model(x))


def test_capture_under_no_grad_keeps_gradients():
    model = Tiny(layers=1)
    with torch.no_grad():
        program = capture(model, (tokens(), tokens()), {})
    call_program(program, (tokens(), tokens()), {}).backward()
    assert model.emb.weight.grad is not None


def test_records():
    program = capture(Tiny(layers=2), (tokens(), tokens()), {})
    names = [record(n).op for n in program.calls]
    assert len(set(names)) == len(names)
    assert "layers.1/view/3" in names
    assert "layers.0.qkv/linear/1" in names
    assert "/cross_entropy_loss/1" in names
    lines = {record(n).op: record(n).where for n in program.calls}
    first = Layer.forward.__code__.co_firstlineno
    assert lines["layers.1/scaled_dot_product_attention/1"] == f"{__file__}:{first + 3}"
    assert lines["layers.0.qkv/linear/1"] == f"{__file__}:{first + 2}"  # not torch's linear.py
    weight = next(n for n in program.placeholders if program.source(n).path == "layers.1.up.weight")
    assert record(weight).op == "layers.1.up.weight"
    assert record(weight).block == "layers.1"


def test_second_call_of_a_module_counts_on():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(self.fc(x).relu())

    program = capture(Twice(), (torch.ones(2, 3),), {})
    assert [record(n).op for n in program.calls] == ["fc/linear/1", "/relu/1", "fc/linear/2"]


def test_noise_is_dropped_and_needed_ops_are_kept():
    class Net(nn.Module):
        def forward(self, x, n):
            y = F.dropout(x.to(torch.float32), 0.0).float().to(torch.float64)
            return y.transpose(0, 1).contiguous() + torch.tensor(2.0) + n.detach() + x.detach()

    program = capture(Net(), (torch.ones(2, 2), torch.ones(2, 2, dtype=torch.int64)), {})
    ops = [record(n).op.split("/")[1] for n in program.calls]
    assert ops == ["to", "transpose", "contiguous", "add", "add", "detach", "add"]


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options,
    ))  # fmt: skip


def llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, **options,
    ))  # fmt: skip


@pytest.mark.parametrize("build", [gpt2, llama], ids=lambda b: b.__name__)
def test_transformers(build):
    torch.manual_seed(0)
    model, ids = build().double(), tokens(vocab=32)
    assert model.config.use_cache
    program, found = same_loss_and_gradients(
        model, (), {"input_ids": ids, "labels": ids}, lambda out: out.loss + out.logits.square().mean()
    )
    assert model.config.use_cache
    assert type(found) is type(model(ids, use_cache=False))
    assert found.past_key_values is None
    layers = next(c for c in program.classes if len(c.blocks) > 1)
    assert len(layers.blocks) == model.config.num_hidden_layers
    assert bool(program.ties) == (build is gpt2)


def test_run_program_takes_other_state_and_inputs():
    model = Tiny(layers=1)
    program = capture(model, (tokens(),), {})
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.norm.bias.add_(1)
    ids = tokens() * 0 + 1
    outputs, buffers = run_program(program, dict(other.named_parameters()), [ids])
    torch.testing.assert_close(outputs[0], other(ids))
    assert buffers == {}
    assert not torch.allclose(outputs[0], model(ids))


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.distributions.Normal(self.fc(x), x.abs() + 1).rsample()


def test_distributions_are_captured_without_their_checks_of_values():
    before = torch.distributions.Distribution._validate_args
    program = capture(Draws(), (torch.ones(3, 4),), {})
    assert [n for n in program.calls if "normal" in str(n.target) or "randn" in str(n.target)]
    assert torch.distributions.Distribution._validate_args == before


class ReadsData(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        h = self.fc(x)
        return h / (self.fc.weight.data.norm() + h.data.abs().sum())


def test_data_is_a_value_without_gradient():
    model, x = ReadsData(), torch.ones(3, 4)
    inherited = torch.Tensor.data
    program = capture(model, (x,), {})
    assert torch.Tensor.data is inherited
    state = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    call_program(program, (x,), {}, state).square().sum().backward()
    model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(state[name].grad, parameter.grad)


def test_a_name_that_is_no_identifier():
    """torch.fx prints the names of placeholders into its code."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.values = nn.ParameterDict({key: torch.randn(3) for key in ('a"b', "a b", "a_b", "x²")})
            self.a, self.a_b = nn.Module(), nn.Module()
            self.a.b_c, self.a_b.c = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            for value in self.values.values():
                x = x * value
            return x * self.a.b_c + self.a_b.c

    model, x = Odd(), torch.randn(3)
    program = capture(model, (x,), {})
    assert {s.path for s in program.sources if s.kind == "parameter"} == set(dict(model.named_parameters()))
    module = torch.fx.GraphModule(nn.Module(), program.graph)
    torch.testing.assert_close(module(*(program.state[s.path] for s in program.sources[:-1]), x)[0], model(x))
