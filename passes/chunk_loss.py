"""The head's product and the loss above it a few rows at a time, so that the logits of a batch never stand in memory.

Works on the joint graph, after `stream_cross_entropy`, whose sums a row can be made of a part of the rows. The backward
makes each part's logits again: one more product of the head's size pays for the memory of all logits but a part's, and
of their gradient. What each row has one of (the sum of exponentials) is joined and saved as before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from autopar.codegen.views import given, shape_of
from autopar.passes.normalize import Emitter

aten = torch.ops.aten
PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Product -> place of the operand that has the rows."""
SAME = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default),
        *(aten.detach.default, aten.clone.default, aten.contiguous.default),
    }
)
"""Ops that hand on a value as it is, but for how its rows are arranged."""
TURNS = frozenset({aten.t.default, aten.transpose.int})
SQUEEZES = frozenset({aten.squeeze.dim, aten.unsqueeze.default})
CASTS = frozenset({aten._to_copy.default, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.self})
"""Pointwise ops that torch does not mark as such."""
ALONG = {
    aten._log_softmax.default: 1,
    aten._softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
    aten._softmax_backward_data.default: 2,
}
"""Op along a row -> place of its dim."""
ROWWISE = frozenset({*ALONG, *CASTS, aten.nll_loss_backward.default, aten.expand.default})
"""Ops that make a row of rows, beside the pointwise ones."""
REDUCTIONS = frozenset({aten.amax.default, aten.amin.default, aten.sum.dim_IntList, aten.mean.dim})
HALF = (torch.bfloat16, torch.float16)


class _Whole(Exception):
    """These logits stay whole; the message says why."""


@dataclass(frozen=True, slots=True)
class ChunkLoss:
    """Make logits, and their gradient, a part of the rows at a time.

    Input:   %x = mm(%h, %w) ; %m = amax(%x, 1) ; ... ; %d = f(%x, ...) ; %dh = mm(%d, t(%w)) ; %dw = mm(t(%d), %h)
    Output:  %x0 = mm(%h[:k], %w) ; %m0 = amax(%x0, 1) ; %x1 = mm(%h[k:], %w) ; ... ; %m = cat(%m0, %m1) ; ...
             %y0 = mm(%h[:k], %w) ; %d0 = f(%y0, ...) ; %dh0 = mm(%d0, t(%w)) ; %dw0 = mm(t(%d0), %h[:k]) ; ...
             %dh = cat(%dh0, %dh1) ; %dw = add(%dw0, %dw1)
    Refuses: logits that are handed out, or read in another way than row by row; products under no reduction.
    """

    chunks: int = 8

    def run(self, joint: GraphModule) -> GraphModule:
        changed = False
        for product in [n for n in joint.graph.nodes if n.target in PRODUCTS]:
            try:
                region = _Region(joint.graph, product)
            except _Whole:
                continue
            _Chunks(joint.graph, region, min(self.chunks, region.rows)).apply()
            changed = True
        if changed:
            joint.graph.lint()
            joint.recompile()
        return joint


class _Region:
    """What is made of one product row by row, and where that ends. wide: value -> is it turned? exits: what a row has
    one of ("rows"), and what is summed over the rows ("sum")."""

    def __init__(self, graph: Graph, product: Node) -> None:
        """Raises: _Whole."""
        self.product = product
        self.rows, self.width = shape_of(product)
        self.wide: dict[Node, bool] = {product: False}
        self.exits: dict[Node, str] = {}
        self.order = {n: i for i, n in enumerate(graph.nodes)}
        self.late = _closure(graph, (n for n in graph.nodes if _is_backward(n)))
        if self.rows < 2 or product in self.late:
            raise _Whole("one row, or a product of the backward")
        for node in graph.nodes:
            if node not in self.wide and any(i in self.wide for i in node.all_input_nodes):
                self._add(node)
        ahead = [n for n in self.exits if n not in self.late]
        if not ahead or any(n.target in PRODUCTS for n in ahead) or len(ahead) == len(self.exits):
            raise _Whole("no loss, or no gradient")
        self.of_exits = _closure(graph, self.exits)

    def _add(self, node: Node) -> None:
        turned = any(self.wide[i] for i in node.all_input_nodes if i in self.wide)
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            raise _Whole(f"{node.name} reads the logits")
        if (kind := self._exit(node)) is not None:
            self.exits[node] = kind
        elif node.target in TURNS and len(shape_of(node)) == 2:
            self.wide[node] = not turned
        elif not turned and self.is_wide(node) and (node.target in SAME or self.is_rowwise(node)):
            self.wide[node] = False
        else:
            raise _Whole(f"{node.name} is not made row by row")

    def is_wide(self, node: Node) -> bool:
        """Has it a number for each row and class?"""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return False
        return value.shape[-1] == self.width and value.numel() == self.rows * self.width

    def is_rowwise(self, node: Node) -> bool:
        """Is each row of this wide value made of the same row of what it reads?"""
        if node.op != "call_function" or not (node.target in ROWWISE or is_pointwise(node)):
            return False
        return all(self.lies(i, node) is not None for i in node.all_input_nodes)

    def made_of_rows(self, node: Node) -> bool:
        """Is this a wide value that no logits are in, but that can be made a few rows at a time?"""
        return node not in self.wide and self.is_wide(node) and self.is_rowwise(node)

    def lies(self, value: Node, reader: Node) -> str | None:
        """How an operand lies beside the wide result of its reader: "rows" (a number or more for each), "all" (the same
        for every row); None where neither."""
        own, shape = shape_of(value), shape_of(reader)
        if reader.target is aten.nll_loss_backward.default and len(own) == 1:
            return "rows"  # the targets, and the gradient of each loss
        if len(own) == len(shape) and own[:-1] == shape[:-1]:
            return "rows"
        return "all" if all(n == 1 for n in own[:-1]) else None

    def _exit(self, node: Node) -> str | None:
        """Does a node make something of each row ("rows"), or of all rows together ("sum")?"""
        args, target = given(node), node.target
        if target in PRODUCTS:
            left, right = args[PRODUCTS[target] :][:2]
            if left in self.wide and right not in self.wide:
                if not self.wide[left]:
                    return "rows"
                return "sum" if target is aten.mm.default else None
            return "sum" if right in self.wide and not self.wide[right] and target is aten.mm.default else None
        source = args[0] if args else None
        if source not in self.wide or self.wide[source] or any(i in self.wide for i in node.all_input_nodes[1:]):
            return None
        rank = len(shape_of(source))
        if target is aten.gather.default:
            rows = args[1] % rank == rank - 1 and self.lies(args[2], source) == "rows"
            return "rows" if rows else None
        if target not in REDUCTIONS or not args[1]:
            return None
        dims = sorted(d % rank for d in args[1])
        if dims == [rank - 1]:
            return "rows"
        return "sum" if dims == list(range(rank - 1)) and target is aten.sum.dim_IntList else None


class _Chunks:
    """The region made anew, one part of the rows after another."""

    def __init__(self, graph: Graph, region: _Region, count: int) -> None:
        self.graph, self.region = graph, region
        step = -(-region.rows // count)
        self.cuts = [(at, min(at + step, region.rows)) for at in range(0, region.rows, step)]
        self.made: dict[tuple[Any, ...], Node] = {}
        self.place = {n: (i, 0) for n, i in region.order.items()}
        """Where a node would like to stand: beside which node of the old graph, and in which order there."""
        self.anchor = 0

    def apply(self) -> None:
        for late in (False, True):
            exits = [n for n in self.region.exits if (n in self.region.late) is late]
            self.anchor = max(self.region.order[n] for n in exits)
            parts: dict[Node, list[Node]] = {n: [] for n in exits}
            for k in range(len(self.cuts)):
                for node in exits:
                    self._add_part(node, parts[node], k, late)
            for node in exits:
                node.replace_all_uses_with(self._joined(node, parts[node]))
        old = [n for n in self.graph.nodes if n in self.region.order and n.op == "call_function"]
        for node in reversed(old):
            gone = node in self.region.wide or node in self.region.exits or self.region.is_wide(node)
            if gone and not node.users:
                self.graph.erase_node(node)
        _sort(self.graph, self.place)

    def emit(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        end = next(iter(reversed(self.graph.nodes)))
        with self.graph.inserting_before(end):
            made = Emitter(self.graph, like, {}).emit(target, *args, **kwargs)
        self.place[made] = (self.anchor, len(self.place))
        return made

    def _add_part(self, node: Node, parts: list[Node], k: int, late: bool) -> None:
        """What an exit makes of one part; sums over rows are added up at once, in float32."""
        part = self.part(node, k, late)
        if self.region.exits[node] == "rows":
            parts.append(part)
        elif parts:
            parts[0] = self.emit(node, aten.add.Tensor, parts[0], part)
        else:
            narrow = part.meta["val"].dtype in HALF
            parts.append(self.emit(node, aten._to_copy.default, part, dtype=torch.float32) if narrow else part)

    def _joined(self, node: Node, parts: list[Node]) -> Node:
        value, made = node.meta["val"], parts[0]
        if len(parts) > 1:
            made = self.emit(node, aten.cat.default, parts)
        elif made.meta["val"].dtype != value.dtype:
            made = self.emit(node, aten._to_copy.default, made, dtype=value.dtype)
        shape = list(value.shape)
        return made if shape_of(made) == tuple(shape) else self.emit(node, aten.reshape.default, made, shape)

    def part(self, node: Node, k: int, late: bool) -> Node:
        """The part k of a wide value or of an exit, as [rows of the part, ...]. late: made for the backward, and again
        where the forward made it, too."""
        key = (node, k, late)
        if key not in self.made:
            wide = node not in self.region.exits
            made = self._wide(node, k, late) if wide else self._exit(node, k, late)
            if wide and node not in self.region.late:
                made.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            self.made[key] = made
        return self.made[key]

    def _exit(self, node: Node, k: int, late: bool) -> Node:
        args, target, wide = given(node), node.target, self.region.wide
        if target in PRODUCTS:
            at = PRODUCTS[target]
            left, right = args[at : at + 2]
            if left in wide:
                other = self.rows_of(right, k) if wide[left] else right
                return self.emit(node, target, *args[:at], self.part(left, k, late), other, **node.kwargs)
            return self.emit(node, target, self.rows_of(left, k, 1), self.part(right, k, late))
        source = self.part(args[0], k, late)
        if target is aten.gather.default:
            return self.emit(node, target, source, 1, self.operand(args[2], k, late, args[0]))
        dims = [1] if self.region.exits[node] == "rows" else [0]
        return self.emit(node, target, source, dims, *args[2:], **node.kwargs)

    def _wide(self, node: Node, k: int, late: bool) -> Node:
        args, target = given(node), node.target
        if node is self.region.product:
            at = PRODUCTS[target]
            bias = [self.operand(a, k, late, node) for a in args[:at]]
            return self.emit(node, target, *bias, self.rows_of(args[at], k), args[at + 1], **node.kwargs)
        if target in SAME:
            return self.part(args[0], k, late)
        if target in TURNS:
            return self.emit(node, aten.t.default, self.part(args[0], k, late))
        if target is aten.expand.default:
            start, end = self.cuts[k]
            return self.emit(node, target, self.operand(args[0], k, late, node), [end - start, self.region.width])
        sized = [self.operand(a, k, late, node) for a in args]
        if (place := ALONG.get(target)) is not None:
            sized[place] = 1
        kwargs = {key: self.operand(a, k, late, node) for key, a in node.kwargs.items()}
        return self.emit(node, target, *sized, **kwargs)

    def operand(self, value: Any, k: int, late: bool, reader: Node) -> Any:
        """What a reader of [rows of the part, classes] reads instead of `value`."""
        region = self.region
        if not isinstance(value, Node):
            return value
        if value in region.wide or region.made_of_rows(value):
            return self.part(value, k, late)
        own = shape_of(value)
        if region.lies(value, reader) == "all":
            return value if len(own) < 3 else self.emit(value, aten.reshape.default, value, [1, own[-1]])
        if len(own) == 1:
            return self.rows_of(value, k)
        found = None if late else self.narrow(value, k)
        if found is None:
            return self.rows_of(self.flat(value), k)
        return found if len(shape_of(found)) == 2 else self.emit(value, aten.reshape.default, found, [-1, own[-1]])

    def narrow(self, value: Node, k: int) -> Node | None:
        """The part of what the forward makes of each row of what exits gave for it: made of their parts, so that no
        part waits for the others. None where that takes all rows."""
        region, key = self.region, (value, k, "narrow")
        if value not in region.of_exits or region.exits.get(value) == "sum" or value in region.late:
            return None
        if value in region.exits:
            return self.part(value, k, False)
        tail = self._tail(value)
        if (
            tail is None
            or value.op != "call_function"
            or not (is_pointwise(value) or value.target in (*SAME, *SQUEEZES))
        ):
            return None
        if key not in self.made:
            inputs = value.all_input_nodes
            parts = {i: self._narrow_input(i, k, value) for i in inputs}
            if any(p is None for p in parts.values()):
                return None
            if is_pointwise(value):
                args, kwargs = torch.fx.node.map_arg((value.args, dict(value.kwargs)), parts.__getitem__)
                self.made[key] = self.emit(value, value.target, *args, **kwargs)
            else:
                self.made[key] = self.emit(value, aten.reshape.default, parts[inputs[0]], [-1, *tail])
        return self.made[key]

    def _narrow_input(self, value: Node, k: int, reader: Node) -> Node | None:
        if not shape_of(value):
            return value
        if value in self.region.of_exits:
            return self.narrow(value, k)
        tail = self._tail(value)
        if shape_of(value) != shape_of(reader) or tail is None:
            return None
        return self.rows_of(self.emit(value, aten.reshape.default, value, [self.region.rows, *tail]), k)

    def _tail(self, value: Node) -> tuple[int, ...] | None:
        """The dims behind those of the rows."""
        count, shape = 1, shape_of(value)
        for i, n in enumerate(shape):
            count *= n
            if count == self.region.rows:
                return shape[i + 1 :]
        return None

    def flat(self, value: Node) -> Node:
        """[rows, last dim] of a value with its rows in several dims."""
        key = (value, "flat")
        if key not in self.made:
            shape = [self.region.rows, shape_of(value)[-1]]
            self.made[key] = (
                value if len(shape_of(value)) == 2 else self.emit(value, aten.reshape.default, value, shape)
            )
        return self.made[key]

    def rows_of(self, value: Node, k: int, dim: int = 0) -> Node:
        """The part k of what has the rows along a dim."""
        key = (value, k, self.anchor, dim)
        if key not in self.made:
            self.made[key] = self.emit(value, aten.slice.Tensor, value, dim, *self.cuts[k])
        return self.made[key]


def is_pointwise(node: Node) -> bool:
    target = node.target
    return target in CASTS or (isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags)


def _is_backward(node: Node) -> bool:
    return "tangents" in str(node.target) or node.meta.get("partitioner_tag") == "is_backward"


def _closure(graph: Graph, roots: Iterable[Node]) -> set[Node]:
    """The nodes that depend on some of the roots."""
    found = set(roots)
    for node in graph.nodes:
        if any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _sort(graph: Graph, place: dict[Node, tuple[int, int]]) -> None:
    """Put each node behind what it reads, else as `place` says."""
    nodes = list(graph.nodes)
    waiting = {n: len(n.all_input_nodes) for n in nodes}
    ready = [(place[n], i, n) for i, n in enumerate(nodes) if not waiting[n]]
    heapq.heapify(ready)
    end = nodes[-1]
    while ready:
        _, _, node = heapq.heappop(ready)
        if node is not end:
            end.prepend(node)
        for user in node.users:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (place[user], len(place) + len(ready), user))
