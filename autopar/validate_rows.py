"""Published training runs, read from files into one shape.

Enters: paths of `.csv` files in the normalised columns, or of `.yaml` files with `rows` of id, model, batch, hw, par
and measured. Leaves: `Published` rows, and the rows left out with their reason.
Refused, with a `PlanError` that names file, row and field: files of neither form, figures that are no numbers. A row
that contradicts itself (degrees that do not multiply to the devices) is left out, with the field as the reason.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import PlanError

_INTEGERS = (
    "layers hidden heads kv_heads ffn vocab seq_len global_seqs grad_accum nodes devices_per_node tp pp cp dp ep zero "
    "virtual_stages"
).split()
_NUMBERS = ["params_b", "micro_seqs", "inter_gbps_per_device", "step_time_s", "peak_memory_gb"]
_FLAGS = ["gated_mlp", "sp"]


@dataclass(frozen=True, slots=True)
class Published:
    """One run. A field that the source does not state is None; sizes and degrees are those of the columns of the file.

    Fields:  id, source, family, framework, precision, device, schedule, recompute, outcome ("fit" or "oom"), group,
             weight_class, note: texts, "" where not stated. The rest: figures; bandwidth in GB/s a device one way,
             memory in GB of 1e9.
    """

    id: str
    source: str
    family: str = ""
    framework: str = ""
    precision: str = ""
    device: str = ""
    schedule: str = ""
    recompute: str = ""
    outcome: str = ""
    group: str = ""
    weight_class: str = ""
    note: str = ""
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq_len: int | None = None
    global_seqs: int | None = None
    grad_accum: int | None = None
    nodes: int | None = None
    devices_per_node: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    ep: int | None = None
    zero: int | None = None
    virtual_stages: int | None = None
    params_b: float | None = None
    micro_seqs: float | None = None
    inter_gbps_per_device: float | None = None
    step_time_s: float | None = None
    peak_memory_gb: float | None = None
    gated_mlp: bool | None = None
    sp: bool | None = None


@dataclass(slots=True)
class Read:
    """rows: what can be predicted from. skipped: (id, source, reason) of the others."""

    rows: list[Published] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)


def read(paths: Sequence[str | Path]) -> Read:
    """All rows of files. Raises: PlanError: see the module."""
    found = Read()
    for path in map(Path, paths):
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise PlanError(f"{path}: published runs are read from .csv, .yaml and .yml files")
        try:
            reader(path, found)
        except OSError as error:
            raise PlanError(f"cannot read {path}: {error.strerror}") from error
    return found


def _read_csv(path: Path, found: Read) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        for number, raw in enumerate(csv.DictReader(file), start=2):
            if "id" not in raw or "source" not in raw:
                raise PlanError(f"{path}: column 'id' or 'source' is missing")
            where = f"{path.name} line {number} ({raw['id']})"
            figures: dict[str, Any] = {
                **{name: _number(raw.get(name), int, where, name) for name in _INTEGERS},
                **{name: _number(raw.get(name), float, where, name) for name in _NUMBERS},
                **{name: _flag(raw.get(name), where, name) for name in _FLAGS},
            }
            texts = ("id", "source", "precision", "device", "schedule", "recompute", "outcome", "group", "weight_class")
            figures |= {name: raw.get(name) or "" for name in (*texts, "framework", "note")}
            row = Published(family=raw.get("model_family") or "", **figures)
            wrong = _contradiction(row)
            if wrong:
                found.skipped.append((row.id, row.source, wrong))
            else:
                found.rows.append(row)


def _number(text: Any, kind: Callable[[float], Any], where: str, name: str) -> Any:
    if text is None or text == "":
        return None
    try:
        value = float(text)
    except (TypeError, ValueError):
        raise PlanError(f"{where}: field '{name}' is {text!r}, not a number") from None
    if not 0 <= value < float("inf") or (kind is int and value != int(value)):
        raise PlanError(f"{where}: field '{name}' is {text}; it must be a {'whole ' if kind is int else ''}number >= 0")
    return kind(value)


def _flag(text: Any, where: str, name: str) -> bool | None:
    known = {None: None, "": None, "0": False, "1": True, False: False, True: True}
    if text not in known:
        raise PlanError(f"{where}: field '{name}' is {text!r}, neither 0 nor 1")
    return known[text]


def _contradiction(row: Published) -> str:
    """What in a row contradicts itself, with the field; "" when nothing does."""
    for check in (_devices, _sizes, _batch, _outcome):
        if wrong := check(row):
            return wrong
    return ""


def _devices(row: Published) -> str:
    for name in ("nodes", "devices_per_node", "tp", "pp", "cp", "dp", "ep", "virtual_stages", "layers", "hidden"):
        if getattr(row, name) == 0:
            return f"field '{name}' contradicts: it is 0"
    if not (row.nodes and row.devices_per_node and row.dp):
        return ""
    devices, product = row.nodes * row.devices_per_node, (row.tp or 1) * (row.pp or 1) * (row.cp or 1) * row.dp
    if product == devices:
        return ""
    return f"field 'dp' contradicts: tp x pp x cp x dp = {product}, nodes x devices_per_node = {devices}"


def _sizes(row: Published) -> str:
    if row.heads and row.kv_heads and row.heads % row.kv_heads:
        return f"field 'kv_heads' contradicts: {row.kv_heads} does not divide the {row.heads} heads"
    if row.zero is not None and row.zero > 3:
        return f"field 'zero' contradicts: level {row.zero} is none of 0 to 3"
    if not (row.params_b and row.layers and row.hidden) or not row.family.startswith("dense"):
        return ""
    # Wide bounds, since names round: a thinner network than 8 h^2 a layer, or a wider one than 40 h^2, is none.
    least, most = (row.layers * row.hidden**2 * n / 1e9 for n in (8, 40))
    most += 2 * (row.vocab or 256_000) * row.hidden / 1e9
    if least * 0.8 <= row.params_b <= most * 1.2:
        return ""
    return f"field 'params_b' contradicts: {row.params_b:g} billion, layers and hidden make {least:.3g} to {most:.3g}"


def _batch(row: Published) -> str:
    if not (row.global_seqs and row.micro_seqs and row.grad_accum and row.dp):
        return ""
    product = row.micro_seqs * row.grad_accum * row.dp
    if abs(product - row.global_seqs) <= 0.01 * row.global_seqs:
        return ""
    return (
        f"field 'grad_accum' contradicts: micro_seqs x grad_accum x dp = {product:g}, global_seqs = {row.global_seqs}"
    )


def _outcome(row: Published) -> str:
    if row.outcome not in ("", "fit", "oom"):
        return f"field 'outcome' contradicts: '{row.outcome}' is neither fit nor oom"
    if row.outcome == "oom" and row.step_time_s:
        return f"field 'outcome' contradicts: out of memory, and a step of {row.step_time_s:g} s"
    return ""


def _read_yaml(path: Path, found: Read) -> None:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise PlanError(f"{path}: reading YAML needs the package pyyaml; install it, or pass a .csv") from None
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        raise PlanError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path}: a mapping with a list 'rows' was expected")
    source = str((data.get("source") or {}).get("id", path.stem))
    rows = data.get("rows")
    if not isinstance(rows, list):
        found.skipped.append((path.name, source, "no rows of runs"))
        return
    for number, raw in enumerate(rows):
        name = str(raw.get("id", f"{path.stem}_{number}")) if isinstance(raw, dict) else f"{path.stem}_{number}"
        row = _from_sections(raw, name, source, f"{path.name} ({name})") if isinstance(raw, dict) else "not a run"
        if isinstance(row, str):
            found.skipped.append((name, source, row))
        else:
            found.rows.append(row)


def _from_sections(raw: Mapping[str, Any], name: str, source: str, where: str) -> Published | str:
    """A row of the sectioned form, or the reason why it is none."""
    sections = [raw.get(key) for key in ("model", "batch", "hw", "par", "measured")]
    if not all(isinstance(section, dict) for section in sections):
        return "not a training run"
    model, batch, hw, par, measured = sections
    assert model is not None
    assert batch is not None
    assert hw is not None
    assert par is not None
    assert measured is not None
    precision = str(raw.get("precision") or "")
    if re.search(r"fp8|float8|fp4|mxfp", precision):
        return "fp8 or fp4"

    def get(section: Mapping[str, Any], names: str, kind: Callable[[float], Any]) -> Any:
        for key in names.split():
            if section.get(key) is not None and not isinstance(section[key], (str, dict, list)):
                return _number(section[key], kind, where, key)
        return None

    devices, per_node = get(hw, "n_gpus", int), get(hw, "gpus_per_node", int) or 8
    if not devices:
        return "device count not stated"
    per_node = min(per_node, devices)
    if not ({"tp", "pp"} <= par.keys() or ("dp" in par and "pp" not in par)):
        return "layout not stated"
    tp, pp, cp = (get(par, degree, int) or 1 for degree in ("tp", "pp", "cp"))
    if devices % (tp * pp * cp):
        return "printed degrees do not divide the devices"
    dp = devices // (tp * pp * cp)
    sequences, seq = get(batch, "global_seqs", int), get(model, "seq_len", int)
    if sequences is None and seq and (tokens := get(batch, "global_tokens", int)):
        sequences = tokens // seq
    micro = get(batch, "micro_seqs micro_batch local_batch", float)
    if sequences is None and micro and (steps := get(batch, "grad_accum num_microbatches", int)):
        sequences = int(micro * steps * dp)
    time_s = get(measured, "iter_time_s iter_time_s_derived iter_latency_s", float)
    if time_s is None and sequences and seq:
        rate = get(measured, "tokens_per_s", float)
        each = get(measured, "tokens_per_s_per_gpu", float)
        rate = rate or (each * devices if each else None)
        time_s = sequences * seq / rate if rate else None
    memory = get(measured, "peak_mem_gb", float)
    if memory is None and (gib := get(measured, "peak_mem_gib", float)):
        memory = gib * 2**30 / 1e9
    oom = bool(measured.get("oom"))
    if time_s is None and memory is None and not oom:
        return "no step time, memory or outcome"
    between = get(hw, "inter_node_GBps_per_gpu_unidir", float)
    if between is None and (node := get(hw, "inter_node_GBps_per_node inter_node_GBps_per_node_unidir", float)):
        between = node / per_node
    gpu = str(hw.get("gpu") or "")
    return Published(
        id=name,
        source=source,
        family="conv" if "base_channels" in model else "moe" if get(model, "experts", int) else "dense",
        framework=str(par.get("system") or par.get("framework") or raw.get("framework") or ""),
        precision="fp32" if "32" in precision and "16" not in precision else "bf16" if "bf16" in precision else "fp16",
        device=gpu,
        schedule=_schedule(par.get("schedule"), pp),
        recompute=_recompute(par.get("recompute")),
        outcome="oom" if oom else "fit",
        group=str(raw.get("comparable_group") or ""),
        note=_note(raw, model, par, precision),
        **{key: get(model, key, int) for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len")},
        global_seqs=sequences,
        micro_seqs=micro,
        nodes=devices // per_node,
        devices_per_node=per_node,
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=get(par, "ep", int),
        zero=get(par, "zero", int),
        virtual_stages=get(par, "vpp interleave", int),
        inter_gbps_per_device=between,
        step_time_s=time_s,
        peak_memory_gb=memory,
        gated_mlp=_gated(str(model.get("name") or "")),
        sp=par.get("seq_parallel") if isinstance(par.get("seq_parallel"), bool) else None,
    )


def _gated(name: str) -> bool:
    return bool(re.search(r"llama|mixtral|qwen|mistral|deepseek|gemma|grok", name.lower()))


def _note(raw: Mapping[str, Any], model: Mapping[str, Any], par: Mapping[str, Any], precision: str) -> str:
    """What `validate_run` reads from the note of a normalised row, said the same way."""
    parts = [str(raw["notes"])] if raw.get("notes") else []
    if model.get("experts"):
        parts.append(f"experts={model['experts']} top_k={model.get('top_k', 2)}")
        parts += ["on every other layer"] if model.get("moe_every") == 2 else []
        parts += [f"group {model['expert_group_size']}"] if model.get("expert_group_size") else []
    if "compile" in par:
        parts.append(f"torch.compile {'on' if par['compile'] else 'off'}")
    if "PURE" in precision:
        parts.append("gradients reduced in bf16")
    return "; ".join(parts)


def _schedule(text: Any, pp: int) -> str:
    said = re.sub(r"[^a-z0-9]", "", str(text or "").lower())
    if pp == 1:
        return "none"
    for pattern, name in (
        ("zbv", "zb-v"),
        ("zb2p", "zb-2p"),
        ("zb1p|zbh1", "zb-h1"),
        ("interleave|1f1bi$", "interleaved-1f1b"),
        ("1f1b", "1f1b"),
        ("gpipe", "gpipe"),
    ):
        if re.search(pattern, said):
            return name
    return ""


def _recompute(text: Any) -> str:
    said = str(text or "").lower()
    for word, name in (("full", "full"), ("selective", "selective"), ("sac", "selective"), ("none", "none")):
        if word in said and text is not None:
            return name
    return "full" if "checkpoint" in said else "unknown"


_READERS: Mapping[str, Callable[[Path, Read], None]] = {".csv": _read_csv, ".yaml": _read_yaml, ".yml": _read_yaml}
