"""The compiler: a layer's algebra in, the cheapest equal plan out. It knows nothing of kernels or of PyG."""

from stretto.compile.adjacency import Adjacency
from stretto.compile.choose import CHOOSER, linear
from stretto.compile.constants import constant
from stretto.compile.expr import Expression, Leaf, Sparse, Term, Transpose
from stretto.compile.hoist import HOIST
from stretto.compile.joint import Product, joint
from stretto.compile.orders import Order, Trial, best_order
from stretto.compile.plan import Plan, Request, plans

__all__ = [
    "CHOOSER",
    "HOIST",
    "Adjacency",
    "Expression",
    "Leaf",
    "Order",
    "Plan",
    "Product",
    "Request",
    "Sparse",
    "Term",
    "Transpose",
    "Trial",
    "best_order",
    "constant",
    "joint",
    "linear",
    "plans",
]
