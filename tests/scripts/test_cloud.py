"""The files that start runs in clouds: each command in them is one that dpipe has."""

import re
import shlex
from pathlib import Path
from typing import Any

import make_reference
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLOUD = ROOT / "scripts/cloud"
SKY = ("sky.yaml", "spot.yaml")


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


@pytest.mark.parametrize("name", SKY)
def test_sky_task_has_the_keys_that_skypilot_knows(name: str) -> None:
    """SkyPilot's own schema is not here: these are the keys of its documentation."""
    task = read(name)
    assert task.keys() <= {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}
    assert task["resources"].keys() <= {"cpus", "memory", "use_spot"}
    assert task["setup"] == "scripts/setup"
    # All that the commands read is set, here or by SkyPilot.
    read_names = set(re.findall(r"\$([A-Z_]+)", task["run"]))
    assert {each for each in read_names if not each.startswith("SKYPILOT_")} <= task["envs"].keys()


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
