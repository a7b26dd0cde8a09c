"""autopar turns a single-GPU PyTorch model into a distributed program: `autopar.parallelize(model, mesh)`.

The way in: `api.py` (the public functions), `pipeline.py` (the stages in order), then a folder a stage.
"""

from autopar import collector, models
from autopar.api import parallelize, plan, with_loss
from autopar.compare import Report
from autopar.errors import (
    AutoparError,
    CaptureError,
    InfeasibleError,
    MeshError,
    PlanError,
    RuleError,
    RuntimeMismatchError,
    UnsupportedOpError,
)
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.rules.register import register_rule
from autopar.runtime.module import ParallelModule
from autopar.verify import verify

collector.resume()

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "CaptureError",
    "InfeasibleError",
    "Mesh",
    "MeshError",
    "ParallelModule",
    "Plan",
    "PlanError",
    "Report",
    "RuleError",
    "RuntimeMismatchError",
    "UnsupportedOpError",
    "models",
    "parallelize",
    "plan",
    "register_rule",
    "verify",
    "with_loss",
]
