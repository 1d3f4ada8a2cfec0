from __future__ import annotations

import json
import re
import struct
import sys
import time
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest
from typer.testing import CliRunner

from placewright.cli import app
from placewright.errors import InputError
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.load import load_model, load_problem
from placewright.placers.experts import BASELINES
from placewright.plan import Plan
from placewright.problem import Candidate
from placewright.report._figure import PALETTE, colour, device_colours
from placewright.report._grid import MAX_COLUMNS, MAX_LANES, find_crossings, make_grid
from placewright.report.drawing import draw_placement
from placewright.report.named import kind_of, read_placement
from placewright.simulator import simulate

NAMES, KINDS = ("cpu", "cuda:0", "cuda:1"), ("cpu", "cuda", "cuda")
WHITE, BLUE, ORANGE = device_colours(KINDS)


def layered(num_layers=3, ops_each=4):
    """A chain of layers with a weight each, forward and then backward."""
    ops, last = [], []
    for phase, order in (("forward", range(num_layers)), ("backward", range(num_layers)[::-1])):
        for k in order:
            module = {"module": f"layers.{k}", "phase": phase}
            if phase == "forward":
                weight = [Output(100, persistent=True)]
                ops.append(Op(name=f"w{k}", kind="param", outputs=weight, module=f"layers.{k}"))
            for j in range(ops_each):
                name = f"{phase}{k}.{j}"
                inputs = [*last, f"w{k}"]
                ops.append(Op(name=name, inputs=inputs, outputs=[8], flops=1e6, **module))
                last = [name]
    return Graph.build("layered", ops)


def halves(graph):
    """Layers 0 on cuda:0, the others on cuda:1."""
    return np.array([1 if module == "layers.0" else 2 for module in graph.op_modules])


def boxes(path):
    """The boxes of a picture by fill: (left, bottom, right, top), in points from the top."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for node in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}path"):
        fill = re.search(r"fill: (#\w+)", node.get("style", ""))
        for part in node.get("d", "").split("M")[1:] if fill else []:
            if not set(part) & {"C", "Q"}:
                numbers = [float(word) for word in re.findall(r"[\d.]+", part)]
                x, y = numbers[::2], numbers[1::2]
                found.setdefault(fill[1], []).append((min(x), min(y), max(x), max(y)))
    return found


def area(some):
    return sum((right - left) * (top - foot) for left, foot, right, top in some)


def words(path):
    return [node.text for node in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def picture(tmp_path):
    return tmp_path / "p.svg"


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_equal_inputs_give_equal_bytes(tmp_path, kind):
    graph = layered()
    for name in ("a", "b"):
        draw_placement(graph, NAMES, KINDS, halves(graph), tmp_path / f"{name}.{kind}", "title")
    draw_placement(graph, NAMES, KINDS, 3 - halves(graph), tmp_path / f"c.{kind}", "title")
    a, b, c = ((tmp_path / f"{name}.{kind}").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_picture_names_the_devices_with_ops_and_says_what_they_do(picture):
    graph = layered()
    draw_placement(graph, NAMES, KINDS, halves(graph), picture, "mine, simulated step 3 ms")
    found = words(picture)
    for word in (
        "mine, simulated step 3 ms",
        "cuda:0",
        "cuda:1",
        "layers.2",
        "weights",
        "backward",
    ):
        assert word in found
    assert "cpu" not in found
    fonts = re.findall(r"font-family: ([^;]*);|font: ([^;]*);", picture.read_text())
    assert all(
        "sans-serif" in "".join(font) for font in fonts
    )  # elsewhere the first may be missing
    assert fonts
    assert "Without ops: cpu." in found
    assert {"33.3%", "66.7%", "9", "18", "100 B", "200 B"} <= {*found}


def test_a_devices_colour_appears_if_and_only_if_it_has_ops(picture):
    graph = layered()
    for used in ((0,), (1,), (2,), (0, 1), (0, 1, 2)):
        placement = np.array([used[i % len(used)] for i in range(graph.num_ops)])
        draw_placement(graph, NAMES, KINDS, placement, picture)
        colours = {0: WHITE, 1: BLUE, 2: ORANGE}
        page = 1  # the page's own background is white too
        for device, fill in colours.items():
            count = len(boxes(picture).get(fill, [])) - page * (fill == WHITE)
            assert (count > 0) == (device in used), (used, fill)


def test_cpu_boxes_are_white_with_an_outline(picture):
    graph = layered()
    draw_placement(graph, NAMES, KINDS, [0] * graph.num_ops, picture)
    styles = re.findall(r'style="(fill: #ffffff; stroke: [^"]*)"', picture.read_text())
    assert styles
    assert all("#8a8a8a" in style for style in styles)
    assert BLUE not in boxes(picture)


def test_swapping_two_devices_swaps_their_colours(tmp_path):
    graph = layered()
    draw_placement(graph, NAMES, KINDS, halves(graph), tmp_path / "a.svg")
    draw_placement(graph, NAMES, KINDS, 3 - halves(graph), tmp_path / "b.svg")
    a, b = boxes(tmp_path / "a.svg"), boxes(tmp_path / "b.svg")
    in_lanes = {
        name: [box for box in found[fill] if box[3] - box[1] == pytest.approx(28)]  # of a lane
        for name, found, fill in (("a0", a, BLUE), ("a1", a, ORANGE), ("b0", b, BLUE))
    }
    assert area(in_lanes["a1"]) == pytest.approx(2 * area(in_lanes["a0"]), rel=0.02)
    assert sorted(in_lanes["a1"]) == sorted(in_lanes["b0"])


def test_a_cell_is_split_by_work_and_small_parts_are_still_seen():
    ops = [
        Op(name=f"op{k}", outputs=[1], flops=flops, module="m")
        for k, flops in enumerate([3e9, 1e9, 1])
    ]
    ops.append(Op(name="other", inputs=["op0"], flops=1e9, module="n"))
    slices = make_grid(Graph.build("g", ops), np.array([0, 1, 2, 0])).slices
    cell = (slices.lane == 0) & (slices.column == 0)
    heights = (slices.top - slices.bottom)[cell]
    np.testing.assert_allclose(heights, np.array([0.75, 0.25, 0.08]) / 1.08)
    assert slices.bottom[cell][0] == 0
    assert slices.top[cell][-1] == pytest.approx(1)


def test_ops_are_sorted_into_phases_layers_and_depths():
    grid = make_grid(layered(2, 2), np.zeros(10, dtype=np.int64))
    assert [panel.name for panel in grid.panels] == ["weights", "forward", "backward"]
    assert [panel.num_columns for panel in grid.panels] == [1, 4, 4]
    assert grid.lane_names == ("layers.0", "layers.1")
    where = dict(
        zip(layered(2, 2).op_names, zip(grid.op_lane, grid.op_column, strict=True), strict=True)
    )
    assert where["forward1.0"] == (1, 2)
    assert where["backward1.0"] == (1, 0)
    assert where["backward0.1"] == (0, 3)


def test_many_layers_are_merged_into_lanes_of_neighbours():
    grid = make_grid(layered(96, 1), np.zeros(96 * 3, dtype=np.int64))
    assert len(grid.lane_names) <= MAX_LANES
    assert grid.lane_names[0] == "layers.0–3"
    assert grid.lane_names[-1] == "layers.92–95"
    assert np.bincount(grid.op_lane).tolist() == [12] * 24
    assert sum(panel.num_columns for panel in grid.panels) <= MAX_COLUMNS


def test_a_graph_without_modules_has_ops_of_a_depth_above_each_other():
    ops = [Op(name="a", outputs=[4]), *(Op(name=n, inputs=["a"], outputs=[4]) for n in "bcd")]
    grid = make_grid(Graph.build("g", ops), np.zeros(4, dtype=np.int64))
    assert grid.op_column.tolist() == [0, 1, 1, 1]
    assert grid.op_lane.tolist() == [0, 0, 1, 2]
    assert not any(grid.lane_names)


def test_crossings_are_those_that_the_simulator_counts():
    problem = load_problem(load_model("tiny-nmt"), "k40x2")
    devices = np.random.default_rng(0).integers(0, 3, problem.num_ops)
    devices[problem.colocation_members] = devices[problem.colocation_leaders]
    moved = find_crossings(problem.graph, devices)
    assert moved.num_bytes.sum() == simulate(problem, devices).moved_bytes > 0
    assert (moved.source != moved.target).all()


def test_a_small_graph_shows_the_names_of_its_ops(picture):
    graph = Graph.build("g", [Op(name="first", outputs=[4]), Op(name="second", inputs=["first"])])
    draw_placement(graph, NAMES, KINDS, [1, 2], picture)
    assert {"first", "second"} <= {*words(picture)}


def test_names_are_drawn_as_they_are(picture):
    graph = Graph.build("$x_1$ <&>\x01", [Op(name="$\\frac$", outputs=[4], module="a<b>&$m$")])
    draw_placement(graph, ["cuda:$0$\x00"], ["cuda"], [0], picture)
    assert "cuda:$0$?" in words(picture)
    assert "$\\frac$" in words(picture)


def test_a_png_is_twice_as_large_as_the_svg_in_points(tmp_path):
    graph = layered()
    for kind in ("svg", "png"):
        draw_placement(graph, NAMES, KINDS, halves(graph), tmp_path / f"p.{kind}")
    data = (tmp_path / "p.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    root = ET.parse(tmp_path / "p.svg").getroot()
    points = [float(root.get(side).removesuffix("pt")) for side in ("width", "height")]
    assert points[0] == 720
    assert struct.unpack(">II", data[16:24]) == (2 * 720, round(2 * points[1]))


def test_no_two_of_many_devices_share_a_colour_and_the_first_eight_are_safe():
    assert len({colour(k) for k in range(64)}) == 64
    assert set(PALETTE[:7]) == {
        *("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"),
    }


@pytest.mark.slow
def test_the_picture_of_a_large_model_is_a_small_file(tmp_path):
    graph = load_model("nmt-4")
    problem = load_problem(graph, "k40x4")
    scattered = np.random.default_rng(0).integers(0, 5, graph.num_ops)
    for placement in (BASELINES["expert-strong"](problem), scattered):
        names, kinds = problem.cluster.device_names, problem.cluster.device_kinds
        draw_placement(graph, names, kinds, placement, tmp_path / "p.svg")
        assert (tmp_path / "p.svg").stat().st_size < 500_000


@pytest.mark.slow
def test_a_hundred_thousand_ops_are_drawn_in_seconds(tmp_path):
    ops = [
        Op(
            name=f"o{i}",
            inputs=[f"o{i - 1}"] if i % 100 else [],
            outputs=[8],
            module=f"m.{i // 500}",
        )
        for i in range(100_000)
    ]
    graph = Graph.build("large", ops)
    began = time.perf_counter()
    draw_placement(graph, NAMES, KINDS, np.arange(100_000) % 3, tmp_path / "p.svg")
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize(
    ("placement", "name", "message"),
    [
        ([0], "p.svg", "expected one device for each of the 27 ops"),
        ([3] * 27, "p.svg", r"outside 0 \.\.\. 2"),
        ([-1] * 27, "p.svg", "outside"),
        ([0] * 27, "p.pdf", "ends in `.svg` or `.png`"),
        ([0] * 27, "no/such/p.svg", "cannot be written"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, placement, name, message):
    with pytest.raises(InputError, match=message):
        draw_placement(layered(), NAMES, KINDS, placement, tmp_path / name)


def test_without_matplotlib_the_extra_is_named(picture, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r'pip install "placewright\[pictures\]"'):
        draw_placement(layered(), NAMES, KINDS, [0] * 27, picture)


def test_a_users_settings_change_nothing_and_are_left_alone(tmp_path):
    graph = layered()
    draw_placement(graph, NAMES, KINDS, halves(graph), tmp_path / "a.svg")
    with matplotlib.rc_context({"font.size": 30, "text.usetex": True, "svg.fonttype": "path"}):
        draw_placement(graph, NAMES, KINDS, halves(graph), tmp_path / "b.svg")
        assert matplotlib.rcParams["font.size"] == 30
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_kinds_are_read_off_names():
    assert {kind_of(name) for name in ("cpu", "cpu:0", "host0/cpu", "a/b/cpu:12")} == {"cpu"}
    assert {kind_of(name) for name in ("cuda:0", "cpux", "cpu0/cuda:1", "tpu:0")} == {"accelerator"}


def test_devices_that_no_cluster_orders_are_ordered_by_name_cpus_first():
    graph = layered()
    some = ["cuda:10", "cuda:2", "cpu"]
    named = read_placement(graph, {n: some[i % 3] for i, n in enumerate(graph.op_names)})
    assert named.device_names == ("cpu", "cuda:2", "cuda:10")
    assert named.placement[:3].tolist() == [2, 1, 0]
    known = read_placement(graph, dict.fromkeys(graph.op_names, "cuda:2"), ["cuda:2", "cpu"])
    assert known.device_names == ("cuda:2", "cpu")
    with pytest.raises(InputError, match=r"op `w0` is only in the graph"):
        read_placement(graph, {n: "cpu" for n in graph.op_names if n != "w0"})


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def plan(tmp_path):
    problem = load_problem(load_model("tiny-gpt2"), "k40x2")
    timeline = simulate(problem, Candidate(BASELINES["expert-paper"](problem)))
    made = Plan.of(timeline, "by hand", lower_bound_s=0.0, placer="given")
    (tmp_path / "run").mkdir()
    made.save(tmp_path / "run/plan.json")
    return tmp_path / "run/plan.json"


def test_draw_writes_both_pictures_beside_the_plan(plan):
    result = run("draw", plan.parent)
    assert result.exit_code == 0, result.stderr
    assert f"The picture is in {plan.parent}/placement.svg" in result.stdout
    found = words(plan.parent / "placement.svg")
    assert any(re.match(r"by hand, simulated step [\d.]+ ", word) for word in found)
    assert {"cuda:0", "cuda:1"} <= {*found}
    assert (plan.parent / "placement.png").read_bytes()[:4] == b"\x89PNG"


def test_draw_takes_a_model_and_a_placement(plan, tmp_path):
    graph = load_model("tiny-gpt2")
    bare = tmp_path / "placement.json"
    bare.write_text(json.dumps(dict.fromkeys(graph.op_names, "host0/cpu")))
    out = tmp_path / "q.svg"
    result = run("draw", bare, "--model", "tiny-gpt2", "-o", out, "--json")
    assert json.loads(result.stdout) == {"paths": [str(out)]}
    assert "host0/cpu" in words(out)
    assert not set(PALETTE) & set(boxes(out))


def test_draw_says_in_a_sentence_what_is_wrong(plan, tmp_path):
    content = json.loads(plan.read_text())
    content["graph"]["name"] = "mine"
    (tmp_path / "mine.json").write_text(json.dumps(content))
    graph = load_model("tiny-gpt2")
    (tmp_path / "bare.json").write_text(json.dumps(dict.fromkeys(graph.op_names[1:], "cpu")))
    for arguments, message in (
        ([plan, "--model", "tiny-nmt"], "was made for graph `tiny-gpt2` (fingerprint"),
        ([plan, "--model", "nothing"], "There is no model `nothing`"),
        ([tmp_path / "mine.json"], "is for graph `mine`, which is no model that ships"),
        ([tmp_path / "bare.json"], "which names no model; add `--model`"),
        ([tmp_path / "bare.json", "--model", "tiny-gpt2"], "is only in the graph"),
        ([plan, "-o", "x.pdf"], "`x.pdf` is no name for a picture"),
        ([plan, "-o", tmp_path / "no/such/x.svg"], "cannot be written"),
        ([tmp_path / "none.json"], "There is no plan or placement file"),
        ([tmp_path], "There is no plan or placement file"),
    ):
        result = run("draw", *arguments)
        assert result.exit_code == 2, arguments
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
