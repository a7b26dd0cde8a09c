"""Bytes of a training step on each pipeline stage, from the sizes of a transformer.

Enters: a `Run`. Leaves: a `StageMemory` a stage. Refused: nothing of its own.

    weights, gradients, optimizer   bytes a parameter by role, each divided by the ranks that its ZeRO level shards it
    over
    gathered      ZeRO-3: the copies for compute of two layers, and the gradients of one
    activations   a micro-batch's layers, times the micro-batches in flight on the stage
    working       what lives only while one piece runs: a layer under recompute, the logits and their gradient

Source: Korthikanti et al. 2022, equations 1 to 6 (activations, in 2-byte elements with 1-byte masks); Rajbhandari et
al. 2020, section 3.1 (model states); Qi et al. 2024 (zero bubble: what is in flight).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.training_run import Run
from autopar.cost.transformer import Shard, Transformer

CONTEXT_BYTES = 1.2e9
"""[measured] driver context and libraries, outside the allocator."""

COMMUNICATOR_BYTES = 0.6e9
"""[measured] buffers of one communicator, one for each axis in use and one of all ranks."""

FRAGMENTATION = 1.06
"""[measured] memory the allocator holds over what tensors use, at the peak."""

LOGIT_BYTES = 6
"""[derived] bytes of a logit at the peak of the loss: 16-bit, and an fp32 copy that its gradient overwrites."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes a parameter of each role on one rank, after sharding."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of one stage on one rank. context: outside the allocator."""

    states: float
    gathered: float
    activations: float
    working: float
    context: float

    @property
    def allocated(self) -> float:
        """What tensors use at the peak."""
        return self.states + self.gathered + self.activations + self.working

    @property
    def needed(self) -> float:
        """Below this a run ends out of memory: tensors and context. An allocator short of memory gives caches back."""
        return self.allocated + self.context

    @property
    def total(self) -> float:
        """What the device shows: with what the allocator holds beside the tensors."""
        return self.allocated * FRAGMENTATION + self.context


def state_bytes(
    zero: int,
    ranks: int,
    precision: str = "bf16",
    gradient_bytes: float = 2,
    copied: float = 0,
    fsdp: bool = False,
    moments: float = 8,
) -> StateBytes:
    """Bytes a parameter, with Adam where `moments` is 8.

    16-bit training: 2 of weights, `gradient_bytes` of gradients, 12 of master weights and two moments; fp32: 4, 4, 8.
    copied: bytes of 16-bit gradients widened for the update, sharded like the moments.
    fsdp: the fp32 master weights are the stored parameters, and 16-bit copies live only while gathered.
    Source:  Rajbhandari et al. 2020: 4 + 12/N, 2 + 14/N and 16/N bytes for levels 1, 2 and 3. Megatron-LM's
             distributed optimizer: 4 + 16/N with fp16 gradients (4 of them copied), 6 + 12/N with fp32 ones.
    """
    weights, gradients, optimizer = 2.0, float(gradient_bytes), 4.0 + moments + copied
    if precision == "fp32" or fsdp:
        weights, gradients, optimizer = 4.0, 4.0, float(moments)
    return StateBytes(
        weights / (ranks if zero >= 3 else 1),
        gradients / (ranks if zero >= 2 else 1),
        optimizer / (ranks if zero >= 1 else 1),
    )


def activation_bytes(model: Transformer, shard: Shard, recompute: str = "none", moe: bool = False) -> float:
    """Bytes that the backward of one layer reads, of one micro-batch on one rank.

    A GPT with dropout and unfused attention takes s b h (34 + 5 a s / h) on one rank; (10 + 24/t + 5 a s / (h t)) with
    tensor parallelism, all of it over t with sequence parallelism too. "selective" drops the quadratic term, "full"
    keeps the input, 2 s b h.
    """
    tokens, h, t = shard.tokens(model), model.hidden, shard.tp
    outside = t if shard.sp else 1
    if recompute == "full":
        return 2 * tokens * h / outside
    if recompute == "selective" and shard.attention == "flash":
        return tokens * _selected_bytes(model, shard)
    mask = 1 if shard.dropout else 0
    kv = model.kv_heads / model.heads
    inner = model.ffn * (3 if model.gated else 2) * 2 / t * (model.top_k if moe else 1)
    whole = (8 + 2 * mask) * h / outside  # inputs of both norms and of both halves, dropout masks
    local = (2 + 4 * kv + 2) * h / t  # queries, keys, values, the input of the output product
    scores = 0.0
    if shard.attention == "plain" and recompute == "none":
        scores = (4 + mask) * model.heads / t * model.seq  # softmax input and output, a mask of bytes
    return tokens * (whole + local + inner + scores)


def _selected_bytes(model: Transformer, shard: Shard) -> float:
    """A token's bytes where the outputs of every other product are kept, the layer's input and attention's output."""
    outside = shard.tp if shard.sp else 1
    kv = model.kv_heads / model.heads
    products = (2 + 2 * kv) * model.hidden + (3 if model.gated else 2) * model.ffn / 2
    return 2 * (model.hidden / outside + (model.hidden + products) / shard.tp)


def in_flight(schedule: str, stage: int, stages: int, microbatches: int, virtual: int = 1) -> float:
    """Micro-batches whose activations a stage holds at its peak, counting all of its layers."""
    left = stages - stage
    if stages == 1:
        return 1.0
    if schedule == "gpipe":
        return float(microbatches)
    if schedule in ("interleaved-1f1b", "looped-bfs"):  # Korthikanti et al., section 4.2.3, of the first stage
        return min(float(microbatches), left + (stages - 1) / virtual)
    if schedule == "zb-2p":
        return float(min(2 * stages - 1, microbatches))
    if schedule in ("zb-v", "zb-h1", "dualpipe-v"):
        return float(min(stages, microbatches))
    return float(min(left, microbatches))


def stage_memory(run: Run, stage: int) -> StageMemory:
    """Bytes of one stage on one rank."""
    model, shard = run.model, run.shard
    last = stage == (0 if run.folded else run.pp - 1)
    states = run.weights(stage) * _states(run).total
    gathered = 0.0
    if run.sharded_trainer:
        layer_weights = sum(share * run.layer_weights(moe) for moe, share in run.kinds)
        gathered = layer_weights * (2 * 2 + 4)
        gathered += 2 * model.embedding_parameters / run.tp if run.zero == 3 else 0.0
    kept = sum(share * activation_bytes(model, shard, run.recompute, moe) for moe, share in run.kinds)
    activations = run.layers(stage) * kept * in_flight(run.schedule, stage, run.pp, run.microbatches, run.virtual)
    working = 0.0
    if run.recompute != "none":
        working = max(activation_bytes(model, shard, "none", moe) for moe, _ in run.kinds) - kept
    if last:
        tokens = shard.tokens(model)
        activations += 4 * tokens * model.hidden
        working = max(working, tokens * model.vocab / run.tp * LOGIT_BYTES)
    communicators = 1 + sum(degree > 1 for degree in (run.tp, run.cp, run.dp, run.pp))
    return StageMemory(states, gathered, activations, working, CONTEXT_BYTES + COMMUNICATOR_BYTES * communicators)


def _states(run: Run) -> StateBytes:
    gradients = run.reduce_bytes + (2 if run.apart else 0)
    copied = 4 if run.widened else 0
    ranks, fsdp = run.axes["data"].size, run.sharded_trainer
    level = 1 if run.zero == 2 and not run.reduce_each else run.zero  # whole gradients wait for the step's end
    return state_bytes(level, ranks, run.precision, gradients, copied, fsdp, run.moment_bytes)


def peak_memory(run: Run) -> StageMemory:
    """The stage with the largest peak."""
    return max((stage_memory(run, i) for i in range(run.pp)), key=lambda s: s.total)


def fits(run: Run) -> bool:
    """Does every stage fit the device?"""
    return peak_memory(run).needed <= run.profile.memory_bytes
