"""`machines.toml`: what is read, what is written, and what is refused with which words."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpipe.errors import ProfileError
from dpipe.machines.file import dump_machines, load_machines, parse_machines, save_machines
from dpipe.machines.machine import (
    KINDS,
    MOST_MACHINES,
    Cluster,
    LayerTime,
    Machine,
    Measurement,
)
from dpipe.network.link import LOOPBACK, Link
from dpipe.toml import parse_toml

TEXT = """
[measured]
at = "2026-11-23T12:00:00Z"
model = "5f84501"

[[machine]]
name = "a"
host = "10.0.0.1"
device = "cuda NVIDIA A10G"
devices = 2
cores = 4
memory_gb = 12.3
price_per_hour = 1.2
egress_gbps = 1
ingress_gbps = 0.5

[[machine.layer]]
kind = "embedding"
micro_batch_size = 1
forward_ms = 0.5
backward_ms = 1

[[machine.layer]]
kind = "block"
micro_batch_size = 1
forward_ms = 1
backward_ms = 2
backward_input_ms = 1.25
backward_weight_ms = 0.75

[[machine]]
name = "b"
gflops = 300

[[link]]
from = "a"
to = "b"
delay_ms = 10
bandwidth_gbps = 1
loss_percent = 0.1

[[link]]
from = "b"
to = "a"
delay_ms = 12
bandwidth_gbps = 0.25

[[link]]
from = "a"
to = "a"
delay_ms = 0.01
bandwidth_gbps = 100
"""
CLUSTER = Cluster(
    machines=(
        Machine(
            name="a",
            host="10.0.0.1",
            device="cuda NVIDIA A10G",
            devices=2,
            cores=4,
            memory_gb=12.3,
            price_per_hour=1.2,
            egress_gbps=1.0,
            ingress_gbps=0.5,
            layers=(
                LayerTime("embedding", 1, 0.5, 1.0),
                LayerTime("block", 1, 1.0, 2.0, 1.25, 0.75),
            ),
        ),
        Machine(name="b", gflops=300.0),
    ),
    links={
        ("a", "b"): Link(10, 1, loss_percent=0.1),
        ("b", "a"): Link(12, 0.25),
        ("a", "a"): Link(0.01, 100),
    },
    measured=Measurement("2026-11-23T12:00:00Z", "5f84501"),
)


def parsed(text: str) -> Cluster:
    return parse_machines(parse_toml(text))


def test_file_is_read() -> None:
    assert parsed(TEXT) == CLUSTER


def test_file_is_named_after_its_path_unless_it_says_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "office.toml"
    path.write_text('[[machine]]\nname = "a"')
    assert load_machines(path).name == "office"
    path.write_text('name = "ours"\n[[machine]]\nname = "a"')
    assert load_machines(path).name == "ours"


def test_link_of_one_direction_is_that_of_both() -> None:
    machines = (Machine("a"), Machine("b"))
    assert Cluster(machines, {("a", "b"): Link(1, 2)}).link("b", "a") == Link(1, 2)


def test_pair_without_a_link_has_the_default_and_a_machine_loopback() -> None:
    cluster = Cluster((Machine("a"), Machine("b")), default_link=Link(1, 2))
    assert cluster.link("a", "b") == Link(1, 2)
    assert cluster.link("a", "a") == LOOPBACK
    assert CLUSTER.link("a", "a") == Link(0.01, 100)


def test_writer_writes_what_was_stated(tmp_path: Path) -> None:
    save_machines(CLUSTER, tmp_path / "machines.toml")
    save_machines(CLUSTER, tmp_path / "machines.toml")  # over the one that is there
    assert load_machines(tmp_path / "machines.toml") == CLUSTER
    assert [path.name for path in tmp_path.iterdir()] == ["machines.toml"]
    text = dump_machines(Cluster((Machine("a", cores=2),), name="office"))
    assert text == 'name = "office"\n\n[[machine]]\nname = "a"\ncores = 2\n'


NAMES = st.text(min_size=1, max_size=5).filter(
    lambda name: name.isprintable() and name.strip() == name
)
NUMBERS = st.floats(0, 1e9)
RATES = st.floats(1e-6, 1e6)
LAYERS = st.builds(
    LayerTime,
    st.sampled_from(KINDS) | st.integers(0, 100),
    st.integers(1, 64),
    NUMBERS,
    NUMBERS,
)
MACHINES = st.builds(
    Machine,
    name=NAMES,
    host=st.none() | NAMES,
    device=NAMES,
    devices=st.integers(1, 8),
    cores=st.none() | st.integers(1, 99),
    memory_gb=st.none() | RATES,
    gflops=st.none() | RATES,
    price_per_hour=st.none() | NUMBERS,
    egress_gbps=st.none() | RATES,
    ingress_gbps=st.none() | RATES,
    layers=st.lists(
        LAYERS, max_size=3, unique_by=lambda layer: (layer.kind, layer.micro_batch_size)
    ).map(tuple),
)
LINKS = st.builds(Link, st.floats(0, 1e6), RATES, st.just(0.0), st.floats(0, 99))


@given(st.data())
def test_what_is_written_reads_as_it_was(data: st.DataObject) -> None:
    machines = data.draw(
        st.lists(MACHINES, min_size=1, max_size=4, unique_by=lambda machine: machine.name)
    )
    names = st.sampled_from([machine.name for machine in machines])
    cluster = Cluster(
        tuple(machines),
        data.draw(st.dictionaries(st.tuples(names, names), LINKS, max_size=4)),
        data.draw(st.none() | LINKS),
        data.draw(st.none() | st.just(CLUSTER.measured)),
    )
    assert parsed(dump_machines(cluster)) == cluster


A = '[[machine]]\nname = "a"\n'
LAYER = A + '[[machine.layer]]\nkind = "block"\nmicro_batch_size = 1\n'
AB = A + '[[machine]]\nname = "b"\n'
LINK = '[[link]]\nfrom = "a"\nto = "b"\ndelay_ms = 1\nbandwidth_gbps = 1\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has 0 machines; list each as \\[\\[machine\\]\\], at least one and at most 4096"),
        ("machine = 3", "machines are written as \\[\\[machine\\]\\] in double brackets"),
        ("[machine]\nname = 'a'", "machines are written as \\[\\[machine\\]\\]"),
        ("speed = 3", "unknown key 'speed' in the file; known keys: default_link, link, machine"),
        ("name = 3", "name must be a text, got 3"),
        ("[[machine]]\ncores = 2", "machine '\\?': it needs name"),
        ("[[machine]]\nname = 3", "machine 3: name must be a text, got 3"),
        ('[[machine]]\nname = " a"', "name must be 1 to 100 printable characters with no space"),
        ('[[machine]]\nname = ""', "name must be 1 to 100 printable characters"),
        (A + 'host = "a\\nb"', "machine 'a': host must be 1 to 100 printable"),
        (A + 'device = ""', "machine 'a': device must be 1 to 100 printable"),
        (A + A, "machine 'a' is listed twice; names must differ"),
        (A + "speed = 3", "machine 'a': unknown key 'speed' in it; known keys: cores, device"),
        (A + "cores = 0", "machine 'a': cores must be between 1 and 1000000, got 0"),
        (A + "cores = 1.5", "machine 'a': cores must be a whole number, got 1.5"),
        (A + "devices = true", "machine 'a': devices must be a whole number, got True"),
        (A + "devices = -1", "machine 'a': devices must be between 1 and 1000000, got -1"),
        (A + "memory_gb = 0", "machine 'a': memory_gb must be a positive number, got 0"),
        (A + "gflops = nan", "machine 'a': gflops must be a positive number, got nan"),
        (A + "egress_gbps = -1", "machine 'a': egress_gbps must be a positive number, got -1"),
        (A + "ingress_gbps = inf", "machine 'a': ingress_gbps must be a positive number, got inf"),
        (A + "price_per_hour = -1", "price_per_hour must be a number that is not negative, got -1"),
        (A + 'egress_gbps = "1"', "machine 'a': egress_gbps must be a number, got '1'"),
        (A + f"egress_gbps = 1{'0' * 400}", "egress_gbps is too large for any machine"),
        (
            A + "layer = 3",
            "machine 'a': layers are written as \\[\\[layer\\]\\] in double brackets",
        ),
        (LAYER + "forward_ms = 1", "'a': \\[\\[machine.layer\\]\\] 'block': it needs backward_ms"),
        (
            LAYER + "forward_ms = -1\nbackward_ms = 1",
            "'block': forward_ms must be a number that is not negative, got -1",
        ),
        (
            LAYER + "forward_ms = 1\nbackward_ms = 1\nbackward_input_ms = 1",
            "backward_input_ms and backward_weight_ms are the two halves of a split backward",
        ),
        (
            LAYER.replace('"block"', '"blok"') + "forward_ms = 1\nbackward_ms = 1",
            'kind must be one of "embedding", "block", "head", or the index of a layer of your own',
        ),
        (
            LAYER.replace('"block"', "-1") + "forward_ms = 1\nbackward_ms = 1",
            "the index of a layer of your own, got -1",
        ),
        (
            LAYER.replace('"block"', "1.5") + "forward_ms = 1\nbackward_ms = 1",
            "kind must be a text or a whole number, got 1.5",
        ),
        (
            LAYER.replace("size = 1", "size = 0") + "forward_ms = 1\nbackward_ms = 1",
            "micro_batch_size must be between 1 and 1000000, got 0",
        ),
        (
            (LAYER + "forward_ms = 1\nbackward_ms = 1\n")
            + LAYER[len(A) :]
            + "forward_ms = 1\nbackward_ms = 1",
            "machine 'a': layer 'block' with micro_batch_size 1 is listed twice",
        ),
        (LINK + A, "\\[\\[link\\]\\] from 'a' to 'b': there is no machine 'b'; there are a"),
        (AB + LINK + LINK, "\\[\\[link\\]\\] from 'a' to 'b' is listed twice"),
        (AB + LINK + "mtu = 9000", "unknown key 'mtu' in \\[\\[link\\]\\]; known keys: bandwidth"),
        (
            AB + '[[link]]\nfrom = "a"',
            "\\[\\[link\\]\\] needs 'to', the name of a machine; got None",
        ),
        (AB + "[[link]]\nfrom = 0", "\\[\\[link\\]\\] needs 'from', the name of a machine; got 0"),
        (
            AB + LINK.replace("delay_ms = 1", "delay_ms = -1"),
            "\\[\\[link\\]\\] from 'a' to 'b': delay_ms must be a number that is not negative",
        ),
        (
            AB + LINK.replace("gbps = 1", "gbps = -1"),
            "\\[\\[link\\]\\] from 'a' to 'b': bandwidth_gbps must be a positive number, got -1",
        ),
        (AB + LINK.replace("delay_ms = 1\n", ""), "from 'a' to 'b': it needs delay_ms, a number"),
        (AB + LINK + "loss_percent = 100", "loss_percent must be at least 0 and below 100"),
        ("[default_link]\ndelay_ms = 1", "\\[default_link\\]: it needs bandwidth_gbps"),
        ("[default_link]\nmtu = 1", "unknown key 'mtu' in \\[default_link\\]"),
        ("default_link = 1", "default_link is a table, \\[default_link\\]; got 1"),
        ("measured = 1", "measured is a table, \\[measured\\]; got 1"),
        ("[measured]\nmodel = 'x'", "\\[measured\\]: it needs at"),
        (
            "[measured]\nmodel = 'x'\nat = 'now'",
            "\\[measured\\]: at must be a time such as 2026-11-23T12:00:00Z, got 'now'",
        ),
        ("[measured]\nmodel = ''\nat = '2026-11-23'", "\\[measured\\]: model must be 1 to 100"),
        ("[measured]\nlayer = 1", "\\[measured\\]: unknown key 'layer'"),
    ],
)
def test_what_is_wrong_is_named_with_its_table_and_key(text: str, words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        parsed(text)


def test_too_many_machines_are_refused() -> None:
    machines = tuple(Machine(str(number)) for number in range(MOST_MACHINES + 1))
    with pytest.raises(ProfileError, match="it has 4097 machines"):
        Cluster(machines)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name = ", "machines file .*m.toml: Invalid value"),
        (b"\xff", "machines file .*m.toml: .*utf-8"),
        (b"[[machine]]", "machines file .*m.toml: machine '\\?': it needs name"),
    ],
)
def test_error_names_the_file(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "m.toml").write_bytes(content)
    with pytest.raises(ProfileError, match=words):
        load_machines(tmp_path / "m.toml")


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="machines file .*none.toml does not exist"):
        load_machines(tmp_path / "none.toml")
    with pytest.raises(ProfileError, match="machines file .* cannot be read: Is a directory"):
        load_machines(tmp_path)
    with pytest.raises(ProfileError, match="machines file /dev/null: it is not a regular file"):
        load_machines("/dev/null")


def test_missing_links_are_named() -> None:
    machines = tuple(Machine(name) for name in "abcd")
    cluster = Cluster(machines, {("a", "b"): Link(1, 1), ("c", "d"): Link(1, 1)})
    cluster.check_links("ab")
    with pytest.raises(
        ProfileError,
        match="there is no link from machine a to c, a to d, b to c, b to d, c to a, c to b and 2 "
        "more; list each pair as",
    ):
        cluster.check_links("abcd")


def test_layer_that_was_not_measured_is_refused_with_what_was() -> None:
    machine = CLUSTER.machine("a")
    assert machine.layer_time("block", 1).forward_ms == 1
    with pytest.raises(
        ProfileError, match="'a' says nothing of layer 'block' .*; measured: \\[1\\]"
    ):
        machine.layer_time("block", 2)
    with pytest.raises(ProfileError, match="layer 'head' with micro_batch_size 1; measured: none"):
        machine.layer_time("head", 1)


def test_relayed_link_is_read_and_written_as_such() -> None:
    machines = '[[machine]]\nname = "a"\n[[machine]]\nname = "b"\n'
    link = '[[link]]\nfrom = "a"\nto = "b"\ndelay_ms = 1\nbandwidth_gbps = 1\nrelayed = '
    cluster = parse_machines(parse_toml(machines + link + "true\n"))
    both_ways = {("a", "b"), ("b", "a")}
    assert cluster.relayed == both_ways
    assert parse_machines(parse_toml(dump_machines(cluster))).relayed == both_ways
    with pytest.raises(ProfileError, match="relayed must be true or false, got 1"):
        parse_machines(parse_toml(machines + link + "1\n"))


def test_relayed_pair_with_the_default_link_alone_is_written_too() -> None:
    machines = (Machine("a"), Machine("b"), Machine("c"))
    cluster = Cluster(machines, default_link=LOOPBACK, relayed=frozenset([("a", "b")]))
    read = parse_machines(parse_toml(dump_machines(cluster)))
    assert read.relayed == {("a", "b"), ("b", "a")}
    assert read == cluster
