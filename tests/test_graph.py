from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from placewright import files
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.graph_file import Op, Output

from . import worlds


def assert_same(left: Graph, right: Graph):
    for field in dataclasses.fields(Graph):
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, field.name


EXAMPLE = {
    "format": "placewright-graph",
    "version": 1,
    "name": "tiny",
    "ops": [
        {
            "name": "w",
            "kind": "param",
            "outputs": [{"bytes": 4096, "persistent": True}, {"bytes": 8192, "persistent": True}],
            "colocate": "w",
        },
        {"name": "x", "kind": "input", "outputs": [1024]},
        {
            "name": "mm",
            "kind": "aten.mm",
            "phase": "forward",
            "module": "fc",
            "dtype": "float32",
            "inputs": ["x", "w"],
            "outputs": [{"bytes": 1024, "keep": True}],
            "flops": 2.1e6,
            "bytes": 6144,
            "workspace": 0,
            "devices": ["cpu", "cuda"],
            "time_s": {"cpu": 3e-5, "NVIDIA H200": 6e-6},
        },
        {
            "name": "step",
            "kind": "update",
            "phase": "update",
            "inputs": ["mm"],
            "after": ["x"],
            "colocate": "w",
        },
    ],
}


def load(tmp_path, content) -> Graph:
    path = tmp_path / "m.graph.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return Graph.load(path)


def test_the_example_of_the_format_loads(tmp_path):
    graph = load(tmp_path, EXAMPLE)
    assert graph.op_names == ("w", "x", "mm", "step")
    assert graph.tensor_bytes.tolist() == [4096, 8192, 1024, 0, 1024]
    assert [graph.tensor_name(t) for t in range(5)] == ["w", "w:1", "x", "x:1", "mm"]
    assert graph.tensor_persistent.tolist() == [True, True, False, False, False]
    assert graph.tensor_keep.tolist() == [False, False, False, False, True]
    # (tensor, op): w and x are read by mm, x's control tensor and mm by step.
    assert list(zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True)) == [
        (0, 2),
        (2, 2),
        (3, 3),
        (4, 3),
    ]
    assert graph.op_colocation.tolist() == [0, -1, -1, 0]
    assert graph.op_device_kinds == (None, None, ("cpu", "cuda"), None)
    assert graph.op_time_s[2] == {"cpu": 3e-5, "NVIDIA H200": 6e-6}
    assert graph.op_is_resident.tolist() == [True, False, False, False]


@given(worlds.graphs())
@settings(max_examples=150, deadline=None)
def test_describing_and_building_gives_the_graph_back(graph):
    assert_same(Graph.build(graph.name, graph.describe()), graph)


def with_shapes(*outputs):
    """The example, with other outputs of `x`."""
    ops = [op | {"outputs": [*outputs]} if op["name"] == "x" else op for op in EXAMPLE["ops"]]
    return EXAMPLE | {"ops": ops}


@pytest.mark.parametrize("suffix", [".graph.json", ".graph.json.gz"])
@pytest.mark.parametrize("content", [EXAMPLE, with_shapes({"bytes": 1024, "shape": [64, 4]})])
def test_saving_and_loading_gives_the_graph_back(tmp_path, content, suffix):
    graph = load(tmp_path, content)
    path = tmp_path / f"again{suffix}"
    graph.save(path)
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == suffix.endswith(".gz")
    assert_same(Graph.load(path), graph)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_shapes_are_told_where_they_are_known(tmp_path):
    outputs = [{"bytes": 1024, "shape": [64, 4]}, {"bytes": 4, "shape": []}, 8]
    graph = load(tmp_path, with_shapes(*outputs))
    assert [graph.tensor_name(t) for t in range(2, 6)] == ["x", "x:1", "x:2", "x:3"]
    assert graph.tensor_shapes == (None, None, (64, 4), (), None, None, None)
    graph.save(tmp_path / "m.graph.json")
    told = json.loads((tmp_path / "m.graph.json").read_text())
    assert told["version"] == 1
    assert told["ops"][1]["outputs"] == outputs


def test_an_empty_tensor_with_a_shape_is_no_control_dependency():
    ops = [Op(name="a", outputs=[Output(0, shape=(0, 5))]), Op(name="b", inputs=["a"])]
    graph = Graph.build("g", ops)
    assert graph.describe()[1].inputs == ("a",)
    assert_same(Graph.build("g", graph.describe()), graph)


def test_the_order_of_the_file_is_kept_where_it_is_topological():
    ops = [Op(name="b", outputs=[1]), Op(name="a", outputs=[1]), Op(name="c", inputs=["a"])]
    assert Graph.build("g", ops).op_names == ("b", "a", "c")


def test_otherwise_the_lowest_position_that_is_ready_comes_first():
    ops = [
        Op(name="last", inputs=["mid"]),
        Op(name="mid", inputs=["late"], outputs=[1]),
        Op(name="early", outputs=[1]),
        Op(name="late", outputs=[1]),
        Op(name="also", after=["early"]),
    ]
    assert Graph.build("g", ops).op_names == ("early", "late", "mid", "last", "also")


def test_reading_a_tensor_twice_is_one_use():
    graph = Graph.build("g", [Op(name="x", outputs=[1]), Op(name="y", inputs=["x", "x", "x:0"])])
    assert graph.num_uses == 1


def test_names_may_hold_colons_that_are_no_output_numbers():
    graph = Graph.build("g", [Op(name="a:b", outputs=[1, 2]), Op(name="c", inputs=["a:b:1"])])
    assert graph.use_tensor.tolist() == [1]


def test_the_fingerprint_is_of_structure_and_sizes_and_not_of_times():
    def fingerprint(**changes):
        content = json.loads(json.dumps(EXAMPLE))
        content["ops"][2] |= changes
        return Graph.build(
            "g", [Op(**op | {"outputs": outputs(op)}) for op in content["ops"]]
        ).fingerprint

    def outputs(op):
        return [Output(**o) if isinstance(o, dict) else o for o in op.get("outputs", ())]

    same = fingerprint()
    assert fingerprint(flops=5, bytes=7, time_s=None, module="other", dtype="bfloat16") == same
    for change in (
        {"name": "mm", "inputs": ["x"]},
        {"outputs": [1024]},
        {"outputs": [{"bytes": 1000, "keep": True}]},
        {"workspace": 1},
        {"devices": ["cuda"]},
        {"kind": "aten.add"},
        {"colocate": "w"},
    ):
        assert fingerprint(**change) != same, change


def test_shapes_leave_the_fingerprint_as_it_was_before_there_were_any(tmp_path):
    known = load(tmp_path, with_shapes({"bytes": 1024, "shape": [64, 4]}))
    assert known.tensor_shapes[2] == (64, 4)
    assert known.fingerprint == load(tmp_path, EXAMPLE).fingerprint
    assert known.fingerprint == "7fb11678a5958da3e859a1f4062e9433e6f311c4b9b2b645abdf702b08b5ecbe"
    golden = Graph.load(Path(__file__).parent / "golden" / "step.graph.json.gz")
    assert golden.fingerprint == "9942e32136d2e6b48c7e1137855ce9d4995b2f193485775ead635478c807b12e"


def op(**fields):
    return {"name": "a", **fields}


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([op(), op(name="b", inputs=["a"])], "output 0 of `a`, which has 0 outputs"),
        (
            [op(inputs=["b"], outputs=[1]), op(name="b", inputs=["a"], outputs=[1])],
            "form a cycle: `a` -> `b` -> `a`",
        ),
        ([op(after=["a"])], "form a cycle: `a` -> `a`"),
        ([op(), op()], "Ops 0 and 1 are both named `a`"),
        ([op(inputs=["ghost"])], "refers to `ghost`, but there is no such op"),
        ([op(after=["ghost"])], "is to run after `ghost`, but there is no such op"),
        ([op(outputs=[1]), op(name="b", inputs=["a:1"])], "output 1 of `a`, which has 1 outputs"),
        ([op(name="a:1")], "Names may not end in a colon and digits"),
        ([op(name="")], "Op 0 has an empty name"),
        ([], "has no ops"),
        ([op(colour="red")], "unknown field `colour`"),
        ([op(outputs=[{"bytes": 1, "colour": 2}])], "unknown field `colour`"),
        ([op(outputs=[-1])], "Tensor `a` has -1 bytes"),
        ([op(outputs=[2**63])], "int64"),
        ([op(outputs=[2**52, 2**52])], "add up to 9.01e+15 bytes; expected less than"),
        ([op(outputs=[10**400])], "more than int64 can hold"),
        ([op(inputs=["a:" + "1" * 5000])], "there is no such op"),
        ([op(outputs=[1.5])], "expected `int | object`, got `float`"),
        (
            [op(outputs=[{"bytes": 8, "shape": [2, -1]}])],
            "Tensor `a` has shape [2, -1]; expected whole numbers that are not negative",
        ),
        ([op(outputs=[{"bytes": 8, "shape": [2**63]}])], "and fit int64"),
        (
            [op(outputs=[8, {"bytes": 8, "shape": [1] * 17}])],
            "Tensor `a:1` has 17 dimensions; expected at most 16.",
        ),
        ([op(outputs=[{"bytes": 8, "shape": [1.5]}])], "expected `int`, got `float`"),
        ([op(outputs=[{"bytes": 8, "shape": 2}])], "expected `array | null`, got `int`"),
        ([op(flops=-1)], "has -1 flops"),
        ([op(bytes=-2)], "has -2 bytes"),
        ([op(workspace=-3)], "has -3 bytes of workspace"),
        ([op(time_s={"cpu": -1})], "takes -1 s on `cpu`"),
        ([op(phase="sideways")], "invalid enum value 'sideways'"),
        ([op(kind=7)], "expected `str`, got `int`"),
        ([{"kind": "x"}], "missing required field `name`"),
        ([op(outputs=[{"bytes": 1, "alias_of": "a:1"}, 2])], "which comes after it"),
        (
            [op(outputs=[1]), op(name="b", outputs=[{"bytes": 1, "alias_of": "a"}])],
            "neither makes nor reads",
        ),
        (
            [
                op(
                    outputs=[
                        {"bytes": 1, "persistent": True},
                        {"bytes": 1, "alias_of": "a", "persistent": True},
                    ]
                )
            ],
            "and persistent",
        ),
        (
            [op(outputs=[1, {"bytes": 1, "persistent": True}])],
            "`a` is not persistent but another output",
        ),
        (
            [
                op(outputs=[1]),
                op(name="b", inputs=["a"], outputs=[{"bytes": 1, "persistent": True}]),
            ],
            "has persistent outputs and also inputs",
        ),
        (
            [op(flops=1, outputs=[{"bytes": 1, "persistent": True}])],
            "persistent outputs and also flops",
        ),
        (
            [op(time_s={"cpu": 1}, outputs=[{"bytes": 1, "persistent": True}])],
            "and also measured times",
        ),
    ],
)
def test_a_wrong_graph_is_told_what_is_wrong(tmp_path, ops, words):
    with pytest.raises(InputError) as caught:
        load(tmp_path, EXAMPLE | {"ops": ops})
    message = str(caught.value)
    assert words in message
    assert "m.graph.json" in message
    assert "\n" not in message


def test_a_long_cycle_is_named_in_part(tmp_path):
    ring = [op(name=f"op{i}", inputs=[f"op{(i - 1) % 50}"], outputs=[1]) for i in range(50)]
    with pytest.raises(InputError, match=r"`op0` -> `op1` -> .* -> `\(\d+ more\)` -> .* -> `op0`"):
        load(tmp_path, EXAMPLE | {"ops": ring})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(tmp_path, number):
    text = json.dumps(EXAMPLE).replace("2100000.0", number)
    with pytest.raises(InputError):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a graph file"),
        ("{", "is not a graph file"),
        ("[1, 2]", "is not a graph file"),
        ("{}", "has format '', version 0; expected 'placewright-graph', version 1"),
        ('{"format": "placewright-graph", "version": 2}', "version 2; expected"),
        ('{"format": "onnx", "version": 1}', "has format 'onnx'"),
        (json.dumps(EXAMPLE)[:-9], "is not a graph file"),
        (json.dumps(EXAMPLE | {"colour": 1}), "unknown field `colour`"),
        ("\x00\xff", "is not a graph file"),
    ],
)
def test_what_is_no_graph_file_is_refused(tmp_path, text, words):
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    assert words in str(caught.value)


def test_broken_gzip_data_is_refused(tmp_path):
    path = tmp_path / "m.graph.json.gz"
    packed = gzip.compress(json.dumps(EXAMPLE).encode())
    path.write_bytes(packed[:-20])
    with pytest.raises(InputError, match="is cut off inside its gzip data"):
        Graph.load(path)
    path.write_bytes(packed[:12] + b"\xff" * 20 + packed[32:])
    with pytest.raises(InputError, match="starts as gzip data but is broken"):
        Graph.load(path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        file.truncate(2 * 2**30)  # sparse: takes no room
    with pytest.raises(InputError, match=r"has 2\.0 GiB; a graph file may have 1 GiB"):
        Graph.load(path)


def test_a_gzip_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    path = tmp_path / "m.graph.json.gz"
    path.write_bytes(gzip.compress(b" " * 5000))
    with pytest.raises(InputError, match="unpacks to more than"):
        Graph.load(path)


def test_missing_files_and_directories_are_refused(tmp_path):
    with pytest.raises(InputError, match="There is no graph file at"):
        Graph.load(tmp_path / "none.graph.json")
    with pytest.raises(InputError, match="that is a directory"):
        Graph.load(tmp_path)


def array_graph(**changes):
    fields = {f.name: getattr(EXAMPLE_GRAPH, f.name) for f in dataclasses.fields(Graph)}
    return Graph(**fields | changes)


EXAMPLE_GRAPH = Graph.build(
    "g",
    [
        Op(name="a", outputs=[1]),
        Op(name="b", inputs=["a"], outputs=[2]),
        Op(name="c", inputs=["b"]),
    ],
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"op_kinds": ("x",)}, "Expected 3 entries in `op_kinds`"),
        ({"op_colocation": np.array([-1, 0, -1], np.int32)}, "names group 0; there are 0"),
        ({"op_names": ("a", "b", "a")}, "Two ops are named `a`"),
        ({"op_flops": np.array([0, np.nan, 0])}, "has nan flops"),
        ({"tensor_bytes": np.array([1])}, "Expected 2 entries in `tensor_bytes`"),
        ({"tensor_shapes": (None,)}, "Expected 2 entries in `tensor_shapes`"),
        ({"tensor_shapes": (None, (3, -2))}, "Tensor `b` has shape [3, -2]"),
        ({"tensor_shapes": (None, (1.5,))}, "Tensor `b` has shape [1.5]"),
        ({"tensor_op": np.array([1, 0], np.int32)}, "not sorted"),
        ({"tensor_op": np.array([0, 9], np.int32)}, "not among the 3 ops"),
        ({"use_op": np.array([1], np.int32)}, "expected as many"),
        ({"use_op": np.array([1, 1], np.int32)}, "before op 1 makes it"),
        ({"use_op": np.array([1, 9], np.int32)}, "outside 0 ... 2"),
        ({"use_tensor": np.array([0, 5], np.int32)}, "outside 0 ... 1"),
        (
            {"use_tensor": np.array([1, 0], np.int32), "use_op": np.array([2, 1], np.int32)},
            "not sorted",
        ),
        ({"tensor_base": np.array([-1, 7], np.int32)}, "outside 0 ... 1"),
    ],
)
def test_wrong_arrays_are_told_what_is_wrong(changes, words):
    with pytest.raises(InputError) as caught:
        array_graph(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outputs": [Output(1.9)]}, "expected `int`, got `float`"),
        ({"outputs": ["12"]}, "expected `int | object`, got `str`"),
        ({"workspace": 1.5}, "expected `int`, got `float`"),
        ({"devices": "cpu"}, "expected `array | null`, got `str`"),
        ({"inputs": "a"}, "expected `array`, got `str`"),
        ({"phase": "sideways"}, "invalid enum value 'sideways'"),
        ({"flops": float("nan")}, "expected `float`, got `null`"),
        ({"kind": object()}, "a object cannot be part of a graph"),
    ],
)
def test_ops_made_in_code_are_checked_like_those_of_a_file(fields, words):
    with pytest.raises(InputError) as caught:
        Graph.build("g", [Op(name="a", **fields)])
    assert words in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    outputs = [np.int64(4), Output(4, shape=(np.int64(2), 1))]
    graph = Graph.build("g", [Op(name="a", outputs=outputs, flops=np.float32(2))])
    assert graph.tensor_bytes.tolist() == [4, 4]
    assert repr(graph.tensor_shapes) == "(None, (2, 1))"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"format": "placewright-graph", "version": 1, "name": "\xff", "ops": []}', "utf-8"),
        (b'{"a":' * 200_000, "nested too deeply"),
    ],
)
def test_strange_bytes_and_deep_nesting_are_refused(tmp_path, content, words):
    path = tmp_path / "m.graph.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=words):
        Graph.load(path)


def test_a_graph_keeps_its_own_copy_of_arrays():
    sizes = np.array([1, 2])
    graph = array_graph(tensor_bytes=sizes, use_op=np.array([1, 2], np.int64))
    sizes[0] = 99
    assert graph.tensor_bytes.tolist() == [1, 2]
    assert graph.fingerprint == EXAMPLE_GRAPH.fingerprint


def test_arrays_cannot_be_written_to():
    with pytest.raises(ValueError, match="read-only"):
        EXAMPLE_GRAPH.tensor_bytes[0] = 5
