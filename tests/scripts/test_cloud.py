"""The files that start runs in clouds: each is of the schema of its service, and each command in
them is one that dpipe has.
"""

import importlib
import json
import re
import shlex
from copy import deepcopy
from pathlib import Path
from typing import Any

import make_reference
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLOUD = ROOT / "scripts/cloud"
SCHEMAS = Path(__file__).parent / "schemas"
SKY = ("sky.yaml", "spot.yaml")


def jsonschema() -> Any:
    """Its import takes a second, which every worker would pay as it collects the tests."""
    return importlib.import_module("jsonschema")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLOUD / name).read_text())


def jobs() -> dict[str, dict[str, Any]]:
    return {
        job["name"]: job["template"]["spec"]
        for job in read("jobset.yaml")["spec"]["replicatedJobs"]
    }


def shown_commands() -> list[list[str]]:
    """All of them, without `dpipe` in front."""
    found = []
    for name in SKY:
        task = read(name)
        text = task["run"] + "\n" + (CLOUD / name).read_text()
        for line in re.findall(r"dpipe ((?:train|coordinate|join) [^#\n]+)", text):
            # What the cloud fills in.
            line = re.sub(r'"\$SKYPILOT_NODE_RANK"', "1", line)
            line = re.sub(r'"\$SKYPILOT_NUM_NODES"', "4", line)
            line = line.replace('"$NOTICE"', task.get("envs", {}).get("NOTICE", "aws"))
            found.append(
                shlex.split(
                    line.replace('"$first:7000"', "10.0.0.1:7000").replace(
                        '"$COORDINATOR"', "10.0.0.1:7000"
                    )
                )
            )
    for job in jobs().values():
        for container in job["template"]["spec"]["containers"]:
            found.append(container["args"])
    return found


@pytest.mark.parametrize("arguments", shown_commands(), ids=lambda arguments: arguments[0])
def test_command_is_one_that_dpipe_takes(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").touch()
    dpipe = make_reference.command("dpipe")
    command = dpipe.commands[arguments[0]]
    given = ["job.toml" if word == "/job/job.toml" else word for word in arguments[1:]]
    with command.make_context(arguments[0], given) as context:
        assert not context.args


def check(table: dict[str, Any], schema_name: str) -> None:
    """By a schema that schemas/make.py has made of the service's own package."""
    schema = json.loads((SCHEMAS / schema_name).read_text())
    validator = jsonschema().validators.validator_for(schema)
    validator(schema).validate(table)


@pytest.mark.parametrize("name", SKY)
def test_sky_task_is_of_skypilots_schema(name: str) -> None:
    check(read(name), "skypilot-task.json")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [({"num_node": 4}, "num_node"), ({"resources": {"use_spots": True}}, "use_spots")],
)
def test_sky_schema_refuses_a_key_that_skypilot_does_not_have(
    change: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(jsonschema().ValidationError, match=complaint):
        check(read("spot.yaml") | change, "skypilot-task.json")


@pytest.mark.parametrize("name", SKY)
def test_sky_task_sets_all_that_its_commands_read(name: str) -> None:
    task = read(name)
    assert task["setup"] == "scripts/setup"
    read_names = set(re.findall(r"\$([A-Z_]+)", task["run"]))
    own_names = {each for each in read_names if not each.startswith("SKYPILOT_")}
    assert own_names <= task.get("envs", {}).keys()
    # Which every dpipe reads in its environment.
    assert "DPIPE_TOKEN" in task["secrets"]


def test_jobset_is_of_its_schema_down_to_its_containers() -> None:
    check(read("jobset.yaml"), "jobset.json")


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        (("spec", "replicatedJobs", 0, "template", "spec"), "backOffLimit"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec"), "gracePeriod"),
        (("spec", "network"), "hostnames"),
    ],
)
def test_jobset_schema_refuses_a_key_that_kubernetes_does_not_have(
    path: tuple[str | int, ...], complaint: str
) -> None:
    table = deepcopy(read("jobset.yaml"))
    inner: Any = table
    for key in path:
        inner = inner[key]
    inner[complaint] = 1
    with pytest.raises(jsonschema().ValidationError) as refused:
        check(table, "jobset.json")
    assert complaint in str(refused.value)


def test_jobs_choose_what_kubernetes_lets_them_choose() -> None:
    """The schema has these as texts."""
    for job in jobs().values():
        assert job["completionMode"] in ("Indexed", "NonIndexed")
        assert job["template"]["spec"]["restartPolicy"] in ("Never", "OnFailure")
    assert read("jobset.yaml")["spec"]["successPolicy"]["operator"] in ("All", "Any")


def test_machines_of_the_jobset_dial_the_coordinators_pod() -> None:
    table = read("jobset.yaml")
    assert (table["apiVersion"], table["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name = table["metadata"]["name"]
    container = jobs()["machines"]["template"]["spec"]["containers"][0]
    assert container["args"][1] == f"{name}-coordinator-0-0.{name}:7000"
    assert table["spec"]["network"]["enableDNSHostnames"]


def test_jobset_mounts_the_volumes_that_it_names() -> None:
    for job in jobs().values():
        pod = job["template"]["spec"]
        named = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} == named


def test_machine_that_is_evicted_has_time_to_leave() -> None:
    pod = jobs()["machines"]["template"]["spec"]
    arguments = pod["containers"][0]["args"]
    leaving_s = float(arguments[arguments.index("--leave-within") + 1])
    assert leaving_s < pod["terminationGracePeriodSeconds"]


def test_image_copies_what_the_setup_reads() -> None:
    lines = (CLOUD / "Dockerfile").read_text().splitlines()
    copied: set[str] = set()
    for line in lines:
        if line.startswith("COPY "):
            copied.update(line.split()[1:-1])
    assert copied == {
        "setup.py",
        "pyproject.toml",
        "README.md",
        "protos",
        "netem",
        "scripts",
        "dpipe",
    }
    assert all((ROOT / name).exists() for name in copied)
    assert "RUN scripts/setup" in lines
