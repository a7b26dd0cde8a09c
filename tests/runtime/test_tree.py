"""autopar/runtime/tree.py: a tree of parts looks like the model's, tells what was changed on it, and runs nothing."""

import copy

import pytest
import torch
from torch import nn

from autopar.errors import PlanError
from autopar.runtime.tree import changed, changes, modes_after, names_of, plant, prune


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)) for _ in range(2))
        self.norm = nn.BatchNorm1d(2)
        self.again, self.none, self.act = self.norm, None, nn.LSTM(2, 2)
        self.register_module("nothing", None)
        self.scale = nn.Parameter(torch.ones(2))


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def grown(model):
    root = nn.Module()
    return root, plant(root, model)


def test_the_tree_is_the_models(model, grown):
    root, parts = grown
    assert [n for n, _ in root.named_modules(remove_duplicate=False)] == [
        n for n, _ in model.named_modules(remove_duplicate=False)
    ]
    assert [path for path, _ in parts] == [n for n, _ in model.named_modules()]
    assert root.again is root.norm
    assert isinstance(root.norm, nn.BatchNorm1d)
    assert not isinstance(root.norm, nn.Linear)
    assert len(root.blocks) == 2
    assert root.blocks[0][1].p == 0.1
    assert "LSTM()" in repr(root)
    names = [n for n in names_of(model) if n in model.state_dict()]
    assert names == list(model.state_dict())


def test_names_wait_for_values_in_the_models_order(grown):
    root, parts = grown
    root.norm.register_parameter("bias", nn.Parameter(torch.ones(2)))
    root.norm.register_parameter("weight", nn.Parameter(torch.ones(2)))
    prune(parts)
    assert list(root.state_dict()) == ["norm.weight", "norm.bias", "again.weight", "again.bias"]


def test_what_is_changed_is_told_and_put_back(model, grown):
    root, parts = grown
    assert changes(parts) == ()
    root.blocks[0].eval()
    root.norm.momentum = None
    root.norm.mine = [1]  # a name of the user's own says nothing
    found = changes(parts)
    assert found == (
        ("blocks.0", False, ()),
        ("blocks.0.0", False, ()),
        ("blocks.0.1", False, ()),
        ("norm", True, (("momentum", None),)),
    )
    model.requires_grad_(False)
    with changed(model, True, found, ("scale",)):
        assert model.norm.momentum is None
        assert model.scale.requires_grad
        assert [module.training for module in model.blocks] == [False, True]
    assert model.norm.momentum == 0.1
    assert not model.scale.requires_grad
    root.norm.momentum = 0.1
    root.train()
    assert changes(parts) == ()


def test_a_copy_has_changes_of_its_own(grown):
    root, parts = grown
    root.norm.momentum = 0.5
    other, theirs = copy.deepcopy((root, parts))
    other.norm.momentum = 0.1
    assert isinstance(other.norm, nn.BatchNorm1d)
    assert changes(theirs) == ()
    assert changes(parts) != ()


def test_parts_run_nothing(grown):
    norm = grown[0].norm
    with pytest.raises(PlanError, match="BatchNorm1d is a part of a parallel module"):
        norm(torch.ones(2, 2))
    with pytest.raises(AttributeError, match="BatchNorm1d has no 'reset_running_stats' in a parallel module"):
        norm.reset_running_stats()
    with pytest.raises(PlanError, match="a hook on it would not run"):
        norm.register_forward_pre_hook(print)
    with pytest.raises(PlanError, match=r"BatchNorm1d\.eps: the model was captured"):
        norm.eps = torch.tensor(1.0)
    norm.register_parameter("weight", nn.Parameter(torch.ones(2)))
    with pytest.raises(PlanError, match=r"weight: torch\.float32 on cpu cannot become torch\.float64"):
        grown[0].norm.double()


def test_a_train_of_the_models_own_is_asked(model):
    assert modes_after(model, False) is None

    class Still(Model):
        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

    found = modes_after(Still(), True)
    assert [path for path, mode in found.items() if not mode] == ["norm"]
