"""The C ABI for ctypes: every function of csrc/abi.h and csrc/kernels.def, and every structure that they point to.

Stated here once for all of Python; tests/kernels/test_abi.py compares both with the C files.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from torch import Tensor

# p pointer, i int64, u uint64, n int32, d double, s string.
CODES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "u": ctypes.c_uint64,
    "n": ctypes.c_int,
    "d": ctypes.c_double,
    "s": ctypes.c_char_p,
}

# Arguments of every function; the result is an int status unless RESULTS says otherwise.
SIGNATURES = {
    "stretto_version": "",
    "stretto_error": "",
    "stretto_isas": "",
    "stretto_isa": "",
    "stretto_set_isa": "s",
    "stretto_threading": "",
    "stretto_flush_denormals": "nn",
    "stretto_minmax": "piinpp",
    "stretto_csr_build": "ppiiinpppip",
    "stretto_csr_rows_sorted": "pnp",
    "stretto_csr_transpose": "pnppp",
    "stretto_schedule": "piippp",
    "stretto_batch_graph": "ppiiiiiiippp",
    "stretto_hash": "pinp",
    "stretto_spmm": "pnnpiiipipppidpipiin",
    "stretto_spmm_extremum_grad": "pnpiipippppn",
    "stretto_sddmm": "pnpipiiipn",
    "stretto_sddmm_add": "pnppipn",
    "stretto_edge_softmax": "pnpipn",
    "stretto_edge_softmax_grad": "pnppipn",
    "stretto_mul_grad": "pnppipn",
    "stretto_gather_rows": "pipiipn",
    "stretto_gather_ceiling": "pipiipn",
    "stretto_attention_forward": "pnpn",
    "stretto_attention_backward": "pnpn",
    "stretto_attention_left": "pnpn",
    "stretto_row_dot": "npipiiiippnpin",
    "stretto_edge_messages": "pnpnn",
    "stretto_edge_softmax_sum": "pnpnn",
    "stretto_relu_dense": "npiippippn",
    "stretto_relu_dense_grad": "npiippipppin",
    "stretto_tall_product": "npiipiiiipdnpiipiipn",
    "stretto_sum_product": "npiiipiippin",
    "stretto_chain": "npiipipn",
    "stretto_chain_grad": "npiipippin",
    "stretto_pairs": "ppppppp",
    "stretto_pair_rows": "pippipn",
    "stretto_neighbour_statistics": "pnpnn",
    "stretto_softplus": "nppidpn",
    "stretto_sampler_create": "p",
    "stretto_sampler_destroy": "p",
    "stretto_sampler_weights": "pipnp",
    "stretto_sampler_sample": "ppp",
    "stretto_slot_table": "ppi",
    "stretto_slot_release": "p",
    "stretto_slot_tensor": "p",
    "stretto_engine_create": "pnipp",
    "stretto_engine_submit": "pp",
    "stretto_engine_next": "pip",
    "stretto_engine_cancel": "p",
    "stretto_engine_destroy": "p",
    "stretto_engine_state": "pp",
}
RESULTS = {
    **dict.fromkeys(("stretto_version", "stretto_error", "stretto_isas", "stretto_isa", "stretto_threading"), "s"),
    **dict.fromkeys(("stretto_sampler_create", "stretto_slot_tensor", "stretto_engine_create"), "p"),
    **dict.fromkeys(("stretto_sampler_destroy", "stretto_slot_release", "stretto_hash"), ""),
    **dict.fromkeys(("stretto_engine_cancel", "stretto_engine_destroy", "stretto_engine_state"), ""),
    "stretto_slot_table": "i",
}


def declare(function: Any, name: str) -> None:
    """Tell ctypes what a function takes and gives."""
    function.argtypes = [CODES[code] for code in SIGNATURES[name]]
    result = RESULTS.get(name, "n")
    function.restype = CODES[result] if result else None


def _structure(fields: str) -> Any:
    """The ctypes.Structure of these fields: a code, the names that have it, and so on; name:3 is an array."""
    members, kind = [], CODES["p"]
    for word in fields.split():
        name, _, count = word.partition(":")
        if word in CODES:
            kind = CODES[word]
        else:
            members.append((name, kind * int(count) if count else kind))
    return type("Structure", (ctypes.Structure,), {"_fields_": members})


def filled(structure: Any, **fields: Any) -> Any:
    """A pointer to a structure with these fields, tensors by their addresses."""
    return ctypes.byref(structure(**{k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in fields.items()}))


def packer(structure: Any) -> struct.Struct:
    """The same as one call that makes its bytes: setting a field at a time takes longer than a small kernel."""
    codes = {ctypes.c_void_p: "P", ctypes.c_int64: "q", ctypes.c_double: "d"}
    return struct.Struct(
        "".join(codes[kind] if kind in codes else kind._length_ * codes[kind._type_] for _, kind in structure._fields_)
    )


CSR = _structure(
    "p rowptr col edge_id tasks hubs i num_rows num_cols num_edges num_tasks num_hubs num_slots index_bytes"
)
ATTENTION = _structure(
    "i form heads width score_width attr_width value_heads right_heads p v i ldv p left i ldl p right i ldr"
    " p att edge attr query d slope scale dropout u seed i alpha_dropped p stats out out_attr alpha grad i ldg"
    " p grad_attr grad_alpha row_sum dv dleft dright datt dedge dattr dquery dscore scores bias"
)
MESSAGES = _structure(
    "i width act:2 p row:2 col:2 edge:2 out grad drow:2 dcol:2 dedge:2"
    " i ld_row:2 ld_col:2 ld_edge:2 ld_drow:2 ld_dcol:2 ld_dedge:2 p root i ld_root d root_scale p pairs i num_pairs"
)
SOFTMAX_SUM = _structure(
    "i width act detached d shift p x edge temperature out most inverse grad dx dedge dtemperature"
)
STATISTICS = _structure("i width place:6 p x i ld_x p own out i ld_out p grad packed down dx")
STAGE = _structure("i kind width p weight bias d shift p out dweight dbias")
NODE_TYPE = _structure("i num_nodes p time")
RELATION = _structure("p colptr row edge_id time running fanout i row_bytes id_bytes source target")
SLICE = _structure("p data scale i row_bytes stride of_edges type columns")
SAMPLING_PLAN = _structure("p node_types relations slices i num_node_types num_relations num_slices num_hops flags")
SEEDS = _structure("u seed epoch batch p seeds counts times")
