from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from placewright.errors import InputError
from placewright.frontends.onnx import read_onnx, unpriced_kinds
from placewright.graph_file import Output

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.helper import make_node  # noqa: E402

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64


def tensor(name, *shape, dtype=FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def zeros(name, *shape, dtype=np.float32):
    return numpy_helper.from_array(np.zeros(shape, dtype), name)


def ints(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def proto(nodes, inputs, outputs, weights=(), *, opset=21, known=(), domains=(), functions=()):
    """Make a model; an output may be just a name."""
    outputs = [
        onnx.ValueInfoProto(name=output) if isinstance(output, str) else output
        for output in outputs
    ]
    graph = helper.make_graph(
        nodes, "graph", inputs, outputs, initializer=weights, value_info=known
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=functions)


@pytest.fixture
def read(tmp_path):
    def _read(*args, dims=None, **kwargs):
        path = tmp_path / "m.onnx"
        onnx.save(proto(*args, **kwargs), path)
        return read_onnx(path, dims)

    return _read


@pytest.fixture
def refused(tmp_path):
    """Give the message that a model is refused with, which names the file in one line."""

    def _refused(*args, dims=None, **kwargs):
        path = tmp_path / "m.onnx"
        model = args[0] if isinstance(args[0], onnx.ModelProto) else proto(*args, **kwargs)
        path.write_bytes(model.SerializeToString())
        with pytest.raises(InputError) as caught:
            read_onnx(path, dims)
        message = str(caught.value)
        assert message.startswith(f"The ONNX file `{path}` cannot be used: ")
        assert "\n" not in message
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
        return message.partition(": ")[2]

    return _refused


def ops_of(capture):
    return {op.name: op for op in capture.graph.describe()}


def flops_of(capture, name):
    return ops_of(capture)[name].flops


# What an op is.


def test_a_layer_has_its_params_its_input_and_a_kept_output(read):
    capture = read(
        [make_node("Gemm", ["x", "fc.weight", "fc.bias"], ["y"], name="/fc/Gemm", transB=1)],
        [tensor("x", 2, 3)],
        [tensor("y", 2, 5)],
        [zeros("fc.weight", 5, 3), zeros("fc.bias", 5)],
    )
    assert capture.graph.name == "m"
    assert capture.unpriced == ()
    ops = ops_of(capture)
    assert [(op.name, op.kind, op.module) for op in ops.values()] == [
        ("x", "input", ""),
        ("fc.weight", "param", "fc"),
        ("fc.bias", "param", "fc"),
        ("/fc/Gemm", "onnx.Gemm", "fc"),
    ]
    first, alias = ops["fc.weight"].outputs
    assert (first.bytes, first.persistent) == (60, True)
    assert (alias.bytes, alias.alias_of) == (60, "fc.weight")
    gemm = ops["/fc/Gemm"]
    assert set(gemm.inputs) == {"x", "fc.weight:1", "fc.bias:1"}
    assert [(made.bytes, made.keep) for made in gemm.outputs] == [(40, True)]
    assert capture.graph.tensor_shapes == ((2, 3), (5, 3), (5, 3), (5,), (5,), (2, 5))
    assert gemm.phase == "forward"
    assert gemm.dtype == "float32"
    assert gemm.flops == 2 * 2 * 5 * 3
    assert gemm.bytes == 24 + 60 + 20 + 40


def test_a_shape_of_very_many_dimensions_is_left_unknown(read):
    capture = read([make_node("Relu", ["x"], ["y"])], [tensor("x", *[1] * 17)], ["y"])
    assert capture.graph.tensor_shapes == (None, None)


def test_a_gemm_may_transpose_what_it_reads(read):
    capture = read(
        [make_node("Gemm", ["x", "w"], ["y"], name="g", transA=1)],
        [tensor("x", 3, 2)],
        ["y"],
        [zeros("w", 3, 5)],
    )
    assert flops_of(capture, "g") == 2 * 2 * 5 * 3


def test_a_grouped_convolution_counts_what_each_group_reads(read):
    capture = read(
        [make_node("Conv", ["x", "w"], ["y"], name="c", group=2, pads=[1, 1, 1, 1])],
        [tensor("x", 2, 4, 8, 8)],
        ["y"],
        [zeros("w", 6, 2, 3, 3)],
    )
    assert flops_of(capture, "c") == 2 * (2 * 6 * 8 * 8) * (2 * 3 * 3)


def test_a_transposed_convolution_counts_what_each_input_is_spread_over(read):
    capture = read(
        [make_node("ConvTranspose", ["x", "w"], ["y"], name="c", strides=[2, 2])],
        [tensor("x", 1, 4, 5, 5)],
        ["y"],
        [zeros("w", 4, 3, 2, 2)],
    )
    assert flops_of(capture, "c") == 2 * (4 * 5 * 5) * (3 * 2 * 2)
    assert ops_of(capture)["c"].outputs[0].bytes == 4 * 3 * 10 * 10


def test_batched_matmuls_count_every_batch(read):
    capture = read(
        [make_node("MatMul", ["a", "b"], ["y"], name="mm")],
        [tensor("a", 7, 1, 2, 3), tensor("b", 4, 3, 5)],
        ["y"],
    )
    assert flops_of(capture, "mm") == 2 * (7 * 4 * 2 * 5) * 3


def test_an_einsum_counts_its_whole_index_space(read):
    capture = read(
        [make_node("Einsum", ["a", "b"], ["y"], name="e", equation="...ij, ...jk -> ...ik")],
        [tensor("a", 7, 2, 3), tensor("b", 1, 3, 5)],
        ["y"],
    )
    assert flops_of(capture, "e") == 2 * 7 * 2 * 3 * 5


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers_count_both_products_of_every_step_and_direction(read, kind, gates):
    capture = read(
        [make_node(kind, ["x", "w", "r", "", "", "h"], ["", "y"], name="r", hidden_size=4,
                   direction="bidirectional")],
        [tensor("x", 5, 2, 3), tensor("h", 2, 2, 4)],
        ["y"],
        [zeros("w", 2, gates * 4, 3), zeros("r", 2, gates * 4, 4)],
    )  # fmt: skip
    op = ops_of(capture)["r"]
    assert op.flops == 2 * 2 * 5 * 2 * (gates * 4) * (3 + 4)
    assert [made.bytes for made in op.outputs] == [4 * 2 * 2 * 4]


def test_attention_counts_scores_and_sums_over_past_keys_too(read):
    capture = read(
        [make_node("Attention", ["q", "k", "v", "", "pk", "pv"], ["y", "nk", "nv"], name="a")],
        [
            tensor("q", 1, 2, 3, 8), tensor("k", 1, 2, 3, 8), tensor("v", 1, 2, 3, 6),
            tensor("pk", 1, 2, 5, 8), tensor("pv", 1, 2, 5, 6),
        ],
        ["y", "nk", "nv"],
        opset=23,
    )  # fmt: skip
    assert flops_of(capture, "a") == 2 * 2 * 3 * (3 + 5) * (8 + 6)


def test_pooling_counts_its_window_and_other_ops_their_elements(read):
    capture = read(
        [
            make_node("MaxPool", ["x"], ["p"], name="pool", kernel_shape=[2, 3]),
            make_node("GlobalAveragePool", ["p"], ["g"], name="global"),
            make_node("Softmax", ["g"], ["s"], name="softmax"),
            make_node("Add", ["s", "x"], ["y"], name="add"),
        ],
        [tensor("x", 1, 2, 4, 6)],
        ["y"],
    )
    assert flops_of(capture, "pool") == 2 * 3 * 4 * 6
    assert flops_of(capture, "global") == 2 * 3 * 4
    assert flops_of(capture, "softmax") == 2
    assert flops_of(capture, "add") == 2 + 48


def test_movement_costs_bytes_and_no_flops(read):
    capture = read(
        [
            make_node("Concat", ["x", "x2"], ["c"], name="concat", axis=0),
            make_node("Transpose", ["c"], ["t"], name="transpose"),
            make_node("Slice", ["t", "from", "to"], ["s"], name="slice"),
            make_node("Cast", ["s"], ["y"], name="cast", to=HALF),
        ],
        [tensor("x", 2, 3), tensor("x2", 2, 3)],
        ["y"],
        [ints("from", 1), ints("to", 2)],
    )
    ops = ops_of(capture)
    assert {op.flops for op in ops.values()} == {0}
    assert ops["concat"].bytes == 2 * 48
    assert ops["transpose"].bytes == 2 * 48
    assert ops["slice"].bytes == 2 * 16
    assert ops["cast"].bytes == 16 + 8
    assert "from" not in ops
    assert capture.unpriced == ()


def test_a_gather_reads_as_much_of_its_table_as_it_gives_back(read):
    capture = read(
        [make_node("Gather", ["table", "ids"], ["y"], name="g")],
        [tensor("ids", 2, 7, dtype=INT64)],
        ["y"],
        [zeros("table", 1000, 16)],
    )
    assert ops_of(capture)["g"].bytes == 2 * (4 * 2 * 7 * 16) + 8 * 2 * 7


def test_half_precision_has_half_the_bytes(read):
    capture = read(
        [make_node("MatMul", ["x", "w"], ["y"], name="mm")],
        [tensor("x", 2, 3, dtype=HALF)],
        ["y"],
        [zeros("w", 3, 5, dtype=np.float16)],
    )
    ops = ops_of(capture)
    assert ops["mm"].dtype == ops["w"].dtype == "float16"
    assert ops["w"].outputs[0].bytes == 30
    assert ops["mm"].bytes == 12 + 30 + 20


def test_quantised_products_compute_in_their_own_type(read):
    scale, zero = zeros("scale"), zeros("zero", dtype=np.uint8)
    capture = read(
        [
            make_node("QLinearConv", ["x", "scale", "zero", "w", "scale", "zero", "scale", "zero"],
                      ["c"], name="conv"),
            make_node("MatMulInteger", ["c", "m"], ["y"], name="mm"),
        ],
        [tensor("x", 1, 2, 5, 5, dtype=TensorProto.UINT8)],
        ["y"],
        [scale, zero, zeros("w", 3, 2, 2, 2, dtype=np.uint8), zeros("m", 4, 6, dtype=np.uint8)],
    )  # fmt: skip
    ops = ops_of(capture)
    assert list(ops) == ["x", "w", "m", "conv", "mm"]  # scalars are part of what reads them
    assert (ops["conv"].flops, ops["conv"].dtype) == (2 * 3 * 4 * 4 * 8, "uint8")
    assert (ops["mm"].flops, ops["mm"].dtype) == (2 * 3 * 4 * 6 * 4, "uint8")
    assert ops["mm"].outputs[0].bytes == 4 * 3 * 4 * 6


def test_four_bit_weights_are_packed(read):
    weight = helper.make_tensor("w", TensorProto.INT4, [3, 5], b"\0" * 8, raw=True)
    capture = read(
        [
            make_node("DequantizeLinear", ["w", "scale"], ["d"], name="d"),
            make_node("MatMul", ["x", "d"], ["y"], name="mm"),
        ],
        [tensor("x", 2, 3)],
        ["y"],
        [weight, zeros("scale")],
    )
    op = ops_of(capture)["w"]
    assert (op.outputs[0].bytes, op.dtype) == (8, "int4")


def test_ops_that_are_not_priced_are_listed(read):
    capture = read(
        [
            make_node("Det", ["x"], ["d"], name="det"),
            make_node("Mine", ["d"], ["y"], name="mine", domain="my.ops"),
            make_node("Mine", ["y"], ["z"], name="mine2", domain="my.ops"),
        ],
        [tensor("x", 5, 3, 3)],
        ["z"],
        domains=["my.ops"],
        known=[tensor("y", 5), tensor("z", 5)],
    )
    assert capture.unpriced == ("my.ops.Mine", "onnx.Det")
    assert unpriced_kinds(capture.graph) == capture.unpriced
    mine = ops_of(capture)["mine"]
    assert (mine.kind, mine.flops, mine.bytes) == ("my.ops.Mine", 0, 40)


def test_empty_tensors_cost_nothing(read):
    capture = read(
        [make_node("Concat", ["past", "x"], ["y"], name="c", axis=1)],
        [tensor("past", 1, "past", 4), tensor("x", 1, 2, 4)],
        ["y"],
        dims={"past": 0},
    )
    ops = ops_of(capture)
    assert ops["c"].bytes == 32 + 32
    assert ops["c"].outputs[0].bytes == 32


# What becomes no op.


def test_a_shape_that_the_model_computes_is_folded_away(read):
    capture = read(
        [
            make_node("Shape", ["x"], ["shape"]),
            make_node("Gather", ["shape", "zero"], ["n"]),
            make_node("Unsqueeze", ["n", "axes"], ["n1"]),
            make_node("Constant", [], ["rest"], value=ints("", 12)),
            make_node("Div", ["rest", "two"], ["six"]),
            make_node("Concat", ["n1", "six", "two"], ["target"], axis=0),
            make_node("Reshape", ["x", "target"], ["r"]),
            make_node("Identity", ["r"], ["i"]),
            make_node("Transpose", ["i"], ["t"], name="transpose", perm=[0, 2, 1]),
            make_node("Flatten", ["t"], ["f"]),
            make_node("Relu", ["f"], ["y"], name="relu"),
        ],
        [tensor("x", "batch", 3, 4)],
        ["y"],
        [ints("axes", 0), numpy_helper.from_array(np.array(0), "zero"), ints("two", 2)],
        dims={"batch": 2},
    )
    ops = ops_of(capture)
    assert list(ops) == ["x", "transpose", "relu"]
    assert list(ops["transpose"].inputs) == ["x"]
    assert list(ops["relu"].inputs) == ["transpose"]
    assert ops["relu"].outputs[0].bytes == 4 * 2 * 12


def test_positions_found_with_nonzero_are_known(read):
    capture = read(
        [
            make_node("ConstantOfShape", ["length"], ["ones"],
                      value=helper.make_tensor("", INT64, [1], [1])),
            make_node("NonZero", ["ones"], ["at"]),
            make_node("Transpose", ["at"], ["column"]),
            make_node("Squeeze", ["column", "axes"], ["ids"], name="positions"),
            make_node("Gather", ["table", "ids"], ["y"], name="gather"),
        ],
        [],
        ["y"],
        [ints("length", 6), ints("axes", 1), zeros("table", 9, 4)],
    )  # fmt: skip
    ops = ops_of(capture)
    assert [(op.kind, op.outputs[0].bytes) for op in ops.values()] == [
        ("param", 144),
        ("constant", 48),
        ("onnx.Gather", 96),
    ]


def test_a_transpose_that_only_moves_ones_is_free(read):
    capture = read(
        [
            make_node("Transpose", ["x"], ["t"], perm=[1, 0, 3, 2]),
            make_node("Relu", ["t"], ["y"], name="relu"),
        ],
        [tensor("x", 1, 5, 1, 3)],
        ["y"],
    )
    assert list(ops_of(capture)) == ["x", "relu"]


def test_dropout_is_free_unless_it_trains_or_its_mask_is_read(read):
    nodes = [make_node("Dropout", ["x", "ratio", "mode"], ["y", "mask"], name="drop")]
    weights = [zeros("ratio"), zeros("mode", dtype=np.bool_)]
    free = read([*nodes, make_node("Relu", ["y"], ["z"])], [tensor("x", 4)], ["z"], weights)
    assert "drop" not in ops_of(free)
    masked = read(nodes, [tensor("x", 4)], ["y", "mask"], weights)
    assert [made.bytes for made in ops_of(masked)["drop"].outputs] == [16, 4]
    weights[1] = numpy_helper.from_array(np.array(True), "mode")
    assert "drop" in ops_of(read(nodes, [tensor("x", 4)], ["y"], weights))


def test_old_dropouts_have_a_mask_of_no_known_shape(read):
    nodes = [
        make_node("Dropout", ["x"], ["d", "mask"], name="drop"),
        make_node("Relu", ["d"], ["y"], name="relu"),
    ]
    assert list(ops_of(read(nodes, [tensor("x", 4)], ["y"], opset=7))) == ["x", "relu"]


def test_casts_and_expands_that_change_nothing_are_free(read):
    capture = read(
        [
            make_node("Cast", ["x"], ["c"], to=FLOAT),
            make_node("Expand", ["c", "shape"], ["e"]),
            make_node("Relu", ["e"], ["y"], name="relu"),
        ],
        [tensor("x", 2, 3)],
        ["y"],
        [ints("shape", 1, 3)],
    )
    assert list(ops_of(capture)) == ["x", "relu"]


def test_weights_stay_weights_in_a_small_model(read):
    capture = read(
        [
            make_node("Identity", ["w"], ["same"]),
            make_node("Transpose", ["same"], ["t"], name="t"),
            make_node("MatMul", ["x", "t"], ["y"], name="mm"),
        ],
        [tensor("x", 2, 3)],
        ["y"],
        [zeros("w", 5, 3), zeros("unused", 7)],
    )
    ops = ops_of(capture)
    assert list(ops) == ["x", "w", "t", "mm"]
    assert list(ops["t"].inputs) == ["w:1"]


def test_the_shape_of_a_weight_is_known(read):
    capture = read(
        [
            make_node("Shape", ["w"], ["shape"]),
            make_node("Expand", ["x", "shape"], ["e"], name="expand"),
            make_node("Add", ["e", "w"], ["y"], name="add"),
        ],
        [tensor("x", 1, 3)],
        ["y"],
        [zeros("w", 5, 3)],
    )
    ops = ops_of(capture)
    assert list(ops) == ["x", "w", "expand", "add"]
    assert ops["expand"].bytes == 12 + 60


def test_constants_are_residents_unless_they_are_one_number(read):
    capture = read(
        [
            make_node("Constant", [], ["c"], name="/block/mask", value=zeros("", 3)),
            make_node("Constant", [], ["half"], value_float=0.5),
            make_node("Mul", ["x", "half"], ["m"], name="/block/Mul"),
            make_node("Add", ["m", "c"], ["y"], name="/block/Add"),
        ],
        [tensor("x", 2, 3)],
        ["y"],
    )
    ops = ops_of(capture)
    assert list(ops) == ["x", "/block/mask", "/block/Mul", "/block/Add"]
    mask = ops["/block/mask"]
    assert (mask.kind, mask.module, mask.outputs[0].bytes) == ("constant", "block", 12)
    assert (ops["/block/Mul"].flops, ops["/block/Mul"].bytes) == (6, 48)


def test_a_number_may_take_the_type_of_what_it_meets(read):
    capture = read(
        [
            make_node("Constant", [], ["zero"], value_float=0.0),
            make_node("CastLike", ["zero", "x"], ["typed"]),
            make_node("Max", ["x", "typed"], ["y"], name="max"),
        ],
        [tensor("x", 5, dtype=HALF)],
        ["y"],
    )
    assert list(ops_of(capture)) == ["x", "max"]


def test_outputs_are_kept_through_views_and_as_constants(read):
    capture = read(
        [
            make_node("Relu", ["x"], ["r"], name="relu"),
            make_node("Reshape", ["r", "flat"], ["y"]),
            make_node("Shape", ["x"], ["shape"], name="shape"),
            make_node("Identity", ["x2"], ["z"]),
        ],
        [tensor("x", 2, 3), tensor("x2", 4)],
        ["y", "shape", "z", "w"],
        [ints("flat", -1), zeros("w", 3)],
    )
    ops = ops_of(capture)
    assert set(ops) == {"x", "x2", "relu", "shape", "w"}
    assert ops["relu"].outputs[0].keep
    assert ops["x2"].outputs[0].keep
    assert not ops["x"].outputs[0].keep
    assert (ops["shape"].kind, ops["shape"].outputs[0].bytes) == ("constant", 16)
    assert ops["w"].kind == "param"


def test_functions_of_the_model_are_inlined(read):
    function = helper.make_function(
        "mine", "Twice", ["a"], ["b"],
        [make_node("Constant", [], ["two"], value_floats=[2.0, 2.0]),
         make_node("Mul", ["a", "two"], ["b"])],
        [helper.make_opsetid("", 21)],
    )  # fmt: skip
    capture = read(
        [make_node("Twice", ["x"], ["y"], domain="mine")],
        [tensor("x", 3, 2)],
        ["y"],
        domains=["mine"],
        functions=[function],
    )
    assert [op.kind for op in ops_of(capture).values()] == ["input", "constant", "onnx.Mul"]


# Names.


def test_names_are_made_unique_and_never_look_like_outputs(read):
    capture = read(
        [
            make_node("Relu", ["in:0"], ["a"], name="layer:0"),
            make_node("Relu", ["a"], ["b"], name="same"),
            make_node("Relu", ["b"], ["c"], name="same"),
            make_node("Relu", ["c"], ["d"], name="same_2"),
            make_node("Relu", ["d"], ["e"]),
            make_node("MatMul", ["e", "same"], ["f"], name="layer_0"),
        ],
        [tensor("in:0", 3)],
        ["f"],
        [zeros("same", 3, 3)],
    )
    assert set(ops_of(capture)) == {
        "in_0", "layer_0", "same", "same_2", "same_2_2", "Relu_4", "layer_0_2", "same_3",
    }  # fmt: skip


def test_modules_come_from_names_that_are_paths(read):
    names = {
        "/layers.0/attn/MatMul": "layers.0.attn",
        "model/dense/Relu": "model.dense",
        "/features/features.0/features.0.1/conv/conv.2/Conv": "features.0.1.conv.2",
        "/Add": "",
        "node.with.dots": "",
    }
    nodes = [make_node("Relu", [f"{k}"], [f"{k + 1}"], name=name) for k, name in enumerate(names)]
    ops = ops_of(read(nodes, [tensor("0", 3)], [f"{len(names)}"]))
    assert {name: ops[name].module for name in names} == names


def test_modules_come_from_what_pytorch_notes(read):
    node = make_node("Relu", ["x"], ["y"], name="node_relu")
    node.metadata_props.add(
        key="pkg.torch.onnx.name_scopes", value="['', 'layers.1', 'layers.1.act', 'relu']"
    )
    broken = make_node("Relu", ["y"], ["z"], name="a/b")
    broken.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="layers(")
    ops = ops_of(read([node, broken], [tensor("x", 3)], ["z"]))
    assert ops["node_relu"].module == "layers.1.act"
    assert ops["a/b"].module == "a"


def test_a_param_without_a_telling_name_is_in_its_first_readers_module(read):
    capture = read(
        [make_node("MatMul", ["x", "onnx::MatMul_7"], ["y"], name="/head/MatMul")],
        [tensor("x", 2, 3)],
        ["y"],
        [zeros("onnx::MatMul_7", 3, 2)],
    )
    assert ops_of(capture)["onnx::MatMul_7"].module == "head"


def test_the_graph_is_named_as_asked(tmp_path):
    model = proto([make_node("Relu", ["x"], ["y"])], [tensor("x", 1)], ["y"])
    onnx.save(model, tmp_path / "m.onnx")
    assert read_onnx(str(tmp_path / "m.onnx"), name="mine").graph.name == "mine"


# Open dimensions.

RELU = [make_node("Relu", ["x"], ["y"], name="relu")]


def test_dims_give_open_dimensions_their_size(read):
    inputs = [tensor("x", "batch", None, 3)]
    capture = read(RELU, inputs, [tensor("y", "batch", "n", 3)], dims={"batch": 8, "x.1": 2})
    assert ops_of(capture)["relu"].outputs[0].bytes == 4 * 8 * 2 * 3


def test_dims_win_over_shapes_that_the_file_has_for_others(read):
    capture = read(RELU, [tensor("x", "batch", 3)], [tensor("y", 1, 3)], dims={"batch": 8})
    assert ops_of(capture)["relu"].outputs[0].bytes == 4 * 8 * 3


def test_an_open_dimension_is_asked_for(refused):
    message = refused(RELU, [tensor("x", "batch", 3)], ["y"])
    assert message == (
        "Dimension 0 (`batch`) of input `x` is open. Give its size:"
        ' `dims={"batch": 1}`, or `--dim batch=1` on the command line.'
    )
    assert '`dims={"x.1": 1}`' in refused(RELU, [tensor("x", 2, None)], ["y"])
    assert '`dims={"x.0": 1}`' in refused(RELU, [tensor("x", -1)], ["y"])


def test_a_dimension_that_depends_on_values_can_be_given(read, refused):
    nodes = [
        make_node("NonZero", ["x"], ["at"], name="find"),
        make_node("Cast", ["at"], ["y"], name="cast", to=FLOAT),
    ]
    message = refused(nodes, [tensor("x", 2, 3)], ["y"])
    assert message.startswith("Dimension 1 (`at.1`) of `at`, made by node `find` (NonZero), is")
    named = [tensor("at", 2, "found", dtype=INT64)]
    assert '{"found": 1}' in refused(nodes, [tensor("x", 2, 3)], ["y"], known=named)
    for dims, known in (({"at.1": 4}, []), ({"found": 4}, named)):
        capture = read(nodes, [tensor("x", 2, 3)], ["y"], dims=dims, known=known)
        assert ops_of(capture)["find"].outputs == (Output(8 * 2 * 4, shape=(2, 4)),)


@pytest.mark.parametrize("size", [-1, 1.5, "8", True, None])
def test_a_size_must_be_a_whole_number(refused, size):
    message = refused(RELU, [tensor("x", "batch")], ["y"], dims={"batch": size})
    assert message.startswith(f"`dims` gives `batch` the size {size!r}; expected a whole number")


def test_dims_that_the_model_does_not_have_are_refused(refused, read):
    message = refused(RELU, [tensor("x", "batch")], ["y"], dims={"batch": 2, "seq": 3})
    assert message == (
        "`dims` names `seq`, which is no open dimension of the model. Its open dimensions: `batch`."
    )
    assert "dimensions: none." in refused(RELU, [tensor("x", 2)], ["y"], dims={"x.0": 2})
    read(RELU, [tensor("x", "batch")], [tensor("y", "other")], dims={"batch": 2, "other": 2})


def test_sizes_that_do_not_fit_the_model_are_refused(refused):
    message = refused(
        [make_node("Reshape", ["x", "shape"], ["y"], name="r")],
        [tensor("x", "batch", 4)],
        ["y"],
        [ints("shape", 2, 4)],
        dims={"batch": 3},
    )
    assert message.startswith("Node `r` (Reshape) turns float32[3, 4] into float32[2, 4], which")
    message = refused(
        [make_node("Add", ["x", "w"], ["y"], name="a")],
        [tensor("x", "batch")],
        ["y"],
        [zeros("w", 2)],
        dims={"batch": 3},
    )
    assert message.startswith("Node `a` (Add) cannot work on what it is given: ")
    assert message.endswith("(`x` is float32[3], `w` is float32[2]). Check `dims` and the model.")
    message = refused(RELU, [tensor("x", "batch")], ["y"], dims={"batch": 2**60})
    assert "is float32[1152921504606846976], which is more than 9.01e+15 bytes" in message


def split(sizes=None, outputs=2, **attributes):
    """Make the arguments of a model that splits six rows."""
    names = [f"y{i}" for i in range(outputs)]
    inputs = ["x"] if sizes is None else ["x", "sizes"]
    node = make_node("Split", inputs, names, name="s", **attributes)
    return [node], [tensor("x", 6, 4)], names, [] if sizes is None else [ints("sizes", *sizes)]


@pytest.mark.parametrize(
    "sizes", [(2, 3), (2, 2, 2), (6,), (-2, 8), (2**62, 2**62), (2**62, 6 - 2**62), (0, 0)]
)
def test_a_split_into_sizes_that_do_not_fit_is_refused(refused, sizes):
    words = f"Node `s` (Split) splits dimension 0 of float32[6, 4] into [{sizes[0]}"
    assert refused(*split(sizes)).startswith(words)
    assert refused(*split(split=sizes), opset=11).startswith(words)


@pytest.mark.parametrize("count", [0, 1, 3, -1, 2**31, 2**40, 2**62, -(2**63)])
def test_a_split_that_says_another_number_of_outputs_is_refused(refused, count):
    words = f"Node `s` (Split) has `num_outputs` {count}, and outputs 2; expected the same number."
    assert refused(*split(num_outputs=count)).startswith(words)


def test_a_split_that_leaves_less_than_nothing_is_refused(refused):
    message = refused(*split(outputs=5, num_outputs=5))
    assert "into [2, 2, 2, 2, -2]; expected 5 sizes for its 5 outputs, none below zero" in message


def test_a_split_may_leave_nothing_for_its_last_output(read):
    assert read(*split((6, 0))).graph.op_names == ("x", "s")
    assert read(*split(outputs=4, num_outputs=4)).graph.op_names == ("x", "s")


# What is refused.


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"There is no ONNX file at `.*none\.onnx`\. Check"):
        read_onnx(tmp_path / "none.onnx")
    with pytest.raises(InputError, match="but that is no file"):
        read_onnx(tmp_path)


@pytest.mark.parametrize("content", [b"", b"just some text, nothing more\n" * 9, b"\x1f\x8b" * 50])
def test_what_is_not_an_onnx_file_is_refused(tmp_path, content):
    path = tmp_path / "text.onnx"
    path.write_bytes(content)
    with pytest.raises(
        InputError, match=r"text\.onnx` is not an ONNX file, or is cut off"
    ) as caught:
        read_onnx(path)
    assert "\n" not in str(caught.value)


def test_a_cut_off_file_is_refused_wherever_it_is_cut(tmp_path):
    model = proto(
        [make_node("Gemm", ["x", "w"], ["y"], name="g")], [tensor("x", 2, 3)], ["y"],
        [zeros("w", 3, 4)],
    )  # fmt: skip
    data = model.SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(InputError, match=r"cut\.onnx` is not an ONNX file, or is cut off"):
            read_onnx(path)


def test_names_that_are_not_text_are_refused(tmp_path):
    path = tmp_path / "m.onnx"
    model = proto([make_node("Relu", ["x"], ["y"], name="NAME")], [tensor("x", 1)], ["y"])
    path.write_bytes(model.SerializeToString().replace(b"NAME", b"N\xffME"))
    with pytest.raises(InputError, match=r"m\.onnx` cannot be used: Something in it is not what"):
        read_onnx(path)


def test_a_tensor_that_nothing_makes_is_named(refused):
    message = refused([make_node("Relu", ["gone"], ["y"], name="r")], [tensor("x", 1)], ["y"])
    assert (
        message
        == "Node `r` (Relu) reads tensor `gone`, which nothing makes. Export the model again."
    )
    message = refused(RELU, [tensor("x", 1)], ["z"])
    assert message.startswith("The end of the model reads tensor `z`, which nothing makes.")


def test_a_tensor_that_is_made_twice_is_named(refused):
    twice = [*RELU, make_node("Abs", ["x"], ["y"], name="abs")]
    message = refused(twice, [tensor("x", 1)], ["y"])
    assert message.startswith(
        "Tensor `y` is made twice, by node `relu` (Relu) and by node `abs` (Abs). Give every"
    )
    message = refused(RELU, [tensor("x", 1)], ["y"], [zeros("y", 1)])
    assert message.startswith("Tensor `y` is made twice, by param `y` and by node `relu` (Relu).")
    message = refused(RELU, [tensor("x", 1)], ["y"], [zeros("w", 1), zeros("w", 1)])
    assert message.startswith("Initializer `w` has the name of another one (`w`).")


def test_a_cycle_is_named(refused):
    nodes = [
        make_node("Add", ["x", "c"], ["a"], name="first"),
        make_node("Relu", ["a"], ["b"], name="second"),
        make_node("Relu", ["b"], ["c"], name="third"),
    ]
    message = refused(nodes, [tensor("x", 1)], ["c"])
    assert message.startswith("Its nodes form a cycle: ")
    arrows = message.partition(": ")[2].partition(". ")[0].split(" -> ")
    assert arrows[0] == arrows[-1]
    assert set(arrows) == {"`first`", "`second`", "`third`"}
    assert "`first` -> `second` -> `third`" in " -> ".join(arrows * 2)


def test_nodes_in_another_order_are_sorted(read):
    nodes = [make_node("Abs", ["r"], ["y"], name="abs"), make_node("Relu", ["x"], ["r"], name="r")]
    assert list(ops_of(read(nodes, [tensor("x", 1)], ["y"]))) == ["x", "r", "abs"]


def test_what_onnx_refuses_is_refused_with_its_reason(refused):
    inputs = [tensor("x", 1)]
    for node, reason in (
        (make_node("Relu", ["x"], ["y"], name="r", alpha=1.0), "Unrecognized attribute: alpha"),
        (make_node("Relou", ["x"], ["y"], name="r"), "No Op registered for Relou"),
        (make_node("Relu", ["x"], ["y"], name="r", domain="my"), "No opset import for domain 'my'"),
        (make_node("Relu", ["x", "x"], ["y"], name="r"), "has input size 2 not in range"),
        (make_node("Relu", [""], ["y"], name="r"), "input 0 is marked single but has an empty"),
    ):
        message = refused([node], inputs, ["y"])
        assert message.startswith("onnx refuses it: ")
        assert reason in message
        assert "Name: r OpType: Rel" in message
    message = refused(
        [make_node("MatMul", ["x", "h"], ["y"], name="mm")],
        [tensor("x", 2, 2), tensor("h", 2, 2, dtype=HALF)],
        ["y"],
    )
    assert message.startswith("Node `mm` (MatMul) cannot work on what it is given: B has")


def test_an_op_with_no_shape_is_named(refused):
    nodes = [make_node("Mine", ["x"], ["y"], name="mine", domain="my")]
    message = refused(nodes, [tensor("x", 1)], ["y"], domains=["my"])
    assert message.startswith("Node `mine` (my.Mine) makes `y`, a tensor with no shape")
    assert "`value_info`" in message
    nodes = [make_node("SequenceConstruct", ["x"], ["y"], name="list")]
    message = refused(nodes, [tensor("x", 1)], ["y"])
    assert message.startswith("Node `list` (SequenceConstruct) makes `y`, a tensor with no shape")


def test_inputs_without_a_shape_are_named(refused):
    message = refused(RELU, [helper.make_tensor_value_info("x", FLOAT, None)], ["y"])
    assert message.startswith("Input `x` is not a tensor or has no shape.")
    sequence = helper.make_tensor_sequence_value_info("x", FLOAT, [2])
    assert refused(RELU, [sequence], ["y"]).startswith("Input `x` is not a tensor or has no")


def test_control_flow_is_refused(refused):
    branch = helper.make_graph([make_node("Relu", ["x"], ["b"])], "branch", [], [tensor("b", 1)])
    nodes = [make_node("If", ["c"], ["y"], name="choose", then_branch=branch, else_branch=branch)]
    inputs = [tensor("x", 1), tensor("c", dtype=TensorProto.BOOL)]
    message = refused(nodes, inputs, ["y"])
    assert message.startswith("Node `choose` (If) is control flow:")
    assert "Export the model without it" in message


def test_strings_are_refused(refused):
    nodes = [make_node("StringNormalizer", ["x"], ["y"], name="s")]
    message = refused(nodes, [tensor("x", 1, dtype=TensorProto.STRING)], ["y"])
    assert message.startswith("Input `x`, tensor `x`, holds strings,")
    nodes = [make_node("Constant", [], ["y"], name="c", value_string="text")]
    assert refused(nodes, [], ["y"]).startswith("Constant `c` holds strings,")
    nodes = [make_node("Cast", ["x"], ["y"], name="s", to=TensorProto.STRING)]
    message = refused(nodes, [tensor("x", 1)], ["y"])
    assert message.startswith("Node `s` (Cast), tensor `y`, holds strings,")


def test_broken_constants_and_weights_are_named(refused):
    nodes = [make_node("Constant", [], ["y"], name="c", value_int=1, value_float=1.0)]
    assert refused(nodes, [], ["y"]).startswith("Node `c` (Constant) does not have just one value")
    for size in (2, 12):
        weight = zeros("w", 3)
        weight.dims[0] = size
        message = refused([make_node("Relu", ["w"], ["y"])], [], ["y"], [weight])
        assert message.startswith("Initializer `w` is broken: ")
    weight.data_type = 77
    message = refused([make_node("Relu", ["w"], ["y"])], [], ["y"], [weight])
    assert message.startswith("Initializer `w` has data type number 77, which is not known.")


# Weights in files of their own.


def external(tmp_path, location="w.bin", offset=16, length=None, size=16 + 48):
    weight = TensorProto(name="w", data_type=FLOAT, dims=[3, 4])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        if value is not None:
            weight.external_data.add(key=key, value=str(value))
    if size is not None:
        (tmp_path / "w.bin").write_bytes(b"\0" * size)
    return [make_node("MatMul", ["x", "w"], ["y"], name="mm")], [tensor("x", 2, 3)], ["y"], [weight]


def test_external_weights_have_the_size_of_their_shape(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(proto(*external(tmp_path, length=48)).SerializeToString())
    assert ops_of(read_onnx(path))["w"].outputs[0].bytes == 48


def test_external_shapes_are_read(tmp_path):
    shape = TensorProto(name="shape", data_type=INT64, dims=[2])
    shape.data_location = TensorProto.EXTERNAL
    shape.external_data.add(key="location", value="shape.bin")
    (tmp_path / "shape.bin").write_bytes(np.array([6, -1]).tobytes())
    nodes = [make_node("Reshape", ["x", "shape"], ["r"]), make_node("Relu", ["r"], ["y"], name="y")]
    path = tmp_path / "m.onnx"
    path.write_bytes(proto(nodes, [tensor("x", 3, 4)], ["y"], [shape]).SerializeToString())
    assert list(ops_of(read_onnx(path))) == ["x", "y"]


def test_weights_in_a_pipe_are_refused_at_once(tmp_path, refused):
    os.mkfifo(tmp_path / "pipe")
    message = refused(*external(tmp_path, "pipe"))
    assert "pipe`, which cannot be read (it is no file). Put that file beside" in message


def test_a_missing_file_of_weights_is_named(tmp_path, refused):
    message = refused(*external(tmp_path, size=None))
    assert message == (
        f"Initializer `w` is stored in `{tmp_path}/w.bin`, which cannot be read (No such file or"
        " directory). Put that file beside the ONNX file."
    )


@pytest.mark.parametrize("wrong", [{"size": 63}, {"length": 47}, {"offset": 17}, {"offset": -1}])
def test_a_file_of_weights_that_is_too_short_is_named(tmp_path, refused, wrong):
    message = refused(*external(tmp_path, **wrong))
    assert message.startswith(f"Initializer `w` needs 48 bytes of `{tmp_path}/w.bin` from byte ")


@pytest.mark.parametrize("location", ["/etc/passwd", "../w.bin", "a/../../w.bin", ""])
def test_weights_outside_the_folder_are_refused(tmp_path, refused, location):
    message = refused(*external(tmp_path, location=location))
    assert message.startswith(f"Initializer `w` is stored in `{location}`; expected the name of a")


def test_an_offset_that_is_no_number_is_refused(tmp_path, refused):
    message = refused(*external(tmp_path, offset="here"))
    assert message == "Initializer `w` has an offset or length that is not a number."


# Without onnx.


def test_the_module_imports_without_onnx_and_reading_says_what_is_missing():
    script = (
        "import sys; sys.modules['onnx'] = None\n"
        "from placewright.frontends.onnx import read_onnx\n"
        "try: read_onnx('m.onnx')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (
        "onnx is not installed, and reading an ONNX file needs it. Install it with"
        " `pip install 'placewright[onnx]'`."
    )


# A model as exporters write it.


def attention():
    """List the nodes of self-attention over `h`, with the shapes computed as PyTorch does it."""
    nodes = [
        make_node("Shape", ["h"], ["shape"]),
        make_node("Gather", ["shape", "zero"], ["batch"], axis=0),
        make_node("Gather", ["shape", "one"], ["seq"], axis=0),
        make_node("Unsqueeze", ["batch", "axis0"], ["batch1"]),
        make_node("Unsqueeze", ["seq", "axis0"], ["seq1"]),
        make_node("Concat", ["batch1", "seq1", "heads", "rest"], ["split"], axis=0),
        make_node("Concat", ["batch1", "seq1", "rest"], ["joined"], axis=0),
    ]
    for part, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        nodes += [
            make_node("MatMul", ["h", f"attn.{part}.weight"], [part], name=f"/attn/{part}/MatMul"),
            make_node("Reshape", [part, "split"], [f"{part}4"], name=f"/attn/{part}/Reshape"),
            make_node("Transpose", [f"{part}4"], [f"{part}t"], name=f"/attn/{part}/Transpose",
                      perm=order),
        ]  # fmt: skip
    return [
        *nodes,
        make_node("MatMul", ["qt", "kt"], ["scores"], name="/attn/MatMul"),
        make_node("Mul", ["scores", "scale"], ["scaled"], name="/attn/Mul"),
        make_node("Softmax", ["scaled"], ["shares"], name="/attn/Softmax", axis=-1),
        make_node("MatMul", ["shares", "vt"], ["mixed"], name="/attn/MatMul_1"),
        make_node("Transpose", ["mixed"], ["back"], name="/attn/Transpose", perm=[0, 2, 1, 3]),
        make_node("Reshape", ["back", "joined"], ["flat"], name="/attn/Reshape"),
        make_node("MatMul", ["flat", "attn.o.weight"], ["o"], name="/attn/o/MatMul"),
    ]


def test_a_transformer_block_counts_what_the_formula_does(read):
    batch, seq, width, heads, hidden = 2, 6, 8, 2, 16
    capture = read(
        [
            make_node("LayerNormalization", ["x", "n1.weight", "n1.bias"], ["h"], name="/n1/LN"),
            *attention(),
            make_node("Add", ["x", "o"], ["x1"], name="/Add"),
            make_node("LayerNormalization", ["x1", "n2.weight", "n2.bias"], ["h2"], name="/n2/LN"),
            make_node("MatMul", ["h2", "up.weight"], ["u"], name="/up/MatMul"),
            make_node("Gelu", ["u"], ["g"], name="/Gelu"),
            make_node("MatMul", ["g", "down.weight"], ["d"], name="/down/MatMul"),
            make_node("Add", ["x1", "d"], ["y"], name="/Add_1"),
        ],
        [tensor("x", "batch", "seq", width)],
        [tensor("y", "batch", "seq", width)],
        [
            *(zeros(f"attn.{part}.weight", width, width) for part in "qkvo"),
            *(zeros(name, width) for name in ("n1.weight", "n1.bias", "n2.weight", "n2.bias")),
            zeros("up.weight", width, hidden),
            zeros("down.weight", hidden, width),
            numpy_helper.from_array(np.array(0), "zero"),
            numpy_helper.from_array(np.array(1), "one"),
            numpy_helper.from_array(np.float32(0.5), "scale"),
            ints("axis0", 0), ints("heads", heads), ints("rest", -1),
        ],
        dims={"batch": batch, "seq": seq},
    )  # fmt: skip
    graph, tokens, scores = capture.graph, batch * seq, batch * heads * seq * seq
    products = 2 * tokens * width * (4 * width + 2 * hidden) + 4 * scores * (width // heads)
    norms = 2 * (tokens * width + 2 * width)
    others = 2 * scores + 2 * 2 * tokens * width + tokens * hidden
    assert graph.op_flops.sum() == products + norms + others
    params = [op for op in ops_of(capture).values() if op.kind == "param"]
    assert len(params) == 10
    assert sum(op.outputs[0].bytes for op in params) == 4 * (
        4 * width**2 + 4 * width + 2 * width * hidden
    )
    assert graph.num_ops == 1 + 10 + 19
    assert "constant" not in graph.op_kinds
    assert capture.unpriced == ()
