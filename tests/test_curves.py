from __future__ import annotations

import json
import re
import struct
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from typer.testing import CliRunner

from placewright.cli import app
from placewright.errors import InputError
from placewright.report._figure import colour
from placewright.report.curves import Point, RunHistory, _steps, draw_curves, load_run


def history(label="annealing", times=(5.0, 3.0, 2.0), over=(0, 0, 0), means=None):
    means = means or [None] * len(times)
    points = [
        Point(0.5 * (k + 1), 10 * (k + 1), time, over[k], label, means[k])
        for k, time in enumerate(times)
    ]
    return RunHistory(label, tuple(points))


def texts(path):
    return [node.text for node in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")]


def lines(path, fill):
    """The styles of the lines of one colour, without those in the legend."""
    found = []
    for group in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}g"):
        if group.get("id", "").startswith("axes_"):
            for node in group.iter("{http://www.w3.org/2000/svg}path"):
                style = node.get("style", "")
                if f"stroke: {fill}" in style and "fill: none" in style:
                    found.append(style)
    return found


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_equal_runs_give_equal_bytes(tmp_path, kind):
    for name, last in (("a", 2.0), ("b", 2.0), ("c", 1.0)):
        runs = [history(times=(5.0, 3.0, last)), history("auto")]
        draw_curves(runs, tmp_path / f"{name}.{kind}", references={"expert": 4.0})
    a, b, c = ((tmp_path / f"{name}.{kind}").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_title_says_whether_times_were_measured(tmp_path):
    measured = RunHistory("mine", (Point(1.0, 1, 0.5, measured=True),))
    expected = RunHistory("mine", (Point(1.0, 1, 0.5, expected=True),))
    for runs, words in (
        ([history()], "Best simulated step time so far"),
        ([measured], "Best measured step time so far"),
        ([expected], "Best expected step time so far"),
        ([history(), measured], "Best measured or simulated step time so far"),
    ):
        draw_curves(runs, tmp_path / "c.svg")
        assert words in texts(tmp_path / "c.svg")


def test_a_picture_names_runs_references_and_axes(tmp_path):
    path = tmp_path / "c.svg"
    runs = [history(), history(), history("$mine_1$ <&>")]
    draw_curves(runs, path, references={"expert-strong": 4.0, "expert-paper": 4.01}, title="T")
    found = texts(path)
    for word in ("T", "annealing (2 runs)", "$mine_1$ <&>", "expert-strong", "expert-paper"):
        assert word in found
    assert {"samples", "seconds"} <= {*found}
    height = {
        node.text: float(
            re.search(r"translate\([\d.-]+ ([\d.-]+)\)|y=\"([\d.]+)", ET.tostring(node, "unicode"))[
                1
            ]
            or node.get("y")
        )
        for node in ET.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text")
        if (node.text or "").startswith("expert")
    }
    assert abs(height["expert-strong"] - height["expert-paper"]) > 8


def test_the_best_is_dashed_until_it_fits(tmp_path):
    path = tmp_path / "c.svg"
    draw_curves([history(over=(9, 9, 0))], path)
    assert sum("dasharray" in style for style in lines(path, colour(0))) == 2
    draw_curves([history()], path)
    assert sum("dasharray" in style for style in lines(path, colour(0))) == 0


def test_means_are_thin_lines_of_runs_that_have_them(tmp_path):
    path = tmp_path / "c.svg"
    draw_curves([history(means=[6.0, None, 4.0]), history("auto")], path)
    for number, count in ((0, 2), (1, 0)):
        thin = [style for style in lines(path, colour(number)) if "stroke-width: 0.8" in style]
        assert len(thin) == count


def test_seeds_are_carried_on_to_where_others_improve():
    one = Point(1.0, 10, 5.0), Point(3.0, 30, 3.0)
    other = Point(2.0, 20, 4.0, 7), Point(4.0, 40, 1.0)
    steps = _steps([one, other], "samples", "objective_s")
    assert steps.x.tolist() == [10, 20, 30, 40]
    np.testing.assert_array_equal(steps.values, [[5, 5, 3, 3], [np.nan, 4, 4, 1]])
    assert steps.fits.tolist() == [True, False, False, True]


def test_several_seeds_have_a_band_and_one_has_none(tmp_path):
    for name, runs in (("one", [history()]), ("two", [history(), history(times=(6.0, 4.0, 3.0))])):
        draw_curves(runs, tmp_path / f"{name}.svg")
    assert "FillBetween" in (tmp_path / "two.svg").read_text()
    assert "FillBetween" not in (tmp_path / "one.svg").read_text()


def test_times_far_apart_get_a_logarithmic_axis(tmp_path):
    path = tmp_path / "c.svg"
    draw_curves([history(times=(100.0, 1.0, 0.01))], path)
    assert {"10 ms", "100 ms", "1 s", "10 s", "100 s"} <= {*texts(path)}
    draw_curves([history(times=(0.003, 0.0025, 0.002))], path)
    assert {"2 ms", "3 ms"} <= {*texts(path)}


def test_one_point_and_a_time_of_zero_can_be_drawn(tmp_path):
    draw_curves([RunHistory("a", (Point(0.0, 1, 0.0),))], tmp_path / "c.png")
    data = (tmp_path / "c.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", data[16:20]) == (1440,)


def test_a_run_is_called_as_its_placer_unless_told_otherwise(tmp_path):
    entry = {"wall_s": 1.0, "samples": 5, "objective_s": 2.0, "overflow_bytes": 0}
    lines = [entry | {"placer": "auto: one device"}, entry | {"placer": "auto: annealing"}]
    lines.append(lines[-1] | {"mean_s": 2.5, "feasible": 0.5})
    (tmp_path / "history.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    loaded = load_run(tmp_path)
    assert loaded.label == "auto"
    assert [point.mean_s for point in loaded.points] == [None, None, 2.5]
    assert load_run(tmp_path / "history.jsonl", "mine").label == "mine"


def test_what_cannot_be_read_or_drawn_is_refused(tmp_path):
    with pytest.raises(InputError, match="There is no history file"):
        load_run(tmp_path)
    file = tmp_path / "history.jsonl"
    point = '{"wall_s": 1, "samples": 1, "objective_s": 1}'
    huge = [point.replace("1", figure) for figure in ("1e308", "-1", "9" * 30)]
    contents = [("", "is empty"), *((text, "is not a history file") for text in ("{}", *huge))]
    for content, message in (*contents, ("{", "is not a")):
        file.write_text(content)
        with pytest.raises(InputError, match=message):
            load_run(tmp_path)
    with pytest.raises(InputError, match="nothing to draw"):
        draw_curves([], tmp_path / "c.svg")
    with pytest.raises(InputError, match=r"`.svg` or `.png`"):
        draw_curves([history()], tmp_path / "c.jpg")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folders(tmp_path):
    made = []
    for seed in range(2):
        folder = tmp_path / f"seed{seed}"
        options = ["--placer", "annealing", "--budget", "60 samples", "--seed", seed, "-o", folder]
        assert run("place", "tiny-nmt", "--cluster", "k40x2", *options).exit_code == 0
        made.append(folder)
    return made


def test_curves_draws_the_runs_of_place(folders, tmp_path):
    out = tmp_path / "c.svg"
    result = run("curves", *folders, f"mine={folders[0]}", "--reference", "expert=2ms", "-o", out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"The picture is in {out}.\n"
    assert {"annealing (2 runs)", "mine", "expert"} <= {*texts(out)}


def test_curves_writes_both_kinds_by_default(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("curves", folders[0], "--json")
    assert json.loads(result.stdout) == {"paths": ["curves.svg", "curves.png"]}
    assert (tmp_path / "curves.svg").exists()
    assert (tmp_path / "curves.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "There is no history file at `none`"),
        (["x=none"], "There is no history file at `none`"),
        (["none", "-o", "c.pdf"], "`c.pdf` is no name for a picture"),
        (["none", "--reference", "expert"], "expected `--reference NAME=VALUE`"),
        (["none", "--reference", "expert=soon"], "`--reference expert` is 'soon'"),
    ],
)
def test_curves_says_in_a_sentence_what_is_wrong(arguments, message):
    result = run("curves", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
