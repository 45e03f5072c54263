"""EC2 instances in several regions: launched all or none, found and terminated by their tag.

    look (image, key, tag) in every region ──► group and instances, region by region
        ──► addresses ──► open between them
       │ a mistake                                │ a failure, or Ctrl-C
       └─► nothing was launched                   └─► all is terminated; what remains is named

In one region the nodes use their private addresses. Across regions they use public ones, and each
region's security group admits only these.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from dpipe.errors import DpipeError, InputError, RunError

TAG = "dpipe"
READY_S = 600.0
POLL_S = 3.0
_GONE = ("shutting-down", "terminated")
_BANNER_S = 5.0

# Runs as root at the first boot: what scripts/setup and netem need, and a cloud's images lack.
USER_DATA = """#!/bin/sh
if command -v apt-get; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    apt-get install --yes python3-venv iproute2 iputils-ping
    apt-get install --yes "linux-modules-extra-$(uname -r)"
fi
"""

Say = Callable[[str], None]
Answer = dict[str, Any]


class AwsError(RunError):
    """A call has failed; the message names region, call and AWS's own words."""


class AwsRefused(InputError):  # noqa: N818 - what happened
    """A request that cannot be fulfilled; nothing was launched."""


class Calls(Protocol):
    """Makes a call of a service's API in a region, or only prints it."""

    def __call__(
        self, region: str, operation: str, service: str = "ec2", **parameters: Any
    ) -> Answer: ...


@dataclass(frozen=True)
class Order:
    """What to launch. `images` has an AMI, or the path of an SSM parameter that names one, for each
    region.
    """

    tag: str
    count: int
    instance_type: str
    images: dict[str, str]
    key_name: str
    ssh_from: str  # the addresses that may log in, as a CIDR block
    spot: bool
    disk_gb: int

    @property
    def shares(self) -> dict[str, int]:
        """The number of instances of each region, in order: neighbours in the pipeline are in the
        same region where possible.
        """
        each, more = divmod(self.count, len(self.images))
        return {region: each + (number < more) for number, region in enumerate(self.images)}


@dataclass(frozen=True)
class Instance:
    region: str
    id: str
    state: str
    public: str | None
    private: str | None

    @classmethod
    def of(cls, region: str, answer: Answer) -> "Instance":
        addresses = answer.get("PublicIpAddress"), answer.get("PrivateIpAddress")
        return cls(region, answer["InstanceId"], answer["State"]["Name"], *addresses)


def up(
    order: Order,
    calls: Calls,
    say: Say,
    *,
    answers: Callable[[str], bool],
    timeout_s: float = READY_S,
) -> list[Instance]:
    """Launch, wait until SSH `answers`, open the nodes to each other. Raises `AwsRefused` before
    the launch, `AwsError` after it.
    """
    images = {region: look(order, region, calls) for region in order.images}
    launched: dict[str, list[str]] = {}
    try:
        groups = {region: _make_group(order, region, calls) for region in order.images}
        for region, (image, device) in images.items():
            launched[region] = _launch(order, region, image, device, groups[region], calls)
            say(f"{region}: {len(launched[region])} of {order.instance_type} are launched")
        deadline = time.monotonic() + timeout_s
        instances = [
            i
            for region, ids in launched.items()
            for i in _running(order.tag, region, ids, calls, deadline)
        ]
        _open_between(instances, groups, calls)
        _await_ssh(instances, answers, deadline, say)
    except BaseException as error:
        say(f"failed, so all instances are terminated: {str(error) or type(error).__name__}")
        down(order.tag, list(order.images), calls, say, launched=launched)
        raise
    return instances


def look(order: Order, region: str, calls: Calls) -> tuple[str, str]:
    """The image and its root device. Raises `AwsRefused` if image or key do not exist, or the tag
    is in use.
    """
    image = order.images[region]
    try:
        if image.startswith("/"):
            image = calls(region, "get_parameter", service="ssm", Name=image)["Parameter"]["Value"]
        images = calls(region, "describe_images", ImageIds=[image])["Images"]
        calls(region, "describe_key_pairs", KeyNames=[order.key_name])
        existing = find(order.tag, region, calls)
    except AwsError as error:
        raise AwsRefused(f"{error}; nothing was launched") from None
    if not images:
        raise AwsRefused(f"{region}: there is no image {image}; nothing was launched")
    if existing:
        raise AwsRefused(
            f"{region}: {len(existing)} instances have the tag {TAG}={order.tag}; scripts/aws down "
            f"--tag {order.tag} ends "
            f"them, or choose another --tag; nothing was launched"
        )
    return image, str(images[0]["RootDeviceName"])


def find(tag: str, region: str, calls: Calls) -> list[Instance]:
    """The tag's instances that are not gone."""
    return [instance for instance in _all(tag, region, calls) if instance.state not in _GONE]


def down(
    tag: str,
    regions: Sequence[str],
    calls: Calls,
    say: Say,
    *,
    launched: Mapping[str, Sequence[str]] | None = None,
    timeout_s: float = READY_S,
) -> None:
    """Terminate the tag's instances and remove its groups. Raises `AwsError` naming what remains.

    `launched`: instances so new that a search by their tag may not find them yet.
    """

    def end(region: str) -> str | None:
        try:
            ids = {instance.id for instance in find(tag, region, calls)} | set(
                (launched or {}).get(region, ())
            )
            _end(tag, region, sorted(ids), calls, say, time.monotonic() + timeout_s)
        except DpipeError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(regions)) as pool:
        errors = [error for error in pool.map(end, regions) if error is not None]
    if errors:
        raise AwsError(
            "\n".join(
                [
                    *errors,
                    f"what remains costs money: scripts/aws down --tag {tag}, or see the console",
                ]
            )
        )


def _all(tag: str, region: str, calls: Calls) -> list[Instance]:
    reservations = calls(region, "describe_instances", Filters=_filters(tag))["Reservations"]
    return [
        Instance.of(region, instance)
        for reservation in reservations
        for instance in reservation["Instances"]
    ]


def _filters(tag: str) -> list[Answer]:
    return [{"Name": f"tag:{TAG}", "Values": [tag]}]


def _tagged(order: Order, *kinds: str) -> list[Answer]:
    tags = [{"Key": TAG, "Value": order.tag}, {"Key": "Name", "Value": f"dpipe-{order.tag}"}]
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds]


def _make_group(order: Order, region: str, calls: Calls) -> str:
    """A security group that admits SSH."""
    group = calls(
        region,
        "create_security_group",
        GroupName=f"dpipe-{order.tag}",
        Description="dpipe: between its nodes, and SSH",
        TagSpecifications=_tagged(order, "security-group"),
    )["GroupId"]
    ssh = {
        "IpProtocol": "tcp",
        "FromPort": 22,
        "ToPort": 22,
        "IpRanges": [{"CidrIp": order.ssh_from}],
    }
    calls(region, "authorize_security_group_ingress", GroupId=group, IpPermissions=[ssh])
    return str(group)


def _launch(
    order: Order, region: str, image: str, device: str, group: str, calls: Calls
) -> list[str]:
    """This region's share; returns the ids, first to last."""
    spot: Answer = {"InstanceMarketOptions": {"MarketType": "spot"}} if order.spot else {}
    volume = {"VolumeSize": order.disk_gb, "VolumeType": "gp3", "DeleteOnTermination": True}
    answer = calls(
        region,
        "run_instances",
        ImageId=image,
        InstanceType=order.instance_type,
        KeyName=order.key_name,
        MinCount=order.shares[region],
        MaxCount=order.shares[region],
        SecurityGroupIds=[group],
        BlockDeviceMappings=[{"DeviceName": device, "Ebs": volume}],
        TagSpecifications=_tagged(order, "instance", "volume"),
        UserData=USER_DATA,
        **spot,
    )
    return [instance["InstanceId"] for instance in answer["Instances"]]


def _running(
    tag: str, region: str, ids: Sequence[str], calls: Calls, deadline: float
) -> list[Instance]:
    """The instances once they run and have addresses, in the order of `ids`."""
    ready: dict[str, Instance] = {}
    for instances in _polls(lambda: _all(tag, region, calls), deadline):
        launched = {instance.id: instance for instance in instances if instance.id in ids}
        if gone := [instance.id for instance in launched.values() if instance.state in _GONE]:
            raise AwsError(
                f"{region}: {', '.join(gone)} ended while starting; the console says why"
            )
        ready = {
            i.id: i for i in launched.values() if i.state == "running" and i.public and i.private
        }
        if len(ready) == len(ids):
            return [ready[id_] for id_ in ids]
    raise AwsError(f"{region}: {len(ready)} of {len(ids)} instances run, with addresses, in time")


def _open_between(instances: Sequence[Instance], groups: dict[str, str], calls: Calls) -> None:
    """Open all ports between the nodes, and none to others."""
    nodes = [{"CidrIp": f"{instance.public}/32"} for instance in instances]
    for region, group in groups.items():
        every: Answer = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}
        if len(groups) > 1:
            every["IpRanges"] = nodes
        calls(region, "authorize_security_group_ingress", GroupId=group, IpPermissions=[every])


def _await_ssh(
    instances: Sequence[Instance], answers: Callable[[str], bool], deadline: float, say: Say
) -> None:
    waiting = [str(instance.public) for instance in instances]
    for _ in _polls(lambda: None, deadline):
        waiting = [address for address in waiting if not answers(address)]
        if not waiting:
            say("SSH answers on all")
            return
    raise AwsError(
        f"no SSH on {', '.join(waiting)}; does --ssh-from include this machine's public address?"
    )


def ssh_answers(address: str, port: int = 22) -> bool:
    try:
        with socket.create_connection((address, port), _BANNER_S) as connection:
            connection.settimeout(_BANNER_S)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def _end(
    tag: str, region: str, ids: Sequence[str], calls: Calls, say: Say, deadline: float
) -> None:
    if ids:
        calls(region, "terminate_instances", InstanceIds=ids)
        say(f"{region}: {len(ids)} are being terminated")
    for group in calls(region, "describe_security_groups", Filters=_filters(tag))["SecurityGroups"]:
        _delete_group(region, group["GroupId"], calls, deadline)
        say(f"{region}: group {group['GroupId']} is removed")


def _delete_group(region: str, group: str, calls: Calls, deadline: float) -> None:
    """AWS refuses until all instances of the group have terminated."""
    error: AwsError | None = None
    for _ in _polls(lambda: None, deadline):
        try:
            calls(region, "delete_security_group", GroupId=group)
            return
        except AwsError as refusal:
            error = refusal
    raise AwsError(f"{region}: group {group} remains: {error}")


def _polls(ask: Callable[[], Any], deadline: float) -> Iterator[Any]:
    """Call `ask` repeatedly until the deadline, at least once; yields its results."""
    while True:
        yield ask()
        if time.monotonic() > deadline:
            return
        time.sleep(POLL_S)
