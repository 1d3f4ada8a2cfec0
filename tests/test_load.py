"""Names and paths become graphs; captures are kept on disk as long as they are true."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from placewright.errors import InputError
from placewright.graph import Graph
from placewright.load import load_model, load_problem, model_names, with_memory
from placewright.placers.experts import one_gpu
from placewright.problem import Problem
from placewright.simulator import simulate
from tests.test_placers import chain, cluster

torch = pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn
import helper

def build():
    return nn.Linear(8, helper.WIDTH), torch.zeros(2, 8)

def train():
    return {
        "module": nn.Linear(8, 4), "inputs": torch.zeros(2, 8), "train": True,
        "loss": lambda y: y.sum(), "optimizer": "adam", "name": "mine",
    }

def configured():
    import json, pathlib
    width = json.loads((pathlib.Path(__file__).parent / "config.json").read_text())
    return nn.Linear(8, width), torch.zeros(2, 8)

def raises():
    raise KeyError("no weights here")

def empty():
    return None

def unknown():
    return {"module": nn.Linear(8, 4), "inputs": torch.zeros(2, 8), "lr": 3}

def exits():
    raise SystemExit(3)

def needs(argument):
    return argument

constant = 3
"""


class Keyed(torch.nn.Module):
    def forward(self, x, *, scale, k):
        return x * scale + k


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACEWRIGHT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "helper.py").write_text("WIDTH = 4\n")
    (tmp_path / "config.json").write_text("4")
    yield tmp_path
    sys.modules.pop("helper", None)


def fresh(folder, function):
    """Load in a process of its own, as the command line does, and count the captured."""
    code = (
        "import sys\nfrom placewright.load import load_model\n"
        f"graph = load_model({str(folder / 'model.py')!r} + ':{function}')\n"
        "print(graph.num_ops, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    ops, loaded = done.stdout.split()
    return int(ops), loaded == "True"


def test_a_function_in_a_python_file_gives_its_model(folder):
    graph = load_model(f"{folder}/model.py:build")
    assert graph.name == "build"
    assert "addmm" in graph.op_names
    step = load_model(f"{folder}/model.py:train")
    assert step.name == "mine"
    assert "weight.update" in step.op_names


def test_a_captured_file_is_not_captured_again_until_something_it_reads_changes(folder):
    assert fresh(folder, "build") == (4, True)
    assert fresh(folder, "build") == (4, False)  # without even loading PyTorch
    (folder / "helper.py").write_text("WIDTH = 5\n")
    assert fresh(folder, "build") == (4, True)
    assert fresh(folder, "configured")[1]
    assert not fresh(folder, "configured")[1]
    (folder / "config.json").write_text("16")
    assert fresh(folder, "configured")[1]
    assert not fresh(folder, "configured")[1]
    (folder / "model.py").write_text(MODEL + "# changed")
    assert fresh(folder, "build")[1]


RESTLESS = """
import os, tempfile, threading, time
import torch
from torch import nn

def build():
    for path in ("/proc/stat", "/proc/self/stat", "/proc/sys/kernel/random/boot_id", "/dev/null"):
        if os.path.exists(path):
            open(path).read()
    here = os.path.dirname(__file__)
    with open(os.path.join(here, "log.txt"), "a") as log:  # written to, and never read
        log.write("built\\n")
    handle, name = tempfile.mkstemp(dir=here)
    os.close(handle)
    open(name).read()
    os.remove(name)
    os.close(os.open(os.path.join(here, "lock"), os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    os.mkfifo(os.path.join(here, f"fifo-{time.time_ns()}"))
    return nn.Linear(8, 4), torch.zeros(2, 8)
"""


def test_what_a_model_reads_of_the_system_is_not_what_it_is_made_from(folder):
    (folder / "model.py").write_text(RESTLESS)
    assert fresh(folder, "build") == (4, True)
    (listed,) = (folder / "cache").glob("*.sources.json")
    assert [*json.loads(listed.read_bytes())] == [str(folder / "model.py")]
    assert fresh(folder, "build") == (4, False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_no_obstacle(folder):
    tries = "    try:\n        open(__file__ + '.closed')\n    except OSError:\n        pass\n"
    (folder / "model.py.closed").touch(mode=0)
    (folder / "model.py").write_text(MODEL.replace("def build():\n", "def build():\n" + tries))
    assert fresh(folder, "build") == (4, True)
    assert fresh(folder, "build") == (4, False)


HUGGING_FACE = """
import torch, transformers

with open("/proc/stat") as file:  # as psutil does when it is imported
    file.read()

def build():
    sizes = dict(n_embd=32, n_layer=1, n_head=4, n_positions=32, vocab_size=100)
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    ids = torch.zeros(2, 12, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    return {"module": transformers.GPT2LMHeadModel(config), "inputs": inputs, "train": True}
"""


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="there is no /proc")
def test_a_model_of_hugging_face_comes_from_the_cache_the_second_time(folder):
    pytest.importorskip("transformers")
    (folder / "model.py").write_text(HUGGING_FACE)
    ops, is_captured = fresh(folder, "build")
    assert ops > 50
    assert is_captured
    assert fresh(folder, "build") == (ops, False)


def test_compiled_helpers_are_followed_to_their_sources(folder, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    for _ in range(2):  # the second time Python reads the compiled file only
        subprocess.run([sys.executable, "-c", "import helper"], cwd=folder, check=True)
    load_model(f"{folder}/model.py:build")
    (folder / "helper.py").write_text("WIDTH = 123456\n")
    assert load_model(f"{folder}/model.py:build").tensor_bytes.max() == 123456 * 8 * 4


def test_a_model_that_changed_within_one_process_is_built_anew(folder):
    assert load_model(f"{folder}/model.py:build").tensor_bytes.max() == 4 * 8 * 4
    (folder / "helper.py").write_text("WIDTH = 40\n")
    assert load_model(f"{folder}/model.py:build").tensor_bytes.max() == 40 * 8 * 4
    assert fresh(folder, "build") == (4, False)


def test_what_a_model_prints_does_not_reach_standard_output(folder, capsys):
    (folder / "loud.py").write_text(MODEL.replace("def build():", "def build():\n    print('HI')"))
    load_model(f"{folder}/loud.py:build")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "HI" in printed.err


def test_an_empty_variable_switches_the_cache_off(folder, monkeypatch):
    monkeypatch.setenv("PLACEWRIGHT_CACHE", "")
    assert fresh(folder, "build")[1]
    assert fresh(folder, "build")[1]
    assert not (folder / "cache").exists()


def test_a_damaged_or_unwritable_cache_is_no_obstacle(folder, monkeypatch):
    first = load_model("tiny-rnnlm")
    (kept,) = (folder / "cache").glob("*.graph.json.gz")
    kept.write_bytes(kept.read_bytes()[:50])
    assert load_model("tiny-rnnlm").fingerprint == first.fingerprint
    monkeypatch.setenv("PLACEWRIGHT_CACHE", str(folder / "model.py"))  # a file, not a folder
    assert load_model("tiny-rnnlm").fingerprint == first.fingerprint


def test_a_model_from_the_cache_is_the_same_to_the_last_array(folder):
    captured, loaded = load_model("tiny-moe"), load_model("tiny-moe")
    assert captured.fingerprint == loaded.fingerprint
    assert captured.op_flops.tolist() == loaded.op_flops.tolist()
    assert captured.op_modules == loaded.op_modules


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", r"`raises` of `.*model\.py` raised KeyError at .*, line 21: .*no weights here"),
        ("empty", "returned a NoneType; expected `.module, inputs.`"),
        ("unknown", "returned an unknown `lr`"),
        ("nothing", "has no function `nothing`. It has: build, train"),
        ("constant", "has no function `constant`"),
        ("exits", "`exits` of `.*` ends the program"),
        ("needs", r"`needs` of `[^`]*` raised TypeError: needs\(\) missing"),
    ],
)
def test_a_python_file_that_goes_wrong_is_told_where(folder, function, words):
    with pytest.raises(InputError, match=words):
        load_model(f"{folder}/model.py:{function}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import torch\n1 / 0\n", "raised ZeroDivisionError at .*line 2: division by zero"),
        ("def build(:\n", "raised SyntaxError at .*line 1"),
        ("import no_such_module_here\n", "raised ModuleNotFoundError at .*line 1"),
        ("import sys\nsys.exit(3)\n", "ends the program"),
    ],
)
def test_a_python_file_that_cannot_be_run_is_told_where(tmp_path, source, words):
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(InputError, match=words):
        load_model(f"{tmp_path}/bad.py:build")
    with pytest.raises(InputError, match="There is no Python file"):
        load_model(f"{tmp_path}/none.py:build")


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_gives_the_graph_of_its_module(folder):
    from placewright import zoo
    from placewright.frontends.torch import capture

    work = zoo.build("tiny-llama", device="cpu")
    module = work.module.eval()
    path = folder / "llama.pt2"
    torch.export.save(torch.export.export(module, work.inputs), path)
    graph = load_model(path)
    expected = capture(module, work.inputs).graph
    assert graph.name == "llama"
    assert graph.fingerprint == expected.fingerprint
    assert graph.op_modules == expected.op_modules
    keyed = folder / "keyed.pt2"
    exported = torch.export.export(Keyed(), (torch.ones(2),), {"scale": torch.ones(2), "k": 3})
    torch.export.save(exported, keyed)
    assert "mul" in load_model(keyed).op_names
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"llama\.pt2` is not an exported program"):
        load_model(path)
    with pytest.raises(InputError, match="There is no exported program"):
        load_model(folder / "none.pt2")


class Planted:
    """What makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def plant(path, part, content, config=None):
    """Rewrite an exported program with another part in it."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    root = next(iter(parts)).split("/")[0]
    parts[f"{root}/{part}"] = content
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (parts | {f"{root}/{k}": v for k, v in (config or {}).items()}).items():
            archive.writestr(name, data)


def saved(planted):
    buffer = io.BytesIO()
    torch.save(planted, buffer)
    return buffer.getvalue()


def listing(prefix, is_pickled):
    entry = {"path_name": f"{prefix}_0", "is_param": False, "use_pickle": is_pickled}
    return json.dumps({"config": {"weight": entry | {"tensor_meta": None}}}).encode()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "part", ["inputs", "weight", "tensor", "opaque_obj", "OPAQUE_obj", "custom_obj", "library"]
)
def test_an_exported_program_with_code_in_it_is_refused_and_runs_none(folder, tmp_path, part):
    path, mark = folder / "planted.pt2", tmp_path / "ran"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), path)
    planted = saved(Planted(mark))
    if part == "inputs":
        plant(path, "data/sample_inputs/model.pt", planted)
    elif part == "weight":
        config = {"data/weights/model_weights_config.json": listing("weight", True)}
        plant(path, "data/weights/weight_0", planted, config)
    elif part == "library":
        plant(path, "data/aotinductor/model/a.so", b"")
    else:
        config = {"data/constants/model_constants_config.json": listing(part.lower(), True)}
        content = planted if part == "tensor" else pickle.dumps(Planted(mark))
        plant(path, f"data/constants/{part}_0", content, config)
    before = dict(os.environ)
    with pytest.raises(InputError, match=r"planted\.pt2` holds what can run code"):
        load_model(path)
    assert not mark.exists()
    assert os.environ == before


class Resized(torch.nn.Module):
    """Has sizes that depend on its batch, and modules with names that are no Python names."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ModuleDict({"a-b": torch.nn.Linear(6, 6), "c d": torch.nn.ReLU()})

    def forward(self, x):
        y = self.parts["c d"](self.parts["a-b"](x["in put"]))
        return {"y": y.view(y.shape[0] * 2, -1), "n": y.shape[0] // 3}


def resized(path):
    """Save a program with open sizes; give the text of it."""
    sizes = {"x": {"in put": {0: torch.export.Dim("batch", min=2, max=64)}}}
    inputs = ({"in put": torch.ones(4, 6)},)
    torch.export.save(torch.export.export(Resized(), inputs, dynamic_shapes=sizes), path)
    with zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if "/models/" in name)
        return archive.read(name).decode()


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_may_have_open_sizes_and_any_names(folder):
    resized(folder / "resized.pt2")
    assert "view" not in load_model(folder / "resized.pt2").op_names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["size", "nested size", "size of text", "name", "older form"])
def test_an_exported_program_whose_names_or_sizes_are_calls_is_refused(folder, tmp_path, where):
    path, mark = folder / "planted.pt2", tmp_path / "ran"
    text, call = resized(path), f"__import__('os').mkdir('{mark}')"
    size = re.search(r"Symbol\('s\d+', positive=True, integer=True\)", text)[0]
    name = re.search(r'"user_input": \{"arg": \{"as_tensor": \{"name": "(\w+)"', text)[1]
    old, new = {
        "size": (size, call),
        "nested size": (size, f'S(\\"{call}\\")'),
        "size of text": (size, call),
        "older form": (size, call),
        "name": (f'"{name}"', f'"{name}={call}"'),
    }[where]
    assert old in text
    if where == "size of text":
        text = text.replace(f'"{name}"', '"metadata"')
    if where == "older form":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("serialized_exported_program.json", text.replace(old, new))
    else:
        plant(path, "models/model.json", text.replace(old, new).encode())
    with pytest.raises(InputError, match=r"planted\.pt2` holds what can run code"):
        load_model(path)
    assert not mark.exists()


def test_an_onnx_file_is_loaded_with_its_open_dimensions_given(folder):
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    node = helper.make_node("Relu", ["x"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y])), folder / "m.onnx")
    assert load_model(folder / "m.onnx", dims={"batch": 8}).tensor_bytes.max() == 128
    assert load_model(folder / "m.onnx", dims={"batch": 2}).tensor_bytes.max() == 32
    with pytest.raises(InputError, match="batch"):
        load_model(folder / "m.onnx")
    with pytest.raises(InputError, match="no open dimensions"):
        load_model("tiny-nmt", dims={"batch": 2})


def test_graph_files_load_by_their_path(tmp_path):
    path = tmp_path / "m.graph.json"
    load_model("tiny-rnnlm").save(path)
    assert isinstance(load_model(path), Graph)
    with pytest.raises(InputError, match=r"name a function in it: `m\.py:function`"):
        load_model("m.py")
    with pytest.raises(InputError, match="There is no model `nothing`"):
        load_model("nothing")
    assert "nmt-8" in model_names()


def test_a_share_of_memory_is_of_what_one_gpu_needs():
    graph = load_model("tiny-gpt2")
    loose = load_problem(graph, "k40x4")
    need = simulate(loose, one_gpu(loose)).peak_bytes[1]
    for tight in (
        load_problem(graph, "k40x4", "60%"),
        load_problem(graph, "k40x4-tight"),
        with_memory(loose, "60 %"),
    ):
        assert tight.cluster.memory_bytes[1:].tolist() == [int(0.6 * need)] * 4
        assert tight.cluster.memory_bytes[0] == loose.cluster.memory_bytes[0]
        assert tight.cluster.name.startswith("k40x4 with 60")
        assert not simulate(tight, one_gpu(tight)).is_feasible
    assert load_problem(graph, "k40x4", "8GiB").cluster.memory_bytes[2] == 8 * 2**30


def test_memory_that_cannot_be_read_is_refused():
    problem = Problem(
        load_model("tiny-gpt2"), load_problem(load_model("tiny-gpt2"), "laptop").cluster
    )
    with pytest.raises(InputError, match="already says how much memory"):
        load_problem(problem.graph, "k40x4-tight", "8GiB")
    for text, words in (
        ("x%", "no share of memory"),
        ("-5%", "no share"),
        ("much", "memory"),
        ("8", "without a unit"),
    ):
        with pytest.raises(InputError, match=words):
            with_memory(problem, text)
    only_cpus = Problem(chain(3), cluster(2, ["cpu", "cpu"]))
    with pytest.raises(InputError, match="has only CPUs, and `memory` is about other devices"):
        with_memory(only_cpus, "60%")


def test_the_cache_folder_follows_the_users_settings(monkeypatch, tmp_path):
    from placewright.frontends._cache import cache_folder

    monkeypatch.delenv("PLACEWRIGHT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "placewright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == Path(tmp_path) / ".cache" / "placewright"


def test_sources_are_listed_beside_the_graph(folder):
    load_model(f"{folder}/model.py:configured")
    (listed,) = (folder / "cache").glob("*.sources.json")
    names = {Path(name).name for name in json.loads(listed.read_text())}
    assert {"model.py", "helper.py", "config.json"} <= names
