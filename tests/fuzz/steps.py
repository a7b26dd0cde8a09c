"""Steps of several lines, or with parameters of their own: layers, losses, modules called twice; and whole models."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.fuzz import lines, writes
from tests.fuzz.draw import Drawing, Skip, attempt
from tests.fuzz.recipe import Recipe

Template = Callable[[Drawing], Any]


# contractions and layers


def linear(g: Drawing) -> None:
    x = g.pick(least=2)
    n, out = g.shape(x)[-1], g.rng.choice((g.D, 2 * g.D, g.H * 2, 3 * g.D, 6))
    weight = g.param(out, n, scale=n**-0.5)
    bias = f", {g.param(out)}" if g.rng.random() < 0.6 else ""
    g.emit(f"F.linear({x}, {weight}{bias})")


def fused_projection(g: Drawing) -> None:
    """One projection, cut into three and into heads."""
    x = g.pick(least=3, most=3)
    b, s, n = g.shape(x)
    head = g.rng.choice((2, 4))
    weight = g.param(3 * g.H * head, n, scale=n**-0.5)
    q, k, v, out = (g.name("v") for _ in range(4))
    how = g.rng.choice(("chunk(3, -1)", f"split({g.H * head}, -1)", f"unflatten(-1, (3, {g.H * head})).unbind(-2)"))
    g.emit(f"{q}, {k}, {v} = F.linear({x}, {weight}).{how}", outs=(q, k, v))
    heads = [f"{t}.view({b}, {s}, {g.H}, {head}).transpose(1, 2)" for t in (q, k, v)]
    causal = g.rng.choice(("", ", is_causal=True"))
    g.emit(
        f"{out} = F.scaled_dot_product_attention({', '.join(heads)}{causal})",
        f"{out} = {out}.transpose(1, 2).reshape({b}, {s}, {g.H * head})",
        outs=(out,),
    )


def attention(g: Drawing) -> None:
    q = g.pick(least=4, most=4) if g.rng.random() < 0.5 else g.param(g.B, g.H, g.S, g.rng.choice((2, 4)))
    if q.startswith("self"):
        name = g.name("v")
        g.emit(f"{name} = {q} * 1.0", outs=(name,))
        q = name
    b, h, s, e = g.shape(q)
    t = g.rng.choice((s, s, 6))
    groups = h // 2 if h % 2 == 0 and g.rng.random() < 0.3 else h
    k, v = g.param(b, groups, t, e), g.param(b, groups, t, e)
    more = ", enable_gqa=True" if groups != h else ""
    mask = g.rng.choice(("", "", ", is_causal=True", "mask", "bias"))
    if mask == "mask":
        mask = f", attn_mask=torch.ones({s}, {t}, dtype=torch.bool).tril({max(0, t - s)})"
    elif mask == "bias":
        mask = f", attn_mask={g.param(*g.rng.choice(((s, t), (1, h, s, t), (b, 1, 1, t))))}"
    g.emit(f"F.scaled_dot_product_attention({q}, {k}, {v}{mask}{more})")


def baddbmm(g: Drawing) -> None:
    x = g.pick(least=3, most=3)
    b, s, n = g.shape(x)
    t = g.rng.choice((4, 6))
    weight = g.param(b, n, t, scale=n**-0.5)
    g.emit(g.rng.choice((f"torch.bmm({x}, {weight})", f"torch.baddbmm({g.param(b, s, t)}, {x}, {weight}, alpha=0.5)")))


def einsum(g: Drawing) -> None:
    x = g.pick(least=3, most=3)
    n = g.shape(x)[-1]
    weight = g.param(g.H, n, 4, scale=n**-0.5)
    g.emit(f"torch.einsum('bsd,hdk->{g.rng.choice(('bhsk', 'bshk', 'bsk', 'hbs'))}', {x}, {weight})")


def bilinear(g: Drawing) -> None:
    x = g.pick(least=2)
    n = g.shape(x)[-1]
    g.emit(f"F.bilinear({x}, {g.like(x)}, {g.param(4, n, n, scale=1 / n)}, {g.param(4)})")


def addmm(g: Drawing) -> None:
    x = g.pick(least=2, most=2)
    m, n = g.shape(x)
    weight = g.param(n, 6, scale=n**-0.5)
    g.emit(f"torch.addmm({g.rng.choice((g.param(6), g.param(m, 6)))}, {x}, {weight}, beta=0.5)")


def conv1d(g: Drawing) -> None:
    x = g.pick(least=3, most=3)
    c = g.shape(x)[1]
    groups = g.rng.choice((1, 1, c, 2 if c % 2 == 0 else 1))
    out = groups * g.rng.choice((2, 4)) if groups < c else c
    bias = g.rng.choice(("None", g.param(out)))
    if g.rng.random() < 0.3:
        weight = g.param(c, out // groups, 2, scale=(c * 2) ** -0.5)
        g.emit(f"F.conv_transpose1d({x}, {weight}, {bias}, stride={g.rng.choice((1, 2))}, groups={groups})")
        return
    k = g.rng.choice((1, 2, 3))
    weight = g.param(out, c // groups, k, scale=(c * k / groups) ** -0.5)
    more = f", stride={g.rng.choice((1, 1, 2))}, padding={g.rng.choice((0, 1))}, groups={groups}"
    g.emit(f"F.conv1d({x}, {weight}, {bias}{more})")


def conv2d(g: Drawing) -> None:
    if g.rng.random() < 0.5:
        x = g.pick(least=4, most=4)
    else:
        x = g.real(g.B, 4, 6, 4)
    c = g.shape(x)[1]
    groups = g.rng.choice((1, 1, 2 if c % 2 == 0 else 1))
    out = groups * g.rng.choice((2, 4))
    weight = g.param(out, c // groups, 3, 3, scale=(c * 9 / groups) ** -0.5)
    bias = g.rng.choice(("None", g.param(out)))
    g.emit(f"F.conv2d({x}, {weight}, {bias}, padding=1, stride={g.rng.choice((1, 1, 2))}, groups={groups})")


def recurrent(g: Drawing) -> None:
    x = g.pick(least=3, most=3)
    n = g.shape(x)[-1]
    kind = g.rng.choice(("LSTM", "GRU", "RNN", "GRUCell", "LSTMCell"))
    if kind.endswith("Cell"):
        m = g.declare("m", f"nn.{kind}({n}, 4)")
        g.emit(f"{m}({x}[:, 0])" + ("[0]" if kind == "LSTMCell" else ""))
        return
    more = g.rng.choice((", batch_first=True", "", ", batch_first=True, bidirectional=True"))
    m = g.declare("m", f"nn.{kind}({n}, 4{more})")
    g.emit(f"{m}({x})[0]")


def module_twice(g: Drawing) -> None:
    """One submodule, called twice."""
    x = g.pick(least=2, most=3)
    n = g.shape(x)[-1]
    m = g.declare(
        "m",
        f"nn.Sequential(nn.LayerNorm({n}), nn.Linear({n}, {2 * n}), nn.{g.rng.choice(('GELU', 'ReLU'))}(), "
        f"nn.Linear({2 * n}, {n}))",
    )
    y = g.emit(f"{x} + {m}({x})")
    if g.rng.random() < 0.5:
        y = g.emit(f"{y} * {g.param(n)}")
    g.emit(f"{y} + {m}({y})")


# norms


def norm(g: Drawing) -> None:
    x = g.pick(least=2, most=4)
    shape = g.shape(x)
    n = shape[-1]
    kind = g.rng.choice(("layer", "layer", "rms", "group", "batch", "instance", "layer2"))
    if kind == "layer":
        bias = g.rng.choice((f", {g.param(n)}, {g.param(n)}", f", {g.param(n)}", ""))
        g.emit(f"F.layer_norm({x}, ({n},){bias})")
    elif kind == "layer2":
        g.emit(f"F.layer_norm({x}, {shape[-2:]!r}, {g.param(*shape[-2:])})")
    elif kind == "rms":
        g.emit(f"F.rms_norm({x}, ({n},), {g.param(n)}, 1e-6)")
    elif kind == "group":
        if shape[1] % 2:
            raise Skip
        g.emit(f"F.group_norm({x}, 2, {g.param(shape[1])}, {g.param(shape[1])})")
    elif kind == "instance":
        g.emit(f"F.instance_norm({x}, eps=1e-3)")
    else:
        m = g.declare(
            "m",
            f"nn.BatchNorm{max(1, len(shape) - 2)}d({shape[1]}"
            f"{g.rng.choice(('', '', ', affine=False', ', momentum=0.3'))})",
        )
        g.emit(f"{m}({x})")


# embeddings and losses


def embedding(g: Drawing) -> None:
    ids = g.ids(g.V, g.B, g.S)
    more = g.rng.choice(("", "", ", padding_idx=1"))
    y = g.emit(f"F.embedding({ids}, {g.param(g.V, g.D)}{more})")
    if g.rng.random() < 0.5:
        g.emit(
            f"{y} + {g.param(g.S, g.D)}"
            if g.rng.random() < 0.5
            else f"{y} + F.embedding(torch.arange({g.S}), {g.param(g.S, g.D)})"
        )


def cross_entropy(g: Drawing) -> None:
    x = g.pick(least=2, most=3)
    shape = g.shape(x)
    if len(shape) == 3:
        x, rows, classes = f"{x}.flatten(0, 1)", shape[0] * shape[1], shape[2]
    else:
        rows, classes = shape
    if g.rng.random() < 0.2:
        g.emit(f"F.cross_entropy({x}, torch.softmax({g.param(rows, classes)}, -1))")
        return
    target = g.ids(classes, rows)
    more = g.rng.choice((
        "", "", ", ignore_index=0", ", ignore_index=1, reduction='sum'", ", reduction='none'", ", label_smoothing=0.1",
        ", label_smoothing=0.2, ignore_index=0", ", weight=W", ", weight=W, ignore_index=0",
    ))  # fmt: skip
    more = more.replace("W", g.buffer(f"torch.rand({classes}) + 0.5")) if "W" in more else more
    if "label_smoothing" not in more and g.rng.random() < 0.3:
        g.emit(f"F.nll_loss(F.log_softmax({x}, -1), {target}{more})")
    else:
        g.emit(f"F.cross_entropy({x}, {target}{more})")


def row_loss(g: Drawing) -> None:
    x = g.pick(least=1, most=3)
    y, how = g.like(x), g.rng.choice(("mean", "mean", "sum", "none"))
    g.emit(
        g.rng.choice((
            f"F.mse_loss({x}, {y}, reduction='{how}')",
            f"F.smooth_l1_loss({x}, {y}, reduction='{how}')",
            f"F.l1_loss({x}, {y}, reduction='{how}')",
            f"F.huber_loss({x}, {y}, reduction='{how}')",
            f"F.binary_cross_entropy_with_logits({x}, torch.sigmoid({y}), reduction='{how}')",
            f"F.binary_cross_entropy(torch.sigmoid({x}), torch.sigmoid({y}), reduction='{how}')",
            f"F.kl_div(F.log_softmax({x}, -1), torch.softmax({y}, -1), reduction='{g.rng.choice((how, 'batchmean'))}')",
            f"F.cosine_similarity({x}, {y}, dim=-1)",
            f"F.soft_margin_loss({x}, {y}.sign().detach(), reduction='{how}')",
            f"F.poisson_nll_loss({x}, {y}.abs().detach(), reduction='{how}')",
        ))
    )  # fmt: skip


def residual(g: Drawing) -> None:
    x = g.pick(least=2, most=4)
    y = g.like(x)
    g.emit(f"{x} + {y}.mul({g.rng.choice((0.5, 2.0))})")


def mask(g: Drawing) -> None:
    """Attention written out, with a causal or padding mask."""
    x = g.pick(least=3, most=3)
    b, s, n = g.shape(x)
    scores = g.emit(f"({x} @ {x}.mT) * {n**-0.5:.4g}")
    made = g.rng.choice((
        f"torch.ones({s}, {s}, dtype=torch.bool).tril()",
        f"(torch.arange({s})[:, None] >= torch.arange({s})[None])",
        f"({g.ids(3, b, s)} > 0)[:, None]",
    ))  # fmt: skip
    probabilities = g.emit(f"{scores}.masked_fill(~{made}, -1e9).softmax(-1)")
    g.emit(f"{probabilities} @ {x}")


def rotary(g: Drawing) -> None:
    x = g.pick(least=3, most=4, where=lambda t: t.shape[-1] % 2 == 0)
    s, n = g.shape(x)[-2:]
    out, a, c = g.name("v"), g.name("v"), g.name("v")
    g.emit(
        f"{a}, {c} = {x}.chunk(2, -1)",
        f"{out} = torch.arange({s}, dtype=torch.float64)",
        f"{out} = torch.outer({out}, torch.arange(1, {n // 2 + 1}, dtype=torch.float64) ** -0.5)",
        f"{out} = torch.cat(({a} * {out}.cos() - {c} * {out}.sin(), {c} * {out}.cos() + {a} * {out}.sin()), -1)",
        outs=(out,),
    )


def experts(g: Drawing) -> None:
    """A dense mixture: all experts, weighted by their top-k gates."""
    x = g.pick(least=3, most=3)
    n = g.shape(x)[-1]
    gates = g.emit(f"F.linear({x}, {g.param(4, n, scale=n**-0.5)}).softmax(-1)")
    kept = g.emit(f"torch.zeros_like({gates}).scatter(-1, {gates}.topk(2, -1)[1], 1.0) * {gates}")
    outs = g.emit(f"torch.einsum('bsd,edf->bsef', {x}, {g.param(4, n, 4, scale=n**-0.5)})")
    g.emit(f"torch.einsum('bsef,bse->bsf', {outs}, {kept})")


OTHERS: dict[str, list[Template]] = {
    "contraction": [linear, linear, linear, baddbmm, einsum, bilinear, addmm, fused_projection],
    "conv": [conv1d, conv2d],
    "attention": [attention, fused_projection],
    "recurrent": [recurrent],
    "norm": [norm],
    "indexing": [embedding],
    "loss": [cross_entropy, row_loss],
}
MIXED: list[Template] = [
    *writes.TEMPLATES, residual, mask, rotary, experts, module_twice, linear, linear, fused_projection, norm, row_loss,
]  # fmt: skip

TEMPLATES: dict[str, list[Template]] = {
    family: [*lines.templates().get(family, []), *OTHERS.get(family, [])] for family in {**lines.LINES, **OTHERS}
}
FAMILIES = tuple(sorted(TEMPLATES))


def draw_recipe(seed: int, index: int, attempt_number: int = 0) -> tuple[Recipe, str]:
    """Model number `index` of a seed, and the family that it is meant to exercise."""
    rng = random.Random(f"{seed}/{index}/{attempt_number}")
    family = FAMILIES[index % len(FAMILIES)]
    g = Drawing(rng, rng.randrange(2**31))
    torch.manual_seed(g.seed)  # random numbers while drawing must not differ between runs
    if rng.random() < 0.4:
        attempt(g, embedding)
    else:
        g.real(*rng.choice(((g.B, g.S, g.D), (g.B, g.S, g.D), (g.B, g.D), (g.B, g.H, g.S, g.D))))
        attempt(g, rng.choice((linear, norm, residual)))
    if rng.random() < 0.8:
        attempt(g, rng.choice((linear, linear, baddbmm, fused_projection)))
    steps = rng.randint(2, 6)
    focus = sorted(rng.sample(range(steps), 2))
    for i in range(steps):
        for tries in range(12):
            if i in focus:
                if tries == 6:  # nothing here suits the family
                    g.real(g.B, 4, g.H * 2, *rng.choice(((), (4,))))
                template = rng.choice(TEMPLATES[family])
            elif rng.random() < 0.5:
                template = rng.choice(MIXED)
            else:
                template = rng.choice(TEMPLATES[rng.choice(FAMILIES)])
            if attempt(g, template):
                break
    return g.result(), family
