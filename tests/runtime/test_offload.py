"""runtime/offload.py: copies of their own, eager and traced; a process group that cannot serve the host is refused."""

import pytest
import torch
import torch.distributed as dist

import autopar
from autopar.mesh import Mesh, factor_axes
from autopar.runtime.offload import fetch, on_host, put
from autopar.runtime.process_mesh import ProcessMesh, with_host

CPU = torch.device("cpu")


@pytest.mark.parametrize("copy", [lambda x: fetch(x, CPU), put, lambda x: on_host(x, CPU)])
def test_copies_share_no_memory(copy):
    x = torch.randn(3, 4).t()
    y = copy(x)
    assert torch.equal(x, y)
    assert y.dtype == x.dtype
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_ops_are_as_they_say_when_traced():
    for op, args in ((torch.ops.autopar.fetch, (CPU,)), (torch.ops.autopar.put, ())):
        torch.library.opcheck(op.default, (torch.randn(2, 3), *args))


def test_a_group_of_gpus_alone_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    mesh = ProcessMesh(factor_axes(Mesh("2"), {"dp": 2}), 0, torch.device("cuda"), device_mesh=object())
    with pytest.raises(autopar.MeshError, match=r"only cuda:nccl; start it with .*cpu:gloo,cuda:nccl"):
        with_host(mesh)


def test_a_cpu_needs_no_second_mesh():
    mesh = ProcessMesh(factor_axes(Mesh("2"), {"dp": 2}), 0, CPU, device_mesh=object())
    assert with_host(mesh) is mesh
