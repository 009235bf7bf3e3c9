"""Where a packed model keeps what: file names, layout version, and how a session over them is opened."""

from __future__ import annotations

import onnxruntime  # type: ignore[import-untyped]

LAYOUT_VERSION = 5  # of what this module writes
GRAPH_FILE, WEIGHTS_FILE, SHAPE_FILE, PROBE_FILE = "decoder.onnx", "weights.bin", "shape.json", "probe.npz"
CONFIG_FILE = "config.json"
LOCK_FILE = "lock"  # held by whoever reads or makes the folder
MAKING = "making-"  # how the names of unfinished folders begin


def session_options(num_threads: int) -> onnxruntime.SessionOptions:
    """Settings that packing and running share."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    # The graph is fused by hand, and the packed weights belong to its very nodes.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_mem_pattern = False  # it would keep a plan for every number of tokens ever seen
    # Threads that spin while they wait take the cores away from the other model of the pair.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return options
