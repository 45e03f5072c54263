"""The hosts file: its meaning, and the errors for mistakes."""

import pytest
from fleet.hosts import HostsError, load_hosts

TWO = '[[host]]\naddress = "10.0.0.1"\n[[host]]\naddress = "10.0.0.2"\n'


@pytest.fixture
def hosts(tmp_path):
    def load(text: str):
        (tmp_path / "hosts.toml").write_text(text, encoding="utf-8")
        return load_hosts(tmp_path / "hosts.toml")

    return load


def test_order_of_hosts_is_that_of_ranks(hosts):
    ranks = hosts(TWO + "slots = 2\n").ranks(3)
    assert [(rank.rank, rank.host.address, rank.local_rank) for rank in ranks] == [
        (0, "10.0.0.1", 0),
        (1, "10.0.0.2", 0),
        (2, "10.0.0.2", 1),
    ]


def test_top_level_key_applies_to_hosts_that_do_not_set_it(hosts):
    first, second = hosts(f'user = "ubuntu"\nfolder = "~/work/"\n{TWO}user = "root"\n').hosts
    assert (first.user, second.user, second.folder) == ("ubuntu", "root", "work")


def test_coordinator_is_at_the_first_hosts_advertised_address(hosts):
    text = 'coordinator_port = 7100\n[[host]]\naddress = "cloud-1"\nadvertise = "10.0.0.1"\n'
    assert hosts(text).coordinator == "10.0.0.1:7100"


def test_interpreter_is_that_of_the_environment(hosts):
    made, given = hosts(f'{TWO}venv = "/opt/venv"\n').hosts
    assert (made.interpreter, given.interpreter) == (
        "dpipe/src/.venv/bin/python",
        "/opt/venv/bin/python",
    )


def test_fewer_slots_than_ranks_are_refused(hosts):
    with pytest.raises(
        HostsError, match=r"3 ranks need as many slots; .*hosts.toml has 2 on 2 hosts: add hosts"
    ):
        hosts(TWO).ranks(3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "'host' is missing"),
        ("host = []", "host: Tuple should have at least 1 item"),
        ("host = ", "is not TOML"),
        ("[[host]]\nslots = 1", "host 0: 'address' is missing"),
        (f"{TWO}slot = 2", "host 1: unknown key 'slot'; did you mean 'slots'?"),
        (
            f"coordinatorport = 1\n{TWO}",
            "unknown key 'coordinatorport'; did you mean 'coordinator_port'?",
        ),
        (
            f"meeting_port = 1\n{TWO}",
            "'meeting_port' is now called 'coordinator_port'; rename it",
        ),
        (f"{TWO}xyz = 2", "host 1: unknown key 'xyz'; known: address, advertise, user"),
        (f"slots = 0\n{TWO}", "host 0: slots: Input should be greater than or equal to 1, got 0"),
        (
            f"port = 70000\n{TWO}",
            "host 0: port: Input should be less than or equal to 65535, got 70000",
        ),
        ('[[host]]\naddress = "-oProxyCommand=x"', "host 0: address: must be a name or an addr"),
        (f'folder = "~/"\n{TWO}', "host 0: folder: must be a folder of its own, got '~/'"),
        (f'{TWO}[[host]]\naddress = "10.0.0.1"', "the same address and port, 10.0.0.1; slots = 2"),
        (f'{TWO}advertise = "10.0.0.1"', "two hosts have the same advertise, 10.0.0.1"),
        ('[[host]]\naddress = "a"\nadvertise = "none"', "host 0 runs the coordinator"),
        (f'key = "/none/key"\n{TWO}', "host 0 (10.0.0.1): key /none/key does not exist"),
    ],
)
def test_mistake_is_named(hosts, text, expected):
    with pytest.raises(HostsError) as error:
        hosts(text)
    assert expected in str(error.value)


def test_missing_hosts_file_is_named(tmp_path):
    with pytest.raises(HostsError, match=r"none.toml does not exist; scripts/aws up writes one"):
        load_hosts(tmp_path / "none.toml")


def test_hosts_are_those_of_a_file_of_machines(hosts):
    machines = '[[machine]]\nname = "a"\nhost = "10.0.0.1"\ndevices = 2\n'
    read = hosts(machines + '[[machine]]\nname = "b"\nhost = "10.0.0.2"\n')
    assert [(each.host.address, each.local_rank) for each in read.ranks(3)] == [
        ("10.0.0.1", 0),
        ("10.0.0.1", 1),
        ("10.0.0.2", 0),
    ]
    assert read.coordinator == "10.0.0.1:7000"


def test_machine_that_cannot_be_reached_is_named(hosts):
    with pytest.raises(HostsError, match="machine 'a' has no host, the address at which it is"):
        hosts('[[machine]]\nname = "a"')


def test_mistake_in_a_file_of_machines_is_named(hosts):
    with pytest.raises(HostsError, match="machines file .*: machine 'a': unknown key 'speed'"):
        hosts('[[machine]]\nname = "a"\nspeed = 3')
