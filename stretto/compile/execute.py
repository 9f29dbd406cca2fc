"""Runs a plan: the values of its nodes, each computed once (layer.py makes a step of autograd of them).

The compiler knows nothing of kernels; this file asks for the two products it needs. STRETTO_BACKEND=torch runs the same
plans on torch's own kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto import kernels
from stretto.compile.adjacency import Adjacency
from stretto.compile.expr import Add, Clenshaw, Diagonal, Horner, Leaf, MatMul, Node, Scaled, Sparse, Step, Transpose
from stretto.compile.plan import Plan
from stretto.compile.powers import FORMED
from stretto.compile.together import Group, Groups, worth_it
from stretto.ops import taped
from stretto.ops.product import product, product_and_sums, two_products
from stretto.ops.rows import all_reached
from stretto.recording import finite

Keep = Callable[[Node, Callable[[], Tensor]], Tensor]
WANTED = torch.empty(0)  # stands for sums that the first product with the gradient is to make


@dataclass
class Call:
    """One use of a layer: plan, what the leaves stand for, and who wants to know how long it took."""

    plan: Plan
    names: tuple[str, ...]  # of the tensor arguments, the plan's leaves first; "bias": added to every row
    sparse: dict[str, Adjacency]
    scalars: dict[str, float] = field(default_factory=dict)
    keep: Keep | None = None  # holds products of constants across steps
    after: tuple[tuple[str, str], ...] = ()  # names of weight and bias, if it has one, of each ReLU and Linear after it
    timed: Callable[[float], None] | None = None
    timed_backward: bool = False


class _Total:
    """A sum as it grows: its value so far, whether that may be overwritten, and the bias that is still to be added."""

    def __init__(self, value: Tensor | None, bias: Tensor | None) -> None:
        self.value, self.bias, self.ours = value, bias, value is not None


class Evaluation:
    """Values of nodes, each computed once."""

    def __init__(self, call: Call, leaves: dict[str, Tensor], *, again: bool = False) -> None:
        self.call, self.leaves, self.again = call, leaves, again
        self.known: dict[Node, Tensor] = {}
        self.groups: Groups = {}  # products of the forward pass that may be taken together
        self.sums: Tensor | None = None  # of the result's gradient, where WANTED: the gradient of a bias
        self.beside: dict[Group, Tensor] = {}  # what gradients taken together multiply, side by side

    def forward(self) -> tuple[Tensor, list[Tensor]]:
        bias = self.leaves.get("bias")
        start = time.perf_counter()
        self.groups = self.call.plan.together
        fused = None if bias is None else self._with_bias(self.call.plan.forward, bias)
        out = self.value(self.call.plan.forward) if fused is None else fused
        if bias is not None and fused is None:
            # In place only if no one else will read the value: a forward root is never a leaf, but it may be kept.
            out = taped.add(out, bias, in_place=self._owns(self.call.plan.forward))
        if self.call.timed is not None and not self.call.timed_backward:
            self.call.timed(time.perf_counter() - start)
        return out, [self.known[node] for node in self.call.plan.kept]

    def _with_bias(self, node: Node, bias: Tensor) -> Tensor | None:
        """The last step of the forward pass with the bias in it, where a device's kernel takes one; else None."""
        if self.again or not self._owns(node) or kernels.autocasts(bias):
            return None
        device = kernels.backend(bias.device).product is not None  # whose kernels for sparse products take a row, too
        if isinstance(node, Add):
            return self._add(node, bias) if self._takes_bias(node, bias, device) else None
        if not isinstance(node, MatMul) or isinstance(node.left, Diagonal):
            return None
        if isinstance(node.left, Sparse):
            x = self.value(node.right) if device else None
            return None if x is None or bias.dtype != x.dtype else self._hop(node.left, x, self._under(node.left, bias))
        left, right = self.value(node.left), self.value(node.right)
        return product(left, right, bias) if bias.dtype == left.dtype else None

    def _takes_bias(self, node: Add, bias: Tensor, device: bool) -> bool:
        """Whether all terms of a sum are products that are still to be made, by kernels that take a bias."""
        if bias.dtype != self.leaves[self.call.names[0]].dtype:
            return False
        hops = [t for t in node.terms if self._fresh_hop(t)]
        dense = [t for t in node.terms if _is_product(t) and t not in self.known]
        return len(hops) + len(dense) == len(node.terms) and (device or not hops)

    def _fresh_hop(self, node: Node) -> bool:
        """Whether a node is the adjacency times something, not known yet, and to be read by nobody else."""
        if not isinstance(node, MatMul) or not isinstance(node.left, Sparse):
            return False
        return node not in self.known and self._owns(node) and not self.again

    def _under(self, sparse: Sparse, row: Tensor) -> Tensor:
        """A row for every row of a sparse matrix."""
        graph = self.call.sparse[sparse.name].graph
        return row.expand(graph.num_cols if sparse.transposed else graph.num_rows, -1)

    def _owns(self, node: Node) -> bool:
        return node not in self.call.plan.kept and node not in self.call.plan.hoisted and not isinstance(node, Leaf)

    def value(self, node: Node) -> Tensor:
        value = self.known.get(node)
        if value is None:
            compute = COMPUTE[type(node)]
            if not self.again and self.call.keep is not None and node in self.call.plan.hoisted:
                value = self.call.keep(node, lambda: compute(self, node))
            else:
                value = compute(self, node)
            self.known[node] = value
        return value

    def gradient(self, node: Node) -> Tensor:
        """A gradient's value. That of a weight W in A X W', taken as (A' G)' X, meets a 0 in rows of X that no edge
        reads: what is not finite there stays out of it, as out of stock's G' (A X)."""
        result = self.value(node)
        if not isinstance(node, MatMul) or not isinstance(node.left, Transpose) or not kernels.on_host(result):
            return result
        unread = self._without_edges(node.left.of)
        if unread is None or finite(result):
            return result
        return product(self.value(node.left), torch.where(unread.unsqueeze(1), 0.0, self.value(node.right)))

    def _without_edges(self, node: Node) -> Tensor | None:
        """Which rows of a product with a sparse matrix are 0 because they have no edges, where there are any."""
        if not isinstance(node, MatMul):
            return None
        if isinstance(node.left, Diagonal):
            return self._without_edges(node.right)
        if not isinstance(node.left, Sparse):
            return None
        graph = self.call.sparse[node.left.name].graph
        graph = graph.T if node.left.transposed else graph
        return None if all_reached(graph) else graph.degree == 0

    def _leaf(self, node: Leaf) -> Tensor:
        return self.leaves[node.name]

    def _transpose(self, node: Transpose) -> Tensor:
        return self.value(node.of).t()

    def _matmul(self, node: MatMul) -> Tensor:
        if isinstance(node.left, Sparse):
            return self._hop(node.left, self.value(node.right))
        if isinstance(node.left, Diagonal):
            return self._scale(node.left, self.value(node.right))
        if node in self.groups and self._together(self.groups[node]):
            return self.known[node]
        if self._sums_too(node):
            gradient, self.sums = product_and_sums(self.leaves["G"], self.value(node.right))
            return gradient
        left, right = self.value(node.left), self.value(node.right)
        return left @ right if self._by_torch() else product(left, right)

    def _scaled(self, node: Scaled) -> Tensor:
        return taped.scaled(self.value(node.of), self.call.scalars[node.by])

    def _step(self, node: Step) -> Tensor:
        beta = -2.0 if node.twice else -1.0
        return self._hop(node.sparse, self.value(node.now), self.value(node.before), beta)

    def _hop(self, sparse: Sparse, x: Tensor, y: Tensor | None = None, beta: float = 1.0) -> Tensor:
        adj = self.call.sparse[sparse.name]
        if sparse.form == FORMED:
            return adj.power(sparse.power, x.dtype).apply(x, sparse.transposed, y, beta, self.again)
        return adj.apply(x, sparse.transposed, y, beta, self.again, sparse.form)

    def _scale(self, diagonal: Diagonal, x: Tensor) -> Tensor:
        """Rows of x, scaled by S or T of the adjacency A with the same number."""
        adj = self.call.sparse["A" + diagonal.name[1:]]
        scale = adj.row_scale if diagonal.name[0] == "S" else adj.col_scale
        assert scale is not None
        return x * scale.to(x.dtype).unsqueeze(1)

    def _by_torch(self) -> bool:
        """Whether torch's own products must run: they can be differentiated, and autocast changes them."""
        return self.again or torch.is_autocast_enabled("cpu")

    def _sums_too(self, node: MatMul) -> bool:
        """Whether a product is that of the transposed gradient, whose sums over its rows are still wanted."""
        of = node.left.of if isinstance(node.left, Transpose) else None
        return self.sums is WANTED and isinstance(of, Leaf) and of.name == "G" and not self._by_torch()

    def _add(self, node: Add, bias: Tensor | None = None) -> Tensor:
        """A sum; dense products are accumulated by the GEMM that makes them, in place where nobody else reads.

        bias: added by the first product, sparse or dense, or at the end.
        """
        for term in node.terms:
            if term in self.groups and term not in self.known and isinstance(term, MatMul):
                self._together(self.groups[term])
        products = [t for t in node.terms if _is_product(t) and t not in self.known]
        rest = [t for t in node.terms if t not in products]
        total = _Total(self._beside_each_other(products), bias)
        if total.value is not None:
            products = []
        for term in sorted(rest, key=lambda t: t not in self.known):  # the sparse ones can add onto what is known
            self._add_term(total, term)
        if total.value is None and not self._by_torch() and all(isinstance(t, MatMul) for t in products[:2]):
            products = self._add_two(total, products)
        for term in products:
            self._add_product(total, term)
        assert total.value is not None
        return total.value if total.bias is None else taped.add(total.value, total.bias, in_place=total.ours)

    def _add_term(self, total: _Total, term: Node) -> None:
        """Add what is known, a product with a sparse matrix, or anything but a dense product."""
        fresh = term not in self.known and isinstance(term, MatMul) and self._owns(term) and not self.again
        if fresh and isinstance(term, MatMul) and isinstance(term.left, Sparse):
            under, bias = total.value, total.bias
            if under is None and bias is not None:
                under, total.bias = self._under(term.left, bias), None
            if under is not None:  # added where it is summed
                total.value, total.ours = self._hop(term.left, self.value(term.right), under), True
                return
        value = self.value(term)
        if total.value is not None:
            total.value, total.ours = taped.add(total.value, value, in_place=total.ours), True
            return
        total.value, total.ours = value, fresh
        if fresh:
            self.known.pop(term)  # it becomes the sum: whoever asks for it later computes it anew

    def _add_two(self, total: _Total, products: list[Node]) -> list[Node]:
        """Begin a sum with its first two dense products at once, where there are two. The others."""
        two = [t for t in products[:2] if isinstance(t, MatMul)]
        if len(two) < 2:
            return products
        sides: list[Any] = [side for t in two for side in (t.left, t.right)]
        x, w, y, v = map(self.value, sides)
        total.value, total.ours, total.bias = two_products(x, w, y, v, total.bias), True, None
        return products[2:]

    def _add_product(self, total: _Total, term: Node) -> None:
        """Add a dense product, by the GEMM that makes it."""
        factor, inner = (self.call.scalars[term.by], term.of) if isinstance(term, Scaled) else (1.0, term)
        assert isinstance(inner, MatMul)
        assert not isinstance(inner.left, (Sparse, Diagonal))
        left, right = self.value(inner.left), self.value(inner.right)
        if total.value is not None and total.ours and not self.again:
            total.value = product(left, right, add=total.value, factor=factor)
        elif total.value is not None:
            total.value = taped.add_product(total.value, left, right, factor, in_place=False)
        elif total.bias is not None and factor == 1.0:
            total.value, total.bias = product(left, right, total.bias), None
        else:
            made = left @ right if self._by_torch() else product(left, right)
            total.value = made if factor == 1.0 else taped.scaled(made, factor)
        total.ours = True

    def take_together(self, groups: Groups) -> None:
        """Computes the gradients in groups."""
        for group in dict.fromkeys(groups.values()):
            self._gradients_together(group)

    def _together(self, group: Group) -> bool:
        """Computes all products of a group as one, if that pays."""
        tall, weights = self.value(group.shared), [self.value(other) for other in group.others]
        widths = [weight.size(0) for weight in weights]
        if not worth_it(tall, weights, widths):
            return False
        parts = product(tall, torch.cat(weights).t()).split(widths, 1)
        self.known.update(zip(group.products, parts, strict=True))
        return True

    def _gradients_together(self, group: Group) -> None:
        tall, thin = self.value(group.shared), [self.value(other) for other in group.others]
        widths = [t.size(1) for t in thin]
        if not worth_it(tall, thin, widths):
            return
        beside = self.beside[group] = torch.cat(thin, 1)
        parts = product(beside.t(), tall).split(widths)
        self.known.update((node, part.clone()) for node, part in zip(group.products, parts, strict=True))

    def _beside_each_other(self, products: list[Node]) -> Tensor | None:
        """The sum of products whose left operands lie side by side already, as one product; else None."""
        rights: dict[Any, Node] = {node.left: node.right for node in products if isinstance(node, MatMul)}
        for group, beside in self.beside.items():
            if len(rights) == len(products) == len(group.others) and all(left in rights for left in group.others):
                weights = [self.value(rights[left]) for left in group.others]
                if len(weights) == 2:  # one of them may be zero where nodes have no neighbours
                    x, y = beside.split([weight.size(0) for weight in weights], 1)
                    return two_products(x, weights[0], y, weights[1])
                return product(beside, torch.cat(weights))
        return None

    def _horner(self, node: Horner) -> Tensor:
        last = node.terms[-1]
        assert last is not None
        total = self.value(last)
        for term in reversed(node.terms[:-1]):
            if isinstance(term, Scaled):
                total = self._hop(node.sparse, total, self.value(term.of), self.call.scalars[term.by])
            else:
                total = self._hop(node.sparse, total, None if term is None else self.value(term))
        return total

    def _clenshaw(self, node: Clenshaw) -> Tensor:
        last = node.terms[-1]
        assert last is not None
        now = self.value(last)
        later: Tensor | None = None
        for k in reversed(range(len(node.terms) - 1)):
            term, minus = node.terms[k], -1.0 if k else -2.0
            if term is None:
                now, later = self._hop(node.sparse, now, later, minus), now
                continue
            y = self.value(term)
            y = y if later is None else taped.add(y, later, minus, in_place=False)
            now, later = self._hop(node.sparse, now, y), now
        return now


def _is_product(node: Node) -> bool:
    inner = node.of if isinstance(node, Scaled) else node
    return isinstance(inner, MatMul) and not isinstance(inner.left, (Sparse, Diagonal))


COMPUTE: dict[type, Callable[[Evaluation, Any], Tensor]] = {
    Leaf: Evaluation._leaf,
    Transpose: Evaluation._transpose,
    MatMul: Evaluation._matmul,
    Scaled: Evaluation._scaled,
    Add: Evaluation._add,
    Step: Evaluation._step,
    Horner: Evaluation._horner,
    Clenshaw: Evaluation._clenshaw,
}
