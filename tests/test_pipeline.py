"""The stages together: a plan that was made is carried out."""

import torch

import autopar
from tests.end_to_end.small_models import build, inputs


def test_a_plan_that_recomputes_to_fit_is_carried_out():
    """Memory is asked for once, with recomputation: not again of the plan without it."""
    args, kwargs = inputs("gpt")
    example = {"example_args": args, "example_kwargs": kwargs}
    best = autopar.plan(build("gpt"), autopar.Mesh("1"), **example)
    memory = int(0.92 * best.predicted["peak_memory_bytes"][0])
    m = autopar.parallelize(build("gpt"), autopar.Mesh("1"), memory=memory, **example)
    assert set(best.recompute.values()) == {"none"}
    assert m.plan.recompute["layers.*"] != "none"
    assert m.plan.predicted["peak_memory_bytes"][0] <= memory
    torch.testing.assert_close(m(*args), build("gpt")(*args), rtol=1e-12, atol=0)
