from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from placewright.cluster import Cluster
from placewright.costs import Costs, family_of
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.graph_file import Op, Output

CLUSTER = Cluster(
    name="c",
    description="",
    source="",
    device_names=("cpu", "cuda:0"),
    device_kinds=("cpu", "cuda"),
    device_models=("", "Tesla K40"),
    memory_bytes=np.array([100, 100]),
    flops=({"float32": 1e9}, {"float32": 1e10, "float16": 4e10}),
    memory_bytes_per_s=np.array([1e9, 1e10]),
    launch_s=np.array([1e-6, 5e-6]),
    efficiency=({}, {"matmul": 0.5, "other": 0.8}),
    latency_s=np.zeros((2, 2)),
    bytes_per_s=np.ones((2, 2)),
    channel_names=("bus",),
    link_channels=((0,),) * 4,
)


def microseconds(**op):
    graph = Graph.build("g", [Op(name="a", **op)])
    return (Costs.estimate(graph, CLUSTER).op_ps[0] / 1e6).tolist()


def test_an_op_takes_launch_and_the_longer_of_computing_and_moving():
    # 1e4 flops: 10 us and 1 us; 4e4 bytes: 40 us and 4 us; 0.8 of the GPU's rates is reached.
    assert microseconds(flops=1e4) == [1 + 10, 5 + 1 / 0.8]
    assert microseconds(flops=1e4, bytes=4e4) == [1 + 40, 5 + 4 / 0.8]


def test_the_family_chooses_the_efficiency_and_the_dtype_the_rate():
    assert microseconds(kind="aten.mm", flops=1e4) == [11, 5 + 1 / 0.5]
    assert microseconds(kind="aten.mm", flops=1e4, dtype="float16") == [11, 5 + 0.25 / 0.5]
    assert microseconds(kind="aten.mm", flops=1e4, dtype="int8") == [11, 5 + 1 / 0.5]


def test_efficiency_may_grow_with_the_size_of_an_op():
    # Matrix products by flops: 0.1 up to 1e3, 0.5 from 1e5 on, 0.3 in the middle of the logarithm.
    curve = ((1e3, 0.1), (1e5, 0.5))
    cluster = replace(CLUSTER, efficiency=({}, {"matmul": curve, "other": 0.8, "movement": 0.25}))

    def microseconds(**op):
        graph = Graph.build("g", [Op(name="a", **op)])
        return Costs.estimate(graph, cluster).op_ps[0, 1] / 1e6

    assert microseconds(kind="aten.mm", flops=1e2) == pytest.approx(5 + 0.01 / 0.1)
    assert microseconds(kind="aten.mm", flops=1e4) == pytest.approx(5 + 1 / 0.3)
    assert microseconds(kind="aten.mm", flops=1e6) == pytest.approx(5 + 100 / 0.5)
    # What a matrix product reads and writes comes at the speed of data movement.
    assert microseconds(kind="aten.mm", flops=1e2, bytes=1e5) == pytest.approx(5 + 10 / 0.25)
    assert microseconds(kind="aten.add", flops=1e2, bytes=1e5) == pytest.approx(5 + 10 / 0.8)


def test_an_op_without_work_takes_no_time():
    assert microseconds(kind="input", outputs=[100]) == [0, 0]


def test_measured_times_win_by_name_then_model_then_kind():
    assert microseconds(flops=1e4, time_s={"cuda": 3e-6}) == [11, 3]
    assert microseconds(flops=1e4, time_s={"cuda": 3e-6, "Tesla K40": 4e-6}) == [11, 4]
    assert microseconds(flops=1e4, time_s={"Tesla K40": 4e-6, "cuda:0": 5e-6}) == [11, 5]
    assert microseconds(time_s={"cpu": 7e-6}) == [7, 0]


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("aten.mm", "matmul"),
        ("aten.addmm", "matmul"),
        ("onnx.Gemm", "matmul"),
        ("aten.convolution_backward", "convolution"),
        ("onnx.Conv", "convolution"),
        ("aten.scaled_dot_product_attention", "attention"),
        ("aten.native_layer_norm", "reduction"),
        ("aten.embedding", "gather"),
        ("aten.mm.default", "matmul"),
        ("aten.convolution.default", "convolution"),
        ("aten._softmax.default", "reduction"),
        ("aten.add.Tensor", "elementwise"),
        ("aten.maximum", "elementwise"),
        ("onnx.GlobalAveragePool", "reduction"),
        ("onnx.LayerNormalization", "reduction"),
        ("aten.cat", "movement"),
        ("aten.gelu", "elementwise"),
        ("op", "elementwise"),
        ("onnx.MatMul", "matmul"),
        ("onnx.QLinearMatMul", "matmul"),
        ("com.microsoft.MultiHeadAttention", "attention"),
        ("aten._fused_adam_", "elementwise"),
        ("aten.native_batch_norm_backward", "reduction"),
        ("aten._scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten.index_copy", "gather"),
        ("aten.embedding_dense_backward", "gather"),
        ("aten.max_pool2d_with_indices_backward", "reduction"),
        ("aten._log_softmax_backward_data", "reduction"),
    ],
)
def test_kinds_are_sorted_into_families(kind, family):
    assert family_of(kind) == family


def test_times_that_int64_cannot_hold_are_refused():
    with pytest.raises(InputError, match=r"Op `a` takes 1e\+11 s"):
        microseconds(flops=1e20)
    with pytest.raises(InputError, match="in all; expected at most"):
        Costs(np.full((3, 1), 2**61))
    for wrong in (np.zeros((2, 2)), np.zeros(3, dtype=int), [[1.5]]):
        with pytest.raises(InputError, match=r"expected whole picoseconds by \(op, device\)"):
            Costs(wrong)
    with pytest.raises(InputError, match="expected no negative time"):
        Costs(np.array([[-1]]))


def test_parameters_take_no_time():
    graph = Graph.build("g", [Op(name="w", outputs=[Output(10, persistent=True)])])
    assert Costs.estimate(graph, CLUSTER).op_ps.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"op_ps": None}, "`op_ps` is None; expected whole picoseconds"),
        ({"op_ps": [[1], [2, 3]]}, r"`op_ps` is \[\[1\], \[2, 3\]\]; expected whole picoseconds"),
        ({"op_ps": [[2**63]]}, "`op_ps` holds 9223372036854775808"),
        ({"op_ps": [[1, 2]], "scratch_bytes": [[1]]}, r"`scratch_bytes` has shape \(1, 1\)"),
        ({"op_ps": [[1, 2]], "scratch_bytes": [[-1, 0]]}, "`scratch_bytes` holds -1 to 0"),
        ({"op_ps": [[1, 2]], "idle_gain_ps": [[0.5, 0]]}, "`idle_gain_ps` has shape"),
    ],
)
def test_wrong_arguments_of_costs_are_named(fields, words):
    with pytest.raises(InputError, match=words):
        Costs(**fields)
