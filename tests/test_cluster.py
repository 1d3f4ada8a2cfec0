from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from placewright.cluster import Cluster
from placewright.cluster_file import decode
from placewright.errors import InputError
from placewright.load import load_cluster

EXAMPLE = """
name = "two-gpus"
[[device]]
name = "cpu"
kind = "cpu"
memory = "64GiB"
flops = { float32 = 5e11 }
memory_bandwidth = "60GB/s"
launch = "1us"
[[device]]
names = ["cuda:0", "cuda:1"]
kind = "cuda"
model = "Tesla K40"
memory = "12GiB"
flops = { float32 = 4.29e12 }
memory_bandwidth = "288GB/s"
launch = "8us"
efficiency = { matmul = 0.7, convolution = 0.6, elementwise = 0.8 }
[link]
latency = "15us"
bandwidth = "6GB/s"
[[pair]]
between = ["cuda:0", "cuda:1"]
bandwidth = "10GB/s"
channels = ["pcie"]
"""


def load(tmp_path, text) -> Cluster:
    path = tmp_path / "box.toml"
    path.write_text(text)
    return Cluster.load(path)


def test_the_example_of_the_format_loads(tmp_path):
    cluster = load(tmp_path, EXAMPLE)
    assert cluster.device_names == ("cpu", "cuda:0", "cuda:1")
    assert cluster.device_models == ("", "Tesla K40", "Tesla K40")
    assert cluster.memory_bytes.tolist() == [64 * 2**30, 12 * 2**30, 12 * 2**30]
    assert cluster.launch_s.tolist() == [1e-6, 8e-6, 8e-6]
    assert cluster.efficiency[0] == {"other": 1.0}
    # The pair gives a bandwidth and channels; its latency is still the link's.
    assert cluster.bytes_per_s.tolist() == [[0, 6e9, 6e9], [6e9, 0, 1e10], [6e9, 1e10, 0]]
    assert cluster.latency_s[1, 2] == cluster.latency_s[0, 1] == pytest.approx(15e-6)


def channels(cluster, source, target):
    d = cluster.num_devices
    at = cluster.device_index(source) * d + cluster.device_index(target)
    return [cluster.channel_names[c] for c in cluster.link_channels[at]]


def test_a_transfer_occupies_both_engines_unless_channels_are_named(tmp_path):
    cluster = load(tmp_path, EXAMPLE)
    assert channels(cluster, "cpu", "cuda:1") == ["cpu out", "cuda:1 in"]
    assert channels(cluster, "cuda:0", "cuda:1") == ["pcie"]
    assert channels(cluster, "cuda:1", "cuda:0") == ["pcie"]


def test_later_pairs_win_and_globs_match_many(tmp_path):
    cluster = load(
        tmp_path,
        EXAMPLE
        + """
[[pair]]
from = "cuda:*"
to = "cpu"
bandwidth = "1GB/s"
channels = ["cuda:0 out", "bus"]
[[pair]]
from = "cuda:1"
to = "cpu"
latency = "1ms"
""",
    )
    assert cluster.bytes_per_s[1, 0] == cluster.bytes_per_s[2, 0] == 1e9
    assert cluster.bytes_per_s[0, 1] == 6e9
    assert cluster.latency_s[2, 0] == pytest.approx(1e-3)
    assert cluster.latency_s[1, 0] == pytest.approx(15e-6)
    assert channels(cluster, "cuda:1", "cpu") == ["cuda:0 out", "bus"]


def test_a_name_that_looks_like_a_glob_stands_for_itself(tmp_path):
    text = EXAMPLE.replace("cuda:0", "gpu[0]").replace("cuda:1", "gpu[1]")
    assert load(tmp_path, text).bytes_per_s[1, 2] == 1e10


def test_one_device_needs_no_link(tmp_path):
    text = EXAMPLE.split("[[device]]")
    assert load(tmp_path, "[[device]]".join(text[:2])).num_devices == 1


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (EXAMPLE, 'name = "none"', "Cluster `none` has no devices"),
        (
            'bandwidth = "6GB/s"',
            'bandwidth = "0GB/s"',
            "carries 0 bytes/s; expected a positive number",
        ),
        ('bandwidth = "6GB/s"', "", "carries 0 bytes/s; expected a positive number"),
        (
            'bandwidth = "6GB/s"',
            "bandwidth = nan",
            "is nan; expected a number that is not negative",
        ),
        (
            'latency = "15us"',
            'latency = "-15us"',
            "'-15us'; expected a number that is not negative",
        ),
        ('latency = "15us"', 'latency = "15 parsecs"', '"15us" (units: s, ms, us'),
        ('memory = "12GiB"', 'memory = "12Gib"', "`memory` of `cuda:0` is '12Gib'"),
        ('memory = "12GiB"', "memory = 0", "has 0 bytes of memory; expected a positive number"),
        ('memory = "12GiB"', "memory = inf", "`memory` of `cuda:0` is inf"),
        ("flops = { float32 = 4.29e12 }", "flops = { bfloat16 = 1e12 }", "no rate for float32"),
        ("flops = { float32 = 4.29e12 }", "flops = { float32 = 0 }", "does 0 float32 flops/s"),
        ("matmul = 0.7", "matmul = 1.7", "efficiency 1.7 for matmul"),
        (
            'names = ["cuda:0", "cuda:1"]',
            'names = ["cuda:0", "cuda:1", "cuda:1"]',
            "Two devices are named `cuda:1`",
        ),
        ('names = ["cuda:0", "cuda:1"]', "", "needs either `name`, or `names`"),
        (
            'names = ["cuda:0", "cuda:1"]',
            'name = "a"\nnames = ["b"]',
            "needs either `name`, or `names`",
        ),
        ('between = ["cuda:0", "cuda:1"]', 'between = ["cuda:0"]', "names 1 devices; expected two"),
        (
            'between = ["cuda:0", "cuda:1"]',
            'between = ["cuda:0", "tpu:*"]',
            "`tpu:*` in a `[[pair]]` matches no",
        ),
        (
            'between = ["cuda:0", "cuda:1"]',
            'from = "cuda:0"',
            "either `between`, or both `from` and `to`",
        ),
        ('channels = ["pcie"]', "channels = []", "has no channel"),
        ('channels = ["pcie"]', 'channels = [""]', "has an empty name"),
        ('name = "cpu"', 'name = ""', "has an empty name"),
        ('between = ["cuda:0", "cuda:1"]', 'between = ["cpu", "cpu"]', "it names one device"),
        (
            "matmul = 0.7",
            "matmull = 0.7",
            "efficiency for `matmull`; the families of ops",
        ),
        ('memory = "12GiB"', "memory = 1e19", "expected less than 4 EiB"),
        ('memory = "12GiB"', "memory = " + "9" * 5000, "is not TOML"),
        ('latency = "15us"', "latency = 1e200", "has a latency of 1e+200 s"),
        ('name = "two-gpus"', "name = " + "[" * 50_000, "nested too deeply"),
        ('kind = "cpu"', 'kind = "cpu"\ncolour = "red"', "unknown field `colour`"),
        ('name = "two-gpus"', "", "missing required field `name`"),
        ('name = "two-gpus"', "name = ", "is not TOML"),
    ],
)
def test_a_wrong_cluster_is_told_what_is_wrong(tmp_path, old, new, words):
    assert old in EXAMPLE
    with pytest.raises(InputError) as caught:
        load(tmp_path, EXAMPLE.replace(old, new))
    assert words in str(caught.value)
    assert "box.toml" in str(caught.value)


@pytest.mark.parametrize("part", ["a", '"a"', "'a'", r'"\""', '"a.b"'])
@pytest.mark.parametrize("line", ["{} = 1", "[{}]", "[[{}]]", "x = {{ {} = 1 }}", "x={{{}=1}}"])
@pytest.mark.parametrize("dot", [".", " . "])
def test_a_dotted_key_of_very_many_parts_is_refused_at_once(tmp_path, part, line, dot):
    began_s = time.perf_counter()
    with pytest.raises(InputError, match=r"box\.toml` has a dotted key of more than 100 parts"):
        load(tmp_path, line.format(dot.join([part] * 50_000)))
    assert time.perf_counter() - began_s < 5


def test_long_texts_in_a_cluster_file_take_little_time():
    texts = ["a" * 100_000, "a.b " * 50_000, "'" * 100_000, r"\"" * 100_000, "a.b, " * 50_000]
    began_s = time.perf_counter()
    for text in texts:
        assert decode(f'name = "{text}"'.encode(), "It").name == text.replace("\\", "")
    assert time.perf_counter() - began_s < 5


def test_a_cluster_file_of_absurd_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("placewright.cluster_file.MAX_BYTES", 2**8)
    with pytest.raises(InputError, match=r"box\.toml` has 0\.0 MiB; a cluster file may have"):
        load(tmp_path, EXAMPLE)


def same(left, right):
    pairs = [(value, vars(right)[name]) for name, value in vars(left).items()]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", Cluster.presets())
def test_presets_are_saved_and_loaded_without_loss(name, tmp_path):
    cluster = Cluster.preset(name)
    cluster.save(tmp_path / "box.toml")
    assert same(Cluster.load(tmp_path / "box.toml"), cluster)


def test_every_kind_of_entry_is_saved_and_loaded_without_loss(tmp_path):
    text = EXAMPLE.replace("matmul = 0.7", "matmul = [[1e6, 0.1], [123456.789e3, 0.6]]")
    text = text.replace('name = "two-gpus"', r'name = "a \"b\" \\ \u007f é"')
    text = text.replace("[[device]]", 'source = "two\\nlines"\n[[device]]', 1)
    text = text.replace('"6GB/s"', "6123456789.123").replace('"15us"', "1.23456789e-05")
    for more in (
        "",
        '[[pair]]\nfrom = "cuda:1"\nto = "cpu"\nlatency = 0\nchannels = ["x", "pcie"]\n',
    ):
        cluster = load(tmp_path, text + more)
        assert cluster.source == "two\nlines"
        cluster.save(tmp_path / "again.toml")
        assert same(Cluster.load(tmp_path / "again.toml"), cluster)


def test_links_that_keep_their_own_engines_beside_shared_ones_are_saved(tmp_path):
    text = EXAMPLE.replace('bandwidth = "6GB/s"', 'bandwidth = "6GB/s"\nchannels = ["bus"]')
    text += '[[pair]]\nbetween = ["cpu", "cuda:1"]\nchannels = ["cpu out", "cuda:1 in"]\n'
    cluster = load(tmp_path, text)
    cluster.save(tmp_path / "again.toml")
    again = Cluster.load(tmp_path / "again.toml")
    for source in cluster.device_names:
        for target in {*cluster.device_names} - {source}:
            assert channels(again, source, target) == channels(cluster, source, target)


def test_a_saved_cluster_reads_as_a_person_would_write_it(tmp_path):
    text = load(tmp_path, EXAMPLE).to_toml()
    assert (
        text
        == """name = "two-gpus"

[[device]]
name = "cpu"
kind = "cpu"
memory = "64GiB"
flops = { float32 = 5e11 }
memory_bandwidth = "60GB/s"
launch = "1us"
[device.efficiency]
other = 1.0

[[device]]
names = ["cuda:0", "cuda:1"]
kind = "cuda"
model = "Tesla K40"
memory = "12GiB"
flops = { float32 = 4.29e12 }
memory_bandwidth = "288GB/s"
launch = "8us"
[device.efficiency]
matmul = 0.7
convolution = 0.6
elementwise = 0.8

[link]
latency = "15us"
bandwidth = "6GB/s"

[[pair]]
between = ["cuda:0", "cuda:1"]
latency = "15us"
bandwidth = "10GB/s"
channels = ["pcie"]
"""
    )


def test_a_cluster_that_cannot_be_written_is_told_so(tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        load(tmp_path, EXAMPLE).save(tmp_path / "nowhere" / "box.toml")


def test_the_fingerprint_is_of_names_and_kinds_alone(tmp_path):
    same = load(tmp_path, EXAMPLE).fingerprint
    assert (
        load(tmp_path, EXAMPLE.replace("12GiB", "11GiB").replace("6GB/s", "9GB/s")).fingerprint
        == same
    )
    assert load(tmp_path, EXAMPLE.replace('"cuda:1"', '"cuda:2"')).fingerprint != same
    assert load(tmp_path, EXAMPLE.replace('kind = "cuda"', 'kind = "xpu"')).fingerprint != same


@pytest.mark.parametrize("name", Cluster.presets())
def test_presets_load_and_say_where_their_figures_come_from(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.description
    assert len(cluster.source) > 80
    off = ~np.eye(cluster.num_devices, dtype=bool)
    assert (cluster.bytes_per_s[off] > 0).all()


def test_unknown_names_are_told_the_known_ones():
    with pytest.raises(
        InputError, match=r"There is no cluster preset `k41`\. The presets are: a100x8"
    ):
        Cluster.preset("k41")
    with pytest.raises(
        InputError, match=r"There is no cluster `k41`\. Those that ship .* are: a100x8"
    ):
        load_cluster("k41")
    with pytest.raises(InputError, match=r"no device `cuda:9`\. Its devices are: cpu, cuda:0"):
        load_cluster("k40x4").device_index("cuda:9")


PRESETS = (
    "a100x8", "edge", "h200", "k40x2", "k40x4", "k40x8", "k80x2", "k80x4", "laptop", "rtx4090x2",
    "tpu-v3x8", "two-hosts",
)  # fmt: skip


def test_every_testbed_ships_and_says_where_its_figures_come_from():
    assert Cluster.presets() == PRESETS
    for name in PRESETS:
        cluster = Cluster.preset(name)
        assert cluster.name == name
        assert len(cluster.source) > 100
        assert cluster.description
        assert "cpu" in cluster.device_kinds


def test_there_is_one_set_of_constants_for_each_kind_of_gpu():
    for family in ("k40", "k80"):
        cards, hosts = set(), set()
        for cluster in (Cluster.preset(name) for name in PRESETS if name.startswith(family)):
            for d, kind in enumerate(cluster.device_kinds):
                facts = (
                    cluster.memory_bytes[d],
                    repr(cluster.flops[d]),
                    cluster.memory_bytes_per_s[d],
                    cluster.launch_s[d],
                    repr(cluster.efficiency[d]),
                )
                (cards if kind == "cuda" else hosts).add(facts)
            off = ~np.eye(cluster.num_devices, dtype=bool)
            assert set(cluster.bytes_per_s[off]) == {10e9}
        assert len(cards) == len(hosts) == 1


def test_hosts_of_a_pair_share_their_network_cards():
    cluster = Cluster.preset("two-hosts")
    a, b = cluster.device_index("host0/cuda:0"), cluster.device_index("host1/cuda:3")
    assert channels(cluster, "host0/cuda:0", "host1/cuda:3") == ["host0 NIC out", "host1 NIC in"]
    assert cluster.bytes_per_s[a, b] == 11e9
    assert cluster.bytes_per_s[a, cluster.device_index("host0/cuda:1")] == 90e9


def test_efficiencies_by_size_must_be_in_order(tmp_path):
    cluster = load(tmp_path, EXAMPLE.replace("matmul = 0.7", "matmul = [[1e6, 0.1], [1e9, 0.6]]"))
    assert cluster.efficiency[1]["matmul"] == ((1e6, 0.1), (1e9, 0.6))
    for curve in ("[]", "[[1e9, 0.1], [1e6, 0.6]]", "[[0.0, 0.5]]", "[[1e6, 1.5]]"):
        with pytest.raises(InputError, match="efficienc"):
            load(tmp_path, EXAMPLE.replace("matmul = 0.7", f"matmul = {curve}"))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("link_channels", ((0, 999_999),) * 9, "has channel 999999 in `link_channels`"),
        ("link_channels", ((-1,),) * 9, "expected numbers of the 7 in `channel_names`, from 0 on"),
        ("link_channels", ((1, 1),) * 9, "has a channel twice in `link_channels`"),
        ("link_channels", ((0,),) * 4, "`link_channels` has 4 entries; expected 9"),
        ("link_channels", ((0.5,),) * 9, "`link_channels` is 0.5; expected a tuple of channel"),
        ("link_channels", (0,) * 9, "`link_channels` is 0; expected a tuple of channel numbers"),
        ("link_channels", None, "`link_channels` is None; expected a tuple"),
        ("channel_names", (), "has channel 0 in `link_channels`"),
        ("channel_names", (1, 2), "`channel_names` is 1; expected a tuple of texts"),
        ("device_names", "abc", "`device_names` is 'abc'; expected a tuple of texts"),
        ("device_kinds", ("cpu",), "`device_kinds` has 1 entries; expected 3"),
        ("device_models", (None,) * 3, "`device_models` is None; expected"),
        ("name", 3, "`name` is 3; expected text"),
        ("memory_bytes", [1.5, 2.5, 3.5], "`memory_bytes` has shape (3,) and type float64"),
        ("memory_bytes", [1, 2], "`memory_bytes` has shape (2,) and type int64"),
        ("memory_bytes", [-1, 1, 1], "has -1 bytes of memory; expected"),
        (
            "memory_bytes",
            np.array([2**63] * 3, np.uint64),
            "`memory_bytes` holds 9223372036854775808",
        ),
        ("memory_bytes_per_s", [np.nan] * 3, "nan bytes/s; expected a positive number"),
        ("launch_s", [np.nan] * 3, "expected 0 to 1e+06, in `launch_s`"),
        ("launch_s", [-1.0] * 3, "has -1 s of launch overhead"),
        ("launch_s", [[1], [1, 2]], "`launch_s` is [[1], [1, 2]]; expected numbers of shape (3,)"),
        ("latency_s", np.zeros(3), "`latency_s` has shape (3,)"),
        ("latency_s", np.full((3, 3), np.inf), "has a latency of inf s"),
        ("bytes_per_s", np.full((3, 3), np.nan), "carries nan bytes/s"),
        ("bytes_per_s", "fast", "`bytes_per_s` is 'fast'"),
        ("flops", ({"float32": "1e9"},) * 3, "does '1e9' float32 flops/s"),
        ("flops", ({"float32": np.nan},) * 3, "does nan float32 flops/s"),
        ("flops", (1e9,) * 3, "`flops` is (1000000000.0"),
        ("flops", (), "`flops` has 0 entries; expected 3"),
        ("efficiency", ({"matmul": np.nan},) * 3, "has efficiency nan for matmul"),
        ("efficiency", ({"matmul": ((np.nan, 0.5),)},) * 3, "at the sizes [nan]"),
        ("efficiency", ({"matmul": ((1.0,), (2.0, 0.5))},) * 3, "`efficiency` is ((1.0,), (2."),
    ],
)
def test_wrong_arguments_of_a_cluster_are_named(tmp_path, field, value, words):
    cluster = load(tmp_path, EXAMPLE)
    with pytest.raises(InputError) as caught:
        replace(cluster, **{field: value})
    assert words in str(caught.value)


def test_a_cluster_keeps_its_figures_when_the_callers_change(tmp_path):
    rates, channels = {"float32": 1e9}, [[0]] * 9
    cluster = replace(load(tmp_path, EXAMPLE), flops=[rates] * 3, link_channels=channels)
    rates.clear()
    channels[1][0] = 10**6
    assert cluster.flops[0] == {"float32": 1e9}
    assert cluster.link_channels == ((0,),) * 9
