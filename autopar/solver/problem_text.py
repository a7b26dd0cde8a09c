"""The solver's problem and its solution as text: for each choice what was taken, what it costs, and the next best by
itself.
"""

from __future__ import annotations

import numpy as np

from autopar.layout import Layout
from autopar.solver.build import Built
from autopar.solver.problem import Solution


def problem_text(built: Built, solution: Solution) -> str:
    """One line a choice, then one a pair that pays for a transition."""
    problem = built.problem
    options = {c: [" ".join(s.options) for s in built.op_strategies[n]] for n, c in built.op_choice.items()}
    options |= {c: [_text(x) for x in built.storage_layouts[n]] for n, c in built.storage_choice.items()}
    options |= {c: [_text(x) for x in layouts] for c, layouts in built.read_layouts.items()}
    lines = [
        f"axes: {', '.join(f'{a.name}={a.size}' for a in built.mesh.axes)}",
        f"{len(problem.choices)} choices, {sum(c.cost_s.size for c in problem.choices)} options, "
        f"{len(problem.edges)} edges",
        f"memory limit {problem.memory_limit_bytes:.4g} bytes, used {solution.memory_bytes:.4g} bytes",
        f"objective {solution.objective_s:.6g} s, bound {solution.bound_s:.6g} s, gap {solution.gap:.2g}, by "
        f"{solution.solver}",
        "",
    ]
    for c, choice in enumerate(problem.choices):
        taken = solution.options[c]
        cost_s, memory_bytes = choice.cost_s[taken], choice.memory_bytes[taken]
        text = f"{choice.name}: [{options[c][taken]}] of {choice.cost_s.size}, {cost_s:.4g} s, {memory_bytes:.4g} bytes"
        if choice.cost_s.size > 1:
            rest = np.where(np.arange(choice.cost_s.size) == taken, np.inf, choice.cost_s)
            other = int(np.argmin(rest))
            text += f"; cheapest other by itself [{options[c][other]}] {choice.cost_s[other]:.4g} s"
        lines.append(text)
    lines.append("")
    for edge in problem.edges:
        row, column = (
            edge.source_layout[solution.options[edge.source]],
            edge.target_layout[solution.options[edge.target]],
        )
        paid = float(edge.cost_s[row, column])
        if paid > 0:
            lines.append(f"{problem.choices[edge.source].name} -> {problem.choices[edge.target].name}: {paid:.4g} s")
    return "\n".join(lines)


def _text(layout: Layout) -> str:
    return " ".join(map(repr, layout))
