"""What others offer for the same job: torch, PyG, and torch_scatter, torch_sparse, pyg_lib where they are installed.

Each function takes the tensors of a case and gives `(candidates, skipped)`; a name is skipped with its reason.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch_geometric.utils as pyg
from torch import Tensor


@dataclass(frozen=True)
class Candidate:
    """One way to compute the op."""

    name: str
    forward: Callable[..., Tensor]  # of the case's inputs
    scratch: int = 0  # bytes of the intermediate tensors that one forward call makes
    dtype: torch.dtype | None = None  # the dtype it takes the inputs in, where that is not the case's own


Offers = tuple[list[Candidate], dict[str, str]]
MKL_DTYPES = (torch.float32, torch.float64)  # what `adj @ x` takes on a CPU
TORCH_REDUCE = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}


def optional(name: str) -> ModuleType | str:
    """The module, or why it is not to be had."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return "not installed"
    except (ImportError, OSError) as error:
        return f"does not load: {str(error).splitlines()[0]}"


def csr(destination: Tensor, source: Tensor, value: Tensor, num_nodes: int, index: torch.dtype = torch.int64) -> Tensor:
    """A CSR matrix of torch's own, rows are destinations: value [E] in the order of the edges."""
    order = (destination * num_nodes + source).argsort()
    rowptr = torch.zeros(num_nodes + 1, dtype=torch.int64, device=source.device)
    rowptr[1:] = torch.bincount(destination, minlength=num_nodes).cumsum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse")
        size = (num_nodes, num_nodes)
        return torch.sparse_csr_tensor(rowptr.to(index), source[order].to(index), value[order], size)


def spmm(edge_index: Tensor, x: Tensor, weight: Tensor | None, reduce: str) -> Offers:
    """Aggregation of neighbours. x [N, K], weight [E] or None."""
    source, destination = edge_index
    num_nodes = x.shape[0]
    messages = edge_index.shape[1] * x.shape[1] * x.element_size()
    scratch = messages if weight is None else 2 * messages
    value = torch.ones(edge_index.shape[1], device=x.device) if weight is None else weight
    factor = None if weight is None else weight.to(x.dtype)[:, None]

    def gather(x: Tensor) -> Tensor:
        return x[source] if factor is None else x[source] * factor

    result, skipped = [], {}
    for label, index in (("torch csr", torch.int64), ("torch csr int32", torch.int32)):
        if reduce != "sum":
            skipped[label] = f"has no {reduce}"
            continue
        dtype = x.dtype if x.dtype in MKL_DTYPES else torch.float32
        adj = csr(destination, source, value.to(dtype), num_nodes, index)
        name = label if dtype == x.dtype else f"{label} in f32"
        result.append(Candidate(name, lambda x, adj=adj: adj @ x, dtype=dtype))
    adj = csr(destination, source, value.to(x.dtype), num_nodes)
    result.append(Candidate("torch.sparse.mm reduce", lambda x: torch.sparse.mm(adj, x, TORCH_REDUCE[reduce])))
    scatters = {
        "gather + " + _scatter_name(reduce): lambda x: _scatter(gather(x), destination, num_nodes, reduce),
        "PyG scatter": lambda x: pyg.scatter(gather(x), destination, 0, num_nodes, reduce),
    }
    result += [Candidate(name, forward, scratch) for name, forward in scatters.items()]
    module = optional("torch_scatter")
    if isinstance(module, str):
        skipped["torch_scatter"] = module
    else:
        result.append(
            Candidate("torch_scatter", _with_torch_scatter(module, gather, destination, num_nodes, reduce), scratch)
        )
    module = optional("torch_sparse")
    if isinstance(module, str):
        skipped["torch_sparse"] = module
    else:
        inputs = None if weight is None else weight.to(x.dtype)
        matrix = module.SparseTensor(row=destination, col=source, value=inputs, sparse_sizes=(num_nodes, num_nodes))
        result.append(Candidate("torch_sparse", lambda x, matmul=module.matmul: matmul(matrix, x, reduce=reduce)))
    return result, skipped


def _with_torch_scatter(
    module: ModuleType, messages: Callable[[Tensor], Tensor], index: Tensor, num_rows: int, reduce: str
) -> Callable[[Tensor], Tensor]:
    return lambda x: module.scatter(messages(x), index, dim=0, dim_size=num_rows, reduce=reduce)


def sddmm(edge_index: Tensor, a: Tensor, b: Tensor) -> Offers:
    """Per-edge dot products of destination and source rows. a, b [N, H, F]."""
    source, destination = edge_index
    scratch = 3 * edge_index.shape[1] * a[0].numel() * a.element_size()
    result = [Candidate("gather, multiply, sum", lambda a, b: (a[destination] * b[source]).sum(-1), scratch)]
    skipped = {}
    if a.shape[1] == 1 and a.dtype in MKL_DTYPES:
        num_nodes = a.shape[0]
        adj = csr(destination, source, torch.ones(edge_index.shape[1], dtype=a.dtype), num_nodes)
        back = (destination * num_nodes + source).argsort().argsort()

        def sampled(a: Tensor, b: Tensor) -> Tensor:
            products: Tensor = torch.sparse.sampled_addmm(adj, a[:, 0], b[:, 0].T, beta=0.0)
            return products.values()[back][:, None]

        result.append(Candidate("torch sampled_addmm", sampled))
    else:
        skipped["torch sampled_addmm"] = "takes one head, in f32 or f64"
    return result, skipped


def edge_softmax(edge_index: Tensor, score: Tensor, num_nodes: int) -> Offers:
    """Softmax over the edges of each destination. score [E, H]."""
    destination = edge_index[1]
    scratch = 4 * score.numel() * score.element_size()
    return [Candidate("PyG softmax", lambda s: pyg.softmax(s, destination, num_nodes=num_nodes), scratch)], {}


def segment_reduce(src: Tensor, index: Tensor, num_segments: int, reduce: str) -> Offers:
    """Reduction of messages. src [E, K], index [E], in no order."""
    result, skipped = [], {}
    if reduce in (*TORCH_REDUCE, "mul"):
        result.append(Candidate("PyG scatter", lambda s: pyg.scatter(s, index, 0, num_segments, reduce)))
    if reduce in TORCH_REDUCE:
        result.append(Candidate(_scatter_name(reduce), lambda s: _scatter(s, index, num_segments, reduce)))
        module = optional("torch_scatter")
        if isinstance(module, str):
            skipped["torch_scatter"] = module
        else:
            forward = _with_torch_scatter(module, lambda s: s, index, num_segments, reduce)
            result.append(Candidate("torch_scatter", forward))
    if reduce == "softmax":
        result.append(Candidate("PyG softmax", lambda s: pyg.softmax(s, index, num_nodes=num_segments)))
    return result, skipped


def gather_rows(index: Tensor) -> Offers:
    """Rows x[index]."""
    return [
        Candidate("x[index]", lambda x: x[index]),
        Candidate("index_select", lambda x: x.index_select(0, index)),
    ], {}


def scatter_rows(index: Tensor, num_rows: int) -> Offers:
    """Sum of rows by index, the adjoint of gather_rows."""
    return [
        Candidate("index_add_", lambda s: _scatter(s, index, num_rows, "sum")),
        Candidate("PyG scatter", lambda s: pyg.scatter(s, index, 0, num_rows, "sum")),
    ], {}


def segment_matmul(ptr: Tensor) -> Offers:
    """One weight per segment of rows. x [N, K], weight [S, K, M]."""
    bounds = ptr.tolist()

    def loop(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([x[a:b] @ w for a, b, w in zip(bounds, bounds[1:], weight.unbind(0), strict=False)])

    result, skipped = [Candidate("loop of matmul", loop)], {}
    module = optional("pyg_lib")
    if isinstance(module, str):
        skipped["pyg_lib"] = module
    else:
        result.append(Candidate("pyg_lib", lambda x, weight: module.ops.segment_matmul(x, ptr, weight)))
    return result, skipped


def _scatter_name(reduce: str) -> str:
    return "index_add_" if reduce == "sum" else "scatter_reduce_"


def _scatter(message: Tensor, index: Tensor, num_rows: int, reduce: str) -> Tensor:
    """The scatter of torch itself: message [E, K] -> [num_rows, K]."""
    out = message.new_zeros(num_rows, *message.shape[1:])
    if reduce == "sum":
        return out.index_add_(0, index, message)
    where = index.view(-1, *[1] * (message.dim() - 1)).expand_as(message)
    return out.scatter_reduce_(0, where, message, TORCH_REDUCE[reduce], include_self=False)
