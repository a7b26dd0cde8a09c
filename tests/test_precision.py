"""autopar/precision.py: what `precision=` means, what it refuses, and what a model is captured as."""

import threading

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autopar
from autopar.precision import Precision, check_device, parse_precision, skeleton

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def test_names_compute_in_it_and_keep_the_rest_in_fp32():
    bf16 = parse_precision("bf16")
    assert bf16 == Precision(BF16, FP32, at_least=FP32)
    assert bf16.name == "bf16"
    assert [bf16.master(d) for d in (BF16, FP32, FP64, torch.int32)] == [FP32, FP32, FP64, torch.int32]
    assert bf16.computed(torch.int64) == torch.int64
    assert parse_precision(None) is None


def test_a_policy_means_what_it_means_to_fsdp():
    assert parse_precision(MixedPrecisionPolicy(BF16)) == Precision(BF16, BF16)
    policy = parse_precision(MixedPrecisionPolicy(BF16, FP32, FP64, cast_forward_inputs=False))
    assert policy == Precision(BF16, FP32, FP64, cast_inputs=False)
    assert policy.master(BF16) == BF16
    x = {"x": torch.ones(2), "i": torch.ones(2, dtype=torch.int64)}
    assert policy.inputs(x)["x"].dtype == FP32
    cast = parse_precision("bf16").inputs(x)
    assert (cast["x"].dtype, cast["i"].dtype) == (BF16, torch.int64)
    assert parse_precision(MixedPrecisionPolicy()) == Precision()


@pytest.mark.parametrize(
    "value", ["int8", 3, MixedPrecisionPolicy(torch.int32), MixedPrecisionPolicy(torch.float8_e4m3fn)]
)
def test_refuses(value):
    with pytest.raises(autopar.PlanError, match="precision"):
        autopar.plan(nn.Linear(2, 2), autopar.Mesh("1"), example_args=(torch.ones(1, 2),), precision=value)


def test_refuses_what_the_device_lacks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    for value, device in (
        (MixedPrecisionPolicy(FP32, BF16), "cuda"),
        ("bf16", "cuda"),
        (MixedPrecisionPolicy(FP64), "mps"),
    ):
        with pytest.raises(autopar.PlanError, match=rf"(bfloat16|float64) is not what {device} devices") as raised:
            check_device(parse_precision(value), torch.device(device))
        assert "\n" not in str(raised.value)
    check_device(parse_precision("fp16"), torch.device("cuda"))
    check_device(parse_precision("bf16"), torch.device("cpu"))


def test_the_skeleton_has_no_memory_and_keeps_ties():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    made = skeleton(model, parse_precision("bf16"))
    assert made[0].weight is made[1].weight
    assert {p.dtype for p in made.parameters()} == {BF16}
    assert sum(p.untyped_storage().nbytes() for p in made.parameters()) == 0
    assert made[2].running_mean.dtype == FP32
    assert model[0].weight.dtype == FP32


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return (self.inner(x) * 2).sum()


@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_one_device_computes_like_the_cast_model(backend):
    torch.manual_seed(0)
    model, x = Scale(), torch.randn(3, 4)
    low = Scale().to(BF16)
    low.load_state_dict(model.state_dict())
    low(x.to(BF16)).backward()
    m = autopar.parallelize(model, autopar.Mesh("1"), example_args=(x,), precision="bf16", backend=backend)
    out = m(x)
    out.backward()
    assert out.dtype == BF16
    assert m.inner.weight.dtype == m.inner.weight.grad.dtype == FP32
    assert torch.equal(m.inner.weight.grad, low.inner.weight.grad.float())
    assert torch.equal(m.inner.weight, model.inner.weight)  # the master weights are exact
    other = m(torch.cat([x, x]))  # captured again
    assert other.dtype == BF16


def test_a_bf16_model_gets_fp32_masters_under_a_name_only():
    x = torch.randn(3, 4)
    for precision, dtype in (("bf16", FP32), (MixedPrecisionPolicy(BF16, FP32), BF16)):
        m = autopar.parallelize(Scale().to(BF16), autopar.Mesh("1"), example_args=(x,), precision=precision)
        m(x).backward()
        assert {p.grad.dtype for p in m.parameters()} == {dtype}


class Moving(nn.Module):
    """forward moves a weight."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.mul_(0.999)
        return self.inner(x)


def test_a_written_parameter_is_not_rounded_to_what_is_read():
    with pytest.raises(autopar.PlanError, match=r"inner\.weight: forward writes this parameter.*bfloat16"):
        autopar.parallelize(Moving(), autopar.Mesh("1"), example_args=(torch.randn(3, 4),), precision="bf16")


class Kept(nn.Module):
    """Holds what deepcopy refuses: the result of a forward, a lock, and a weight that a hook computes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.utils.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)])
        self.guard, self.seen = threading.Lock(), []

    def forward(self, x):
        with self.guard:
            h = self.inner[0](x)
        self.seen = [{"h": h}]
        return self.inner[1](h)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_the_skeleton_of_a_module_that_holds_results_and_locks():
    torch.manual_seed(0)
    model, x = Kept(), torch.randn(5, 3)
    model(x).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    made = skeleton(model)
    assert made.guard is model.guard
    assert made.inner[0] is not model.inner[0]
    assert made.inner[0].weight_g.untyped_storage().size() == 0
    assert made.seen[0]["h"].grad_fn is None
    m = autopar.parallelize(model, autopar.Mesh("1", device="cpu"), example_args=(x,), outputs="gather")
    m(torch.cat([x, x])[:7])  # another size is captured from the skeleton
    m(x).sum().backward()
    for name, parameter in m.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name])
