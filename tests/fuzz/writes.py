"""Steps with state: writes in place, through views, to buffers; values made under no_grad."""

from __future__ import annotations

from tests.fuzz.draw import Drawing, Skip


def write_in_place(g: Drawing) -> None:
    x = g.pick(least=1, most=4)
    d = g.rng.randrange(len(g.shape(x)))
    n = g.shape(x)[d]
    k = g.rng.randint(1, n)
    y, out = g.like(x), g.name("v")
    start = g.rng.choice((f"{x}.clone()", f"{x} * 1.5", f"torch.zeros_like({x})"))
    writes = {
        "whole": [f"{out}.mul_(0.5).add_({y})"],
        "view": [f"{out}.narrow({d}, 0, {k}).add_({y}.narrow({d}, 0, {k}))"],
        "select": [f"{out}.select({d}, {k - 1}).copy_({y}.select({d}, 0))"],
        "fill": [f"{out}.narrow({d}, {k - 1}, 1).fill_(0.25)"],
        "mask": [f"{out}.masked_fill_({y} > 0.5, 0.1)"],
        "index": [f"{out}[..., 0] = {y}[..., -1]"],
        "transposed": [f"{out}.transpose(0, -1).mul_({y}.transpose(0, -1))"],
        "flat": [f"{out}.view(-1)[:{k}].mul_(2)"] if start != f"{x} * 1.5" else [f"{out}.relu_()"],
        "twice": [f"{out}.tanh_()", f"{out}.add_({y}, alpha=0.3)"],
    }
    g.emit(f"{out} = {start}", *g.rng.choice(list(writes.values())), outs=(out,))


def write_into_value(g: Drawing) -> None:
    """A write to what other steps have read or will read, perhaps through a view that an earlier step made."""
    x = g.pick(least=1, most=4, where=lambda t: True)
    if x.startswith("x"):
        raise Skip
    g.emit(g.rng.choice((f"{x}.add_({g.like(x)})", f"{x}.mul_(0.5)", f"{x}.narrow(0, 0, 1).add_(1.0)")), outs=())


def buffer_update(g: Drawing) -> None:
    x = g.pick(least=1, most=3)
    n = g.shape(x)[-1]
    b = g.buffer(f"torch.randn({n})")
    dims = tuple(range(len(g.shape(x)) - 1))
    reduced = f"{x}.detach().mean({dims!r})" if dims else f"{x}.detach()"
    kind = g.rng.choice(("ema", "count", "no_grad", "read"))
    if kind == "ema":
        g.emit(f"{b}.mul_(0.9).add_({reduced}, alpha=0.1)", outs=())
    elif kind == "count":
        c = g.buffer("torch.zeros((), dtype=torch.int64)")
        g.emit(f"{c}.add_(1)", outs=())
        g.emit(f"{x} * {c}")
    elif kind == "no_grad":
        g.emit("with torch.no_grad():", f"    {b}.copy_({b} * 0.5 + {reduced})", outs=())
    g.emit(f"{x} + {b}")


def buffer_read(g: Drawing) -> None:
    x = g.pick(least=2, most=4)
    shape = g.shape(x)
    mask = g.buffer(f"torch.ones({shape[-2]}, {shape[-1]}, dtype=torch.bool).tril()")
    g.emit(
        g.rng.choice(
            (
                f"{x}.masked_fill({mask}, -3.0)",
                f"{x} * {g.buffer(f'torch.randn{shape!r}')}",
                f"torch.where({mask}, {x}, 0.0)",
            )
        )
    )


def no_grad_region(g: Drawing) -> None:
    x, out = g.pick(least=1), g.name("v")
    g.emit(
        "with torch.no_grad():",
        f"    {out} = ({x} * 2).{g.rng.choice(('tanh()', 'softmax(-1)', 'abs()'))}",
        outs=(out,),
    )
    g.emit(f"{x} * {out}")


TEMPLATES = [write_in_place, write_in_place, write_into_value, buffer_update, buffer_read, no_grad_region]
