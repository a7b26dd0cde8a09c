"""Exact choice of one option a group, with pairwise costs and one memory row.

Read `problem.py` for what is asked, `optimise.py` for how it is answered. Knows nothing of tensors.
"""

from autopar.solver.optimise import solve
from autopar.solver.problem import Choice, Edge, Problem, Solution, evaluate

__all__ = ["Choice", "Edge", "Problem", "Solution", "evaluate", "solve"]
