"""Which trainer a published run used, and what that says of its program.

Enters: a `Published` row. Leaves: a `Framework`, and whether the row names it. Refused: nothing: a row that names none
gets the one whose layouts it has.

A name is looked for in the column `framework`, then in the note, then in the name of the source. A row that names none:
degrees of tensor, context or pipeline parallelism, or ZeRO below 2, are Megatron's family; ZeRO-2 and 3 over plain data
parallelism are FSDP's in bf16, and DeepSpeed's (of Megatron's family) in fp16, which needs its loss scale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autopar.validate_rows import Published


@dataclass(frozen=True, slots=True)
class Framework:
    """A family of trainers that run one program for one configuration.

    Fields:  names: pattern of the trainers' names. fused: ops between matmuls run in fused kernels (of a trainer that
             does not, a compiler does where the note says so).
             zero: the levels that an unstated one is looked for in, cheapest first.
             ahead: ZeRO-3 gathers the next layer beside compute, on any device. each: ZeRO-2 reduces in every
             micro-batch. beside: collectives run beside compute, on devices since H100.
             dropout: its GPTs of before H100 had dropout. widened: fp16 gradients are copied to fp32 for the update.
             waits: the host waits for the device at each recomputed layer.
    """

    name: str
    names: str
    fused: bool
    zero: tuple[int, ...]
    ahead: bool
    each: bool
    beside: bool
    dropout: bool
    widened: bool
    waits: bool = False


MEGATRON = Framework(
    "megatron",
    r"megatron|nemo\b|nemo.?(?!tron)framework|nemo defaults|mbridge|primus|deepspeed|colossal|mt.?nlg|megascale",
    fused=True,
    zero=(1,),
    ahead=False,
    each=True,
    beside=True,
    dropout=True,
    widened=True,
)

FRAMEWORKS = (
    Framework(
        "fsdp",
        r"fsdp|torchtitan|torch.?tune|torch\.compile|llm.?foundry|composer|lightning|lit.?gpt|nano.?gpt|accelerate",
        fused=False,
        zero=(3,),
        ahead=True,
        each=True,
        beside=False,
        dropout=False,
        widened=True,
    ),
    replace(MEGATRON, name="megatron-deepspeed", names=r"megatron.?deepspeed", waits=True),
    MEGATRON,
    Framework(
        "xla",
        r"\balpa|jax|\bxla|maxtext|levanter|\bpax|t5x|gspmd",
        fused=True,
        zero=(0, 2, 3),
        ahead=False,
        each=False,
        beside=True,
        dropout=False,
        widened=False,
    ),
)
"""In the order in which their names decide where a text has several."""

_BY_NAME = {f.name: f for f in FRAMEWORKS}


def framework_of(row: Published) -> tuple[Framework, bool]:
    """The framework of a row, and whether the row names it."""
    for text in (row.framework, row.note, row.source):
        for framework in FRAMEWORKS:
            if text and re.search(framework.names, text.lower().replace("_", " ")):
                return framework, True
    split = max(row.tp or 1, row.pp or 1, row.cp or 1, row.virtual_stages or 1) > 1
    sharded = (row.zero or 0) >= 2 and row.precision != "fp16"
    return _BY_NAME["fsdp" if sharded and not split else "megatron"], False
