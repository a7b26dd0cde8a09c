"""Tiles chosen by a timer, kept on disk by text and device; every candidate gives the numbers of the first."""

import dataclasses
import json

import pytest
import torch
import torch.distributed as dist

from autopar.codegen import tune
from autopar.codegen.group import FusedGroup, run
from tests.codegen.compare import check_group
from tests.codegen.traced import one_kernel

aten = torch.ops.aten
GROUPS = {
    "flat": lambda: one_kernel(lambda x, y: (x * y).sin(), torch.empty(70, 33), torch.empty(33)),
    "rows": lambda: one_kernel(lambda x, y: torch.softmax(x * y, -1), torch.empty(9, 33), torch.empty(33)),
    "sums": lambda: one_kernel(lambda x, y: ((x * y).sum(0), x - y), torch.empty(70, 33), torch.empty(33)),
    "swept": lambda: one_kernel(lambda x, y: torch.softmax(x * y, -1), torch.empty(3, 17_001), torch.empty(17_001)),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setenv("AUTOPAR_TUNE", "1")


class Timer:
    """Says that one candidate is fast, and that the first fails."""

    def __init__(self, fast):
        self.fast, self.calls = fast, 0

    def __call__(self, function):
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("out of resource: shared memory")
        function()
        return 1.0 if self.calls == self.fast + 1 else 2.0


@pytest.mark.parametrize("name", GROUPS)
def test_every_candidate_gives_the_same_numbers(name):
    group = GROUPS[name]()
    tiles = tune.candidates(group.code.kernel)
    assert tiles[0] == group.code.printed.tile
    assert len(set(tiles)) == len(tiles) > 2
    for tile in tiles[1:] if name != "swept" else tiles[1:3]:
        printed = tune.print_kernel(group.code.kernel, tile)
        check_group(FusedGroup(group.aten, dataclasses.replace(group.code, printed=printed), "interpreter"))


def test_the_fastest_is_taken_and_kept():
    code = GROUPS["rows"]().code
    tiles, ran = tune.candidates(code.kernel), []
    timer = Timer(2)
    found = tune.tuned(code, lambda c: ran.append(c.printed.tile), timer, "some GPU")
    assert found.printed.tile == tiles[2]
    assert ran == [*tiles[1:]]
    again = tune.tuned(code, lambda c: pytest.fail("it was measured"), timer, "some GPU")
    assert (again.printed.text, timer.calls) == (found.printed.text, len(tiles))
    assert tune.tuned(code, lambda c: None, Timer(1), "another GPU").printed.tile == tiles[1]
    file = tune.choice_file(code, "some GPU")
    for damaged in ("{", "[]", json.dumps({**json.loads(file.read_text()), "tile": {"rows": 3}}), "{}"):
        file.write_text(damaged)
        assert tune.tuned(code, lambda c: None, Timer(1), "some GPU").printed.tile == tiles[1]


def test_it_is_asked_for_and_needs_a_gpu(monkeypatch):
    code = GROUPS["flat"]().code
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.tuned(code, lambda c: pytest.fail("it ran")) is code
    monkeypatch.delenv("AUTOPAR_TUNE")
    assert tune.tuned(code, lambda c: pytest.fail("it ran"), Timer(1), "some GPU") is code


def test_ranks_keep_the_order_of_sums(monkeypatch):
    codes = {name: GROUPS[name]().code for name in ("rows", "sums", "flat")}
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    found = {name: tune.tuned(code, lambda c: None, Timer(1), "some GPU") for name, code in codes.items()}
    assert [name for name, code in codes.items() if found[name] is not code] == ["flat"]


def test_a_group_is_tuned_at_its_first_launch(monkeypatch):
    made = GROUPS["flat"]()
    group = FusedGroup(made.aten, made.code, "kernel")
    seen = []

    def tuned(code, runs):
        seen.append(code)
        runs(code)
        return code

    monkeypatch.setattr(tune, "tuned", tuned)
    monkeypatch.setattr("autopar.codegen.group.run", lambda code, inputs, **_: run(code, inputs, interpret=True))
    inputs = [torch.randn(n.meta["val"].shape) for n in made.aten.graph.find_nodes(op="placeholder")]
    for _ in range(2):
        torch.testing.assert_close(group(*inputs)[0], (inputs[0] * inputs[1]).sin())
    assert seen == [made.code]
