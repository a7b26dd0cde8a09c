"""A published run as the configuration that the cost model prices, with every assumption named.

Enters: a `Published` row and all rows of its files. Leaves: a `Run` and the assumptions made, as texts.
Refused: rows that cannot be expressed come back as a reason, a text.

What a source leaves open is assumed the same for every row of the kind:

    framework       by the layout (`validate_framework`)
    attention       the vendor's fused kernel in Megatron's and XLA's programs on devices since H100; portable fused
                    attention in PyTorch's trainers, and where the row says "flash"; unfused before
    overlap         collectives beside compute in fused frameworks on devices since H100, and where the row says so
    ZeRO-3          gathered ahead of compute by PyTorch's trainers and on devices since H100; before, gathered when
                    needed, by DeepSpeed along rings that cross nodes at every hop
    zero            1 for Megatron's family, 3 for PyTorch's; for XLA's programs the lowest level that fits
    sp              on when tp > 1
    recompute       the cheapest policy that fits the memory
    micro-batch     1
    heads           those of a row of the same source and width, else of size 128
    vocabulary      51200
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from autopar.cost.hardware import DTYPES, Link, Profile, load_profile, profile_names
from autopar.cost.training_memory import peak_memory
from autopar.cost.training_run import Run
from autopar.cost.transformer import Transformer, layers_of_stage
from autopar.errors import MeshError
from autopar.validate_framework import framework_of
from autopar.validate_rows import Published

T = TypeVar("T")

_MEMORY_ERROR = 0.03  # half of the median error of predicted peaks
_FLASH = re.compile(r"(?<!no )flash.?att", re.IGNORECASE)
_VENDOR_ATTENTION = ("b200", "gb200")  # devices that PyTorch has no portable fused attention for
_PORT_GB_PER_S = 12.5  # [spec] a port of 100 Gb/s: a device with less shares its port with others
_SHARED_PORT_FRACTION = 0.3  # [measured] what collectives reach of shared ports, through host memory; published steps
_ETHERNET_FRACTION = 0.8  # [derived] what TCP reaches of a port of 25 Gb/s
_PORT_FRACTION = 0.96  # [measured] bulk bandwidth of a network port over its line rate; nccl-tests on 200 and 400 Gb/s

# Patterns of what a row says of its model or training, and why such a row is left out.
_LEFT_OUT = (
    (r"^conv|resnet", "convolutional network: its sizes are not a transformer's"),
    (r"\bq?lora\b|adapters? only|\bpeft\b", "LoRA: only adapters are trained"),
    (r"^(t5|enc.?dec)|encoder.decoder", "encoder and decoder: its sizes are not a decoder's"),
    (r"^(mamba|ssm|hybrid|diffusion|dit|vit|vlm|unet)", "not a transformer of equal layers on tokens"),
    (r"\bmla\b|latent attention|shared experts?", "latent attention or shared experts: sizes not in the columns"),
)

# Parts of a published device name, in the order in which they decide; the profile that has its figures.
_DEVICES = (
    ("v100.*32", "v100-sxm-32gb"),
    ("v100", "v100-sxm-16gb"),
    ("a100.*pci.*80|a100.*80.*pci", "a100-pcie-80gb"),
    ("a100.*pci", "a100-pcie-40gb"),
    (r"a100.*(?<!\d)40", "a100-sxm-40gb"),
    ("a100", "a100-sxm-80gb"),
    ("h100.*96.*hbm2e", "h100-96gb-hbm2e-500w"),
    ("h100.*pci", "h100-pcie"),
    ("a800", "a800-sxm-80gb"),
    ("h800", "h800-sxm"),
    (r"h20(?!\d)", "h20"),
    (r"(?<!g)h100(?!.*nvl\b)", "h100-sxm"),
    ("(?<!g)h200", "h200-sxm"),
    ("gb200", "gb200"),
    ("gb300", "gb300"),
    ("b200", "b200"),
    ("b300", "b300"),
    ("mi300x", "mi300x"),
    ("mi325x", "mi325x"),
    ("mi355x", "mi355x"),
    ("l40s", "l40s"),
    ("4090", "rtx-4090"),
)


def run_of(row: Published, rows: Sequence[Published]) -> tuple[Run, tuple[str, ...]] | str:
    """The configuration of a row and what was assumed, or the reason why there is none."""
    for pattern, reason in _LEFT_OUT:
        if re.search(pattern, f"{row.family}; {row.note}", re.IGNORECASE):
            return reason
    if row.family.startswith("moe") and not re.search(r"experts=\d+ top_k=\d+", row.note):
        return "experts not stated"
    if (row.ep or 1) > 1:
        return "expert parallel (ep > 1): no plan has it yet"
    needed = ("layers", "hidden", "seq_len", "global_seqs", "dp", "nodes", "device")
    missing = [name for name in needed if not getattr(row, name)]
    if missing:
        return f"{missing[0]} not stated"
    if row.precision and row.precision not in DTYPES:
        return f"precision {row.precision} has no profile"
    try:
        profile = _profile(row.device, row.inter_gbps_per_device)
    except MeshError as error:
        return f"device: {error}"
    assumed: list[str] = []
    model = _model(row, rows, assumed)
    framework, named = framework_of(row)
    if not named:
        _assume(assumed, "framework", framework.name)
    torch_trainer, compiled = framework.name == "fsdp", framework.name == "xla"
    new_device = not profile.name.startswith(("v100", "a100"))
    fused = framework.fused or "compile on" in row.note
    portable = torch_trainer and not profile.name.startswith(_VENDOR_ATTENTION)
    attention = "flash" if portable or _FLASH.search(row.note) else "native" if new_device else "plain"
    tp, pp, cp, dp = row.tp or 1, row.pp or 1, row.cp or 1, row.dp or 1
    micro = row.micro_seqs or _assume(assumed, "micro_seqs", 1.0)
    zero = row.zero
    if zero is None:
        zero = 0 if dp == 1 else framework.zero[0]
    sp = bool(row.sp if row.sp is not None else tp > 1 and _assume(assumed, "sp", True))
    schedule = row.schedule if pp > 1 else "none"
    virtual = row.virtual_stages or 1
    if not schedule:
        schedule = _assume(assumed, "schedule", "interleaved-1f1b" if virtual > 1 else "1f1b")
    chunks = pp * virtual if schedule in ("interleaved-1f1b", "zb-v") else pp
    # Where the layers alone do not divide, the embedding and the head count as one each.
    uneven = model.layers % chunks != 0 and (model.layers + 2) % chunks == 0
    short = "one layer short" in row.note or (uneven and pp > 1)
    whole = pp > 1 and model.layers + 2 * short >= chunks  # finer stages than layers: cut inside layers, evenly
    last = re.search(r"the last (\d+)", row.note)
    run = Run(
        model=model,
        profile=profile,
        nodes=row.nodes or 1,
        devices=row.devices_per_node or 8,
        micro_sequences=micro,
        microbatches=max(1, round((row.global_seqs or 1) / dp / micro)),
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=row.ep or 1,
        zero=zero,
        sp=sp,
        schedule=schedule,
        virtual=virtual,
        recompute=row.recompute if row.recompute in ("none", "selective", "full") else "none",
        precision=row.precision or "bf16",
        attention=attention,
        fused=fused,
        dropout=framework.dropout and not (new_device or model.gated),
        reduce_bytes=2 if row.precision == "fp16" or "reduced in bf16" in row.note else 4,
        stage_layers=tuple(layers_of_stage(model.layers, chunks, short, int(last[1]) if last else None))
        if whole
        else (),
        apart="unsharded" in row.note,
        racks=_racks(profile, row.nodes or 1),
        overlap="async TP" in row.note or (framework.beside and new_device),
        prefetch=framework.ahead or new_device,
        flat_ring=not (framework.ahead or new_device or compiled),
        widened=framework.widened and row.precision == "fp16",
        reduce_each=framework.each,
        waits=framework.waits,
        moment_bytes=0 if "adafactor" in row.note else 8,
    )
    if row.recompute not in ("none", "selective", "full"):
        # It did run: a peak that is over by less than our error is no reason to think that it had to recompute.
        run = _first_that_fits(run, "recompute", ("none", "selective", "full"), assumed, _MEMORY_ERROR)
    if row.zero is None and dp > 1:
        run = _first_that_fits(run, "zero", framework.zero, assumed)
    return run, tuple(assumed)


def _first_that_fits(run: Run, name: str, values: Sequence[object], assumed: list[str], error: float = 0.0) -> Run:
    """The run with the first, cheapest value that fits the memory, or with the last. error: allowed of its peak."""
    for value in values:
        run = replace(run, **{name: value})  # type: ignore[arg-type]
        if peak_memory(run).needed <= run.profile.memory_bytes * (1 + error):
            break
    _assume(assumed, name, value)
    return run


def _assume(assumed: list[str], name: str, value: T) -> T:
    assumed.append(f"{name} {value}")
    return value


def _model(row: Published, rows: Sequence[Published], assumed: list[str]) -> Transformer:
    hidden = row.hidden or 1
    heads = row.heads or _assume(assumed, "heads", _heads_like(row, rows))
    gated = bool(row.gated_mlp if row.gated_mlp is not None else "llama" in row.family)
    mixture = re.search(r"experts=(\d+) top_k=(\d+)", row.note)
    group = re.search(r"group (\d+)", row.note)
    seq = row.seq_len or 1
    return Transformer(
        layers=row.layers or 1,
        hidden=hidden,
        heads=heads,
        kv_heads=row.kv_heads or heads,
        ffn=row.ffn or 4 * hidden,
        gated=gated,
        vocab=row.vocab or _assume(assumed, "vocab", 51200),
        seq=seq,
        experts=int(mixture[1]) if mixture else 1,
        top_k=int(mixture[2]) if mixture else 1,
        moe_every=2 if "every other layer" in row.note else 1,
        dispatch_group=int(group[1]) if mixture and group else 0,
        tied=not gated,
        positions=0 if gated else seq,
    )


def _heads_like(row: Published, rows: Sequence[Published]) -> int:
    """Heads of the row of the same source and width whose depth is nearest; of several, those nearest to size 128."""
    hidden, layers = row.hidden or 1, row.layers or 1
    like = [r for r in rows if r.source == row.source and r.hidden == hidden and r.heads]
    if not like:
        return max(1, hidden // 128)
    best = min(like, key=lambda r: (abs((r.layers or 0) - layers), abs(hidden / (r.heads or 1) - 128)))
    return best.heads or 1


def _racks(profile: Profile, nodes: int) -> int:
    """Groups of nodes that share the middle level, where the device has one: up to 18 nodes, dividing evenly."""
    if len(profile.links) < 3 or nodes <= 18:
        return 1
    return nodes // next(n for n in (18, 16, 12, 8, 6, 4, 2, 1) if nodes % n == 0)


@functools.lru_cache(maxsize=256)
def _profile(device: str, between_gb_per_s: float | None) -> Profile:
    """The profile of a published device name, its slower links replaced where the source states their bandwidth.

    Raises:  MeshError: no such device.
    """
    text = re.sub(r"[\s_/]+", "-", device.lower())
    names = profile_names()
    name = next((n for pattern, n in _DEVICES if re.search(pattern, text) and n in names), text)
    profile = load_profile(name)
    if not between_gb_per_s:
        return profile
    shared = _ETHERNET_FRACTION if profile.links[-1].name.startswith("ethernet") else _SHARED_PORT_FRACTION
    port = _PORT_FRACTION if between_gb_per_s >= _PORT_GB_PER_S else shared
    link: Link = replace(profile.links[-1], bandwidth_bytes_per_s=between_gb_per_s * 1e9 * port)
    return replace(profile, links=(*profile.links[:-1], link))
