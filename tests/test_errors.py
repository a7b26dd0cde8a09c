"""autopar/errors.py: one base catches ours, and only ours."""

import inspect

from autopar import errors

NAMES = {
    "CaptureError",
    "UnsupportedOpError",
    "RuleError",
    "MeshError",
    "PlanError",
    "InfeasibleError",
    "RuntimeMismatchError",
}


def test_every_error_is_an_autopar_error_and_no_other():
    classes = {name: c for name, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__}
    assert set(classes) == NAMES | {"AutoparError"}
    assert all(issubclass(classes[name], errors.AutoparError) for name in NAMES)
    assert all(not issubclass(classes[a], classes[b]) for a in NAMES for b in NAMES if a != b)
    assert not issubclass(errors.AutoparError, AssertionError | ValueError | RuntimeError)
