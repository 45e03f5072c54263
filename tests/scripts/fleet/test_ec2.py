"""Instances on moto's server, which answers like EC2: launched all or none, and terminated by their
tag.
"""

import json
import sys

import pytest
from click.testing import CliRunner
from fleet import aws, ec2
from fleet.ec2 import AwsError, AwsRefused, Order
from fleet.hosts import load_hosts

from dpipe.errors import InputError

IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
ONE, TWO = "us-east-1", "eu-west-1"
IN_TWO = [
    "--count",
    "3",
    "--type",
    "c5.large",
    "--region",
    f"{ONE},{TWO}",
    "--image",
    IMAGE,
    "--key",
    "me",
]
HERE = "203.0.113.7/32"


@pytest.fixture(scope="module")
def boto():
    """One session for all tests, because a client takes long to create."""
    from moto.server import (
        ThreadedMotoServer,
    )  # 2 s, which workers without these tests need not take

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        yield aws.Boto(None)
    server.stop()


@pytest.fixture
def ec2_of(boto, tmp_path, monkeypatch):
    """`ec2_of(region, "operation", ...)`; nothing of a test is left there."""
    monkeypatch.setattr(aws, "Boto", lambda url: boto)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ec2, "POLL_S", 0.01)
    monkeypatch.setattr(ec2, "ssh_answers", lambda address: True)
    (tmp_path / "me.pem").touch()
    for region in (ONE, TWO):
        boto(region, "create_key_pair", KeyName="me")
    yield boto
    for region in (ONE, TWO):
        boto(region, "delete_key_pair", KeyName="me")
    ec2.down("t", [ONE, TWO], boto, lambda said: None)


def call(*words):
    return CliRunner().invoke(aws.main, [*words, "--tag", "t"])


def up(*words):
    return call("up", *IN_TWO, "--ssh-from", HERE, "--key-file", "me.pem", *words)


def there(region):
    return ec2.find("t", region, aws.Boto(None))


def groups(region):
    filters = [{"Name": "tag:dpipe", "Values": ["t"]}]
    return aws.Boto(None)(region, "describe_security_groups", Filters=filters)["SecurityGroups"]


def test_instances_of_two_regions_become_a_hosts_file(ec2_of):
    done = up()
    assert done.exit_code == 0, done.output
    hosts = load_hosts(aws.Path("hosts.toml")).hosts
    launched = [*there(ONE), *there(TWO)]
    assert [len(there(ONE)), len(there(TWO))] == [2, 1]
    assert {host.address for host in hosts} == {instance.public for instance in launched}
    assert all(
        host.advertise == host.address for host in hosts
    )  # private addresses end at a region
    assert (hosts[0].user, str(hosts[0].key)) == ("ubuntu", "me.pem")


def test_nodes_reach_each_other_and_only_one_address_reaches_ssh(ec2_of):
    up()
    nodes = {f"{instance.public}/32" for region in (ONE, TWO) for instance in there(region)}
    for region in (ONE, TWO):
        (group,) = groups(region)
        ssh, every = sorted(
            group["IpPermissions"], key=lambda rule: rule["IpProtocol"], reverse=True
        )
        assert (ssh["FromPort"], ssh["ToPort"], [r["CidrIp"] for r in ssh["IpRanges"]]) == (
            22,
            22,
            [HERE],
        )
        assert every["IpProtocol"] == "-1"
        assert {r["CidrIp"] for r in every["IpRanges"]} == nodes
        assert [pair["GroupId"] for pair in every["UserIdGroupPairs"]] == [group["GroupId"]]


def test_one_region_talks_over_private_addresses_of_its_group(ec2_of):
    assert up("--region", ONE, "--count", "2").exit_code == 0
    hosts = load_hosts(aws.Path("hosts.toml")).hosts
    assert {host.advertise for host in hosts} == {instance.private for instance in there(ONE)}
    (group,) = groups(ONE)
    assert all(
        not rule["IpRanges"] for rule in group["IpPermissions"] if rule["IpProtocol"] == "-1"
    )


@pytest.mark.parametrize(("market", "cycle"), [("--spot", "spot"), ("--on-demand", None)])
def test_market_is_as_requested(ec2_of, market, cycle):
    up(market, "--region", ONE, "--count", "1")
    (reservation,) = ec2_of(ONE, "describe_instances", InstanceIds=[there(ONE)[0].id])[
        "Reservations"
    ]
    assert reservation["Instances"][0].get("InstanceLifecycle") == cycle


def test_status_lists_and_down_leaves_nothing(ec2_of, monkeypatch):
    monkeypatch.setattr(aws, "all_regions", lambda calls: [ONE, TWO])
    up()
    listed = call("status").output
    assert [instance.id in listed for instance in (*there(ONE), *there(TWO))] == [True] * 3
    done = call("down")
    assert done.exit_code == 0, done.output
    assert [there(ONE), there(TWO), groups(ONE), groups(TWO)] == [[], [], [], []]


def test_all_regions_are_those_of_the_account(ec2_of):
    assert {ONE, TWO} <= set(aws.all_regions(ec2_of))


def test_tag_in_use_is_refused_and_what_runs_stays(ec2_of):
    up()
    done = up("--hosts-file", "other.toml")
    assert done.exit_code == 2
    assert (
        "2 instances have the tag dpipe=t; scripts/aws down --tag t ends them, or choose another"
        in done.output
    )
    assert len(there(ONE)) == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--key", "you"], "describe_key_pairs: An error occurred (InvalidKeyPair.NotFound)"),
        (["--image", f"{ONE}=ami-00000000,{TWO}=ami-00000000"], "ami-00000000"),
        (["--image", "/aws/service/none"], "get_parameter: An error occurred (ParameterNotFound)"),
        (["--image", "ami-1"], "ami-1 exists in one region only; give --image R=AMI,R2=AMI2"),
        (["--image", f"{ONE}=ami-1"], f"--image names none for {TWO}"),
        (["--count", "1"], "1 instances cannot be in 2 regions"),
        (
            ["--ssh-from", "203.0.113.7/8"],
            "--ssh-from 203.0.113.7/8: 203.0.113.7/8 has host bits set",
        ),
        (["--hosts-file", "me.pem"], "me.pem exists already; choose another --hosts-file"),
    ],
)
def test_mistake_is_named_before_anything_is_launched(ec2_of, words, expected):
    done = up(*words)
    assert done.exit_code == 2, done.output
    assert expected in done.output
    assert "nothing was launched" in done.output
    assert [there(ONE), there(TWO), groups(ONE), groups(TWO)] == [[], [], [], []]


class Failing:
    """Passes calls on, except those that fail."""

    def __init__(self, *calls: tuple[str, str]) -> None:
        self._boto, self._failing = aws.Boto(None), calls

    def __call__(self, region, operation, service="ec2", **parameters):
        if (region, operation) in self._failing:
            raise AwsError(f"{region}: {operation}: InsufficientInstanceCapacity")
        return self._boto(region, operation, service, **parameters)


def order(**changes):
    given = {
        "tag": "t",
        "count": 3,
        "instance_type": "c5.large",
        "images": {ONE: IMAGE, TWO: IMAGE},
        "key_name": "me",
    }
    return Order(**given, ssh_from=HERE, spot=False, disk_gb=50, **changes)


def launch(calls, said, answers=lambda address: True):
    return ec2.up(order(), calls, said.append, answers=answers, timeout_s=0.05)


def test_launch_that_fails_half_way_leaves_nothing(ec2_of):
    said = []
    with pytest.raises(AwsError, match=f"{TWO}: run_instances: InsufficientInstanceCapacity"):
        launch(Failing((TWO, "run_instances")), said)
    assert f"{ONE}: 2 are being terminated" in said
    assert [there(ONE), there(TWO), groups(ONE), groups(TWO)] == [[], [], [], []]


def test_resources_that_cannot_be_removed_are_named(ec2_of):
    left = Failing((TWO, "run_instances"), (ONE, "terminate_instances"))
    with pytest.raises(AwsError) as error:
        launch(left, [])
    assert f"{ONE}: terminate_instances: InsufficientInstanceCapacity" in str(error.value)
    assert "what remains costs money: scripts/aws down --tag t" in str(error.value)
    assert len(there(ONE)) == 2


def test_machine_on_which_ssh_does_not_answer_is_named(ec2_of):
    with pytest.raises(
        AwsError,
        match=r"no SSH on [\d., ]+; does --ssh-from include this machine's public address?",
    ):
        launch(aws.Boto(None), [], answers=lambda address: False)
    assert there(ONE) == []


def test_group_that_stays_is_named(ec2_of):
    up()
    with pytest.raises(AwsError, match=r"group sg-\w+ remains: .*delete_security_group"):
        ec2.down(
            "t", [ONE], Failing((ONE, "delete_security_group")), lambda said: None, timeout_s=0.05
        )


def test_interrupt_leaves_nothing(ec2_of):
    def interrupt(address):
        raise KeyboardInterrupt

    said = []
    with pytest.raises(KeyboardInterrupt):
        launch(aws.Boto(None), said, answers=interrupt)
    assert "failed, so all instances are terminated: KeyboardInterrupt" in said
    assert [there(ONE), groups(TWO)] == [[], []]


class Fading(Failing):
    """Instances that end while they start."""

    def __call__(self, region, operation, service="ec2", **parameters):
        if operation == "run_instances":
            answer = super().__call__(region, operation, service, **parameters)
            self._boto(
                region, "terminate_instances", InstanceIds=[answer["Instances"][0]["InstanceId"]]
            )
            return answer
        return super().__call__(region, operation, service, **parameters)


def test_instance_that_ends_while_starting_is_named(ec2_of):
    with pytest.raises(AwsError, match=r"i-\w+ ended while starting; the console says why"):
        launch(Fading(), [])


class Late(Failing):
    """Instances that a search by tag does not find yet."""

    def __call__(self, region, operation, service="ec2", **parameters):
        answer = super().__call__(region, operation, service, **parameters)
        return {"Reservations": []} if operation == "describe_instances" else answer


def test_instances_too_new_to_be_found_are_terminated_too(ec2_of):
    with pytest.raises(AwsError, match="0 of 2 instances run, with addresses, in time"):
        launch(Late(), [])
    assert there(ONE) == []


def test_dry_run_prints_the_calls_and_makes_none(tmp_path, monkeypatch):
    monkeypatch.setattr(aws, "Boto", None)
    monkeypatch.chdir(tmp_path)
    done = up("--dry-run")
    assert done.exit_code == 0, done.output
    calls = [
        line.split(" ", 3) for line in done.output.splitlines() if line.startswith(("ec2 ", "ssm "))
    ]
    launched = {
        region: json.loads(given)["MaxCount"]
        for _, region, what, given in calls
        if what == "run_instances"
    }
    assert launched == {ONE: 2, TWO: 1}
    assert list(tmp_path.iterdir()) == []
    assert "ec2 every-region terminate_instances" in call("down", "--dry-run").output


def test_server_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    done = call("status", "--region", ONE, "--endpoint-url", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert f"aws: {ONE}: describe_instances: Could not connect to the endpoint URL" in done.output


def test_missing_boto3_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InputError, match=r"needs boto3: pip install 'dpipe\[aws\]'"):
        aws.Boto(None)


def test_ssh_is_told_from_other_servers(sshd):
    _, port = sshd
    assert ec2.ssh_answers("127.0.0.1", port)
    assert not ec2.ssh_answers("127.0.0.1", 1)


def test_unknown_refusal_is_not_a_mistake_of_the_user():
    assert issubclass(AwsRefused, InputError)
    assert not issubclass(AwsError, InputError)
