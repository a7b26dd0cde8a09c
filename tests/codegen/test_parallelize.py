"""parallelize(..., kernels=): kernels give the module's numbers, can be read, and are given up when broken."""

import re
import warnings

import pytest
import torch

import autopar
from autopar.codegen import group, load
from autopar.codegen.group import FusedGroup
from autopar.errors import PlanError
from autopar.passes.fuse import Fuse
from autopar.runtime.launch import CAPTURE, run_ranks_local
from tests.codegen.compare import groups
from tests.codegen.lowered import lower_function
from tests.end_to_end.small_models import build, inputs


def built(kernels, **options):
    args, _ = inputs("gpt", batch=2, seq=5)
    m = autopar.parallelize(
        build("gpt"), autopar.Mesh("1"), example_args=args, backend="aot", kernels=kernels, **options
    )
    return m, args


def groups_of(m):
    (lowered,) = m._cache.values()
    graphs = lowered.run.graphs[0]
    return [g for which in (graphs.forward, graphs.backward) for g in which.modules() if isinstance(g, FusedGroup)]


def reference():
    model = build("gpt")
    args, _ = inputs("gpt", batch=2, seq=5)
    loss = model(*args)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def check(m, args):
    loss, grads = reference()
    found = m(*args)
    found.backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-9, atol=1e-12)
    largest = max(g.abs().max() for g in grads.values())
    for name, parameter in m.named_parameters():
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        assert (grad - grads[name]).abs().max() <= 1e-9 * max(grads[name].abs().max(), 1e-6 * largest), name


def test_kernels_on_equal_the_module_and_are_dumped(tmp_path):
    m, args = built("on", dump_dir=str(tmp_path))
    check(m, args)
    assert {g.mode for g in groups_of(m)} == {"interpreter"}
    (dump,) = tmp_path.glob("*_after_fuse.txt")
    text = dump.read_text()
    assert re.search(r"^# forward %fused_\d+ in layers\.\d: %\w+", text, re.M)
    assert re.search(r"^def fused_\w*native_layer_norm", text, re.M)
    assert "# gelu_backward gpt.py:" in text
    kernels = text.split("import triton\n")
    assert len(set(kernels)) == len(kernels), "equal kernels are shown once"
    assert re.search(r"^# in no kernel, forward: addmm, \d+ times: no formula$", text, re.M)
    assert re.search(r"^# in no kernel, forward: gelu, \d+ times: joining it with others saves nothing", text, re.M)


def one_rank(payload):
    """Kernels between collectives: of this rank's groups those that fell back, after a comparison for each plan."""
    args, _ = inputs("gpt", batch=2, seq=5)
    fallen = []
    for pin in payload["pins"]:
        m = autopar.parallelize(
            build("gpt"), autopar.Mesh("2", device="cpu"), example_args=args, backend="aot", kernels="on", pin=pin
        )
        check(m, args)
        made = groups_of(m)
        assert len(made) > 4, pin
        fallen += [g.code.name for g in made if g.mode != "interpreter"]
    return fallen


def test_between_collectives():
    pins = [{"tp": 2}, {"dp": 2, "zero": 3, "recompute": "full"}]
    assert run_ranks_local("tests.codegen.test_parallelize:one_rank", 2, {"pins": pins}, 240, preload=CAPTURE) == [
        [],
        [],
    ]


def test_blocks_share_their_kernels():
    m, args = built("on")
    m(*args).backward()
    texts = [g.code.printed.text for g in groups_of(m)]
    assert len(set(texts)) < len(texts)


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_without_a_gpu_nothing_is_fused_by_itself(kernels):
    m, args = built(kernels)
    m(*args).backward()
    assert groups_of(m) == []


def test_an_unknown_word():
    with pytest.raises(PlanError, match="kernels='yes': must be one of auto, on, off"):
        built("yes")


def test_a_kernel_that_fails_is_given_up_with_one_warning(monkeypatch):
    m, args = built("on")
    failing = []

    def run(code, inputs, *, interpret=False):
        if "gelu" in code.name:
            failing.append(code.name)
            raise RuntimeError("no such register\nand more")
        return group_run(code, inputs, interpret=interpret)

    group_run = group.run
    monkeypatch.setattr(group, "run", run)
    with pytest.warns(UserWarning, match=r"kernel fused_gelu\w* failed \(RuntimeError: no such register\)") as caught:
        check(m, args)
    assert len(caught) == len(set(id(g) for g in groups_of(m) if "gelu" in g.code.name))
    assert "\n" not in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m.zero_grad()
        check(m, args)


def test_no_triton_is_one_warning(monkeypatch):
    import builtins

    def refuse(name, *rest, **named):
        if name.partition(".")[0] == "triton":
            raise ImportError("no module named triton")
        return real(name, *rest, **named)

    real = builtins.__import__
    load.usable.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    try:
        with pytest.warns(UserWarning, match="triton is of no use, it cannot be imported"):
            assert load.mode_of("on", "cpu") is None
        assert load.mode_of("on", "cuda") is None
    finally:
        load.usable.cache_clear()


def test_inputs_laid_out_otherwise():
    """The tensors of a later call may have other strides than those that the kernel was printed for."""

    def product(x, y):
        return (x * y).sin()

    x, y = torch.randn(6, 5, requires_grad=True), torch.randn(6, 5)
    (found,) = groups(Fuse("interpreter").run(lower_function(product, (x, y)).forward))
    turned = (x.detach().t().contiguous().t(), y)
    assert turned[0].stride() != x.stride()
    torch.testing.assert_close(found(*turned), found.aten(*turned))
    assert found.mode == "interpreter"


def test_source_is_cached_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    file = load.source_file("x = 1\n")
    assert file.read_text() == "x = 1\n"
    file.write_text("x = 2\n")
    assert load.source_file("x = 1\n").read_text() == "x = 1\n"
    assert [f.suffix for f in file.parent.iterdir()] == [".py"]
