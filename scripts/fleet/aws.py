"""The commands of `scripts/aws`: launch EC2 instances with a hosts file for scripts/cluster, and
terminate them.
"""

import ipaddress
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import click

from dpipe.errors import DpipeError, InputError
from fleet import ec2
from fleet.ec2 import Answer, AwsError, AwsRefused, Calls, Instance, Order

F = TypeVar("F", bound=Callable[..., Any])

UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
_ANY_REGION = "us-east-1"  # any region can list all


class Boto:
    """Makes the calls, with one client a region."""

    def __init__(self, endpoint_url: str | None) -> None:
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ModuleNotFoundError:
            raise InputError("scripts/aws needs boto3: pip install 'dpipe[aws]'") from None
        self._new_client = partial(boto3.session.Session().client, endpoint_url=endpoint_url)
        self._clients: dict[tuple[str, str], Any] = {}
        # Regions are called at the same time, but a session can make only one client at a time.
        self._lock = Lock()
        self._errors = (BotoCoreError, ClientError)

    def __call__(
        self, region: str, operation: str, service: str = "ec2", **parameters: Any
    ) -> Answer:
        try:
            return dict(getattr(self._client(service, region), operation)(**parameters))
        except self._errors as error:
            raise AwsError(f"{region}: {operation}: {error}") from None

    def _client(self, service: str, region: str) -> Any:
        with self._lock:
            if (service, region) not in self._clients:
                self._clients[service, region] = self._new_client(service, region_name=region)
            return self._clients[service, region]


class DryRun:
    """Prints the calls instead of making them, and answers as if all succeeded. `instances` are
    those that a region has at first.
    """

    def __init__(self, instances: Sequence[str] = ()) -> None:
        self._instances = {"": list(instances)}

    def __call__(
        self, region: str, operation: str, service: str = "ec2", **parameters: Any
    ) -> Answer:
        click.echo(f"{service} {region} {operation} {json.dumps(parameters)}")
        instances = self._instances.setdefault(region, list(self._instances[""]))
        match operation:
            case "get_parameter":
                return {"Parameter": {"Value": "ami-of-parameter"}}
            case "describe_images":
                return {"Images": [{"RootDeviceName": "/dev/sda1"}]}
            case "create_security_group":
                return {"GroupId": f"sg-of-{region}"}
            case "run_instances":
                instances += [f"i-{number}-of-{region}" for number in range(parameters["MaxCount"])]
                return {"Instances": [{"InstanceId": name} for name in instances]}
            case "describe_instances":
                return {"Reservations": [{"Instances": list(map(_as_running, instances))}]}
            case "describe_security_groups":
                return {"SecurityGroups": [{"GroupId": f"sg-of-{region}"}]}
            case "describe_regions":
                return {"Regions": [{"RegionName": "every-region"}]}
        return {}


def _as_running(name: str) -> Answer:
    addresses = {"PublicIpAddress": f"public-of-{name}", "PrivateIpAddress": f"private-of-{name}"}
    return {"InstanceId": name, "State": {"Name": "running"}, **addresses}


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DpipeError as error:
            _say(f"aws: {error}")
            sys.exit(error.exit_code)


@click.group(cls=_Commands)
def main() -> None:
    """Rent machines for scripts/cluster on EC2. Credentials are found as by every AWS tool."""


def _where(command: F) -> F:
    for option in (
        click.option(
            "--tag", required=True, help="Marks the instances, so that status and down find them."
        ),
        click.option("--dry-run", is_flag=True, help="Print the calls and make none."),
        click.option(
            "--endpoint-url", help="Another API than AWS's; AWS_ENDPOINT_URL does the same."
        ),
    ):
        command = option(command)
    return command


def _split(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",")) if value else ()


@main.command()
@click.option(
    "--count",
    "number",
    type=click.IntRange(min=1),
    required=True,
    help="How many, over all regions.",
)
@click.option("--type", "instance_type", required=True, help="Such as c7i.2xlarge.")
@click.option(
    "--region",
    "regions",
    callback=_split,
    required=True,
    help="R or R,R2,...: an equal share each, in order.",
)
@click.option(
    "--image",
    default=UBUNTU,
    help="An AMI, an SSM parameter, or R=AMI,R2=AMI2. Default: Ubuntu 24.04, amd64.",
)
@click.option("--key", required=True, help="The name of your EC2 key pair, in every region.")
@click.option(
    "--key-file",
    type=click.Path(path_type=Path),
    help="Its private key here; default ~/.ssh/KEY.pem.",
)
@click.option("--user", default="ubuntu", show_default=True, help="The user of this image.")
@click.option(
    "--ssh-from",
    required=True,
    metavar="CIDR",
    help="The addresses that may log in, such as 203.0.113.7/32.",
)
@click.option(
    "--spot/--on-demand", default=False, help="Spot is cheaper; AWS may terminate it at any time."
)
@click.option("--disk-gb", type=click.IntRange(min=8), default=50, show_default=True)
@click.option(
    "--hosts-file", type=click.Path(path_type=Path), default="hosts.toml", show_default=True
)
@_where
def up(
    number: int,
    regions: Sequence[str],
    image: str,
    key: str,
    key_file: Path | None,
    user: str,
    hosts_file: Path,
    dry_run: bool,
    endpoint_url: str | None,
    **order: Any,
) -> None:
    """Launch instances, wait until SSH answers, write the hosts file.

    All of them or none: if one region fails, the instances of the others are terminated. Between
    the nodes all ports are open, from elsewhere only SSH.
    """
    if number < len(regions):
        raise AwsRefused(
            f"{number} instances cannot be in {len(regions)} regions; nothing was launched"
        )
    _check_cidr(order["ssh_from"])
    if hosts_file.exists() and not dry_run:
        raise AwsRefused(
            f"{hosts_file} exists already; choose another --hosts-file; nothing was launched"
        )
    full_order = Order(count=number, images=images(image, regions), key_name=key, **order)
    answers = (lambda address: True) if dry_run else ec2.ssh_answers
    instances = ec2.up(full_order, _calls(dry_run, endpoint_url), _say, answers=answers)
    text = hosts_toml(
        full_order, instances, user, key_file or Path(f"~/.ssh/{key}.pem"), hosts_file
    )
    if dry_run:
        click.echo(text)
    else:
        hosts_file.write_text(text, encoding="utf-8")
        click.echo(f"{hosts_file}: {len(instances)} hosts; scripts/cluster up --hosts {hosts_file}")


@main.command()
@click.option("--region", "regions", callback=_split, help="Default: all.")
@_where
def status(tag: str, regions: Sequence[str], dry_run: bool, endpoint_url: str | None) -> None:
    """The instances of a tag."""
    calls = _calls(dry_run, endpoint_url)
    for region in regions or all_regions(calls):
        for instance in ec2.find(tag, region, calls):
            click.echo(
                f"{region}  {instance.id}  {instance.state:<8}  {instance.public or '-'}  "
                f"{instance.private or '-'}"
            )


@main.command()
@click.option("--region", "regions", callback=_split, help="Default: all.")
@_where
def down(tag: str, regions: Sequence[str], dry_run: bool, endpoint_url: str | None) -> None:
    """Terminate the instances of a tag and remove their security groups."""
    calls = _calls(dry_run, endpoint_url, ["every-instance-of-the-tag"])
    ec2.down(tag, regions or all_regions(calls), calls, _say)


def images(image: str, regions: Sequence[str]) -> dict[str, str]:
    """The image of each region. Raises `AwsRefused` if one has none, or if one AMI is given for
    several.
    """
    if "=" not in image:
        if image.startswith("ami-") and len(regions) > 1:
            raise AwsRefused(
                f"{image} exists in one region only; give --image R=AMI,R2=AMI2; nothing was "
                "launched"
            )
        return dict.fromkeys(regions, image)
    of_region = dict(part.split("=", 1) for part in image.split(",") if "=" in part)
    if missing := [region for region in regions if region not in of_region]:
        raise AwsRefused(f"--image names none for {', '.join(missing)}; nothing was launched")
    return {region: of_region[region] for region in regions}


def all_regions(calls: Calls) -> list[str]:
    return [region["RegionName"] for region in calls(_ANY_REGION, "describe_regions")["Regions"]]


def hosts_toml(
    order: Order, instances: Sequence[Instance], user: str, key: Path, path: Path
) -> str:
    """Nodes in one region use their private addresses. Host keys go to a file of their own, because
    clouds reuse addresses.
    """
    within = len(order.images) == 1
    lines = [
        f"# Made by scripts/aws up; scripts/aws down --tag {order.tag} ends these machines.",
        f"user = {json.dumps(user)}",
        f"key = {json.dumps(str(key))}",
        f"ssh_options = [{json.dumps(f'UserKnownHostsFile={path.resolve()}.known')}]",
    ]
    for instance in instances:
        lines += [
            "",
            f"[[host]]  # {instance.region} {instance.id}",
            f'address = "{instance.public}"',
        ]
        lines += [f'advertise = "{instance.private if within else instance.public}"']
    return "\n".join([*lines, ""])


def _check_cidr(text: str) -> None:
    try:
        ipaddress.IPv4Network(text)
    except ValueError as error:
        raise AwsRefused(
            f"--ssh-from {text}: {error}; such as 203.0.113.7/32; nothing was launched"
        ) from None


def _calls(dry_run: bool, endpoint_url: str | None, instances: Sequence[str] = ()) -> Calls:
    return DryRun(instances) if dry_run else Boto(endpoint_url)


_say = partial(click.echo, err=True)


if __name__ == "__main__":
    main(prog_name="scripts/aws")
