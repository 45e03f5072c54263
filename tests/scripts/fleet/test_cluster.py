"""The commands status, logs, collect, exec and down."""

import json

import pytest

LEAVES = """
folder.mkdir(parents=True, exist_ok=True)
if rank == 0:
    (folder / "metrics.jsonl").write_text('{"step": 1}')
step = folder / "checkpoints/step-00000001"
step.mkdir(parents=True)
(step / "index.json").write_text("{}")
(step / f"model-{rank}.safetensors").write_text("tensors")
print("done", flush=True)
"""
WAITS = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print("waits", flush=True)
time.sleep(60)
"""


def test_status_lists_every_rank_and_host(cloud):
    cloud.play('print("step 3"); sys.exit(rank)')
    cloud.run("--name", "r")
    lines = cloud("status").output.splitlines()
    for number, state in enumerate(["exit code 0", "exit code 1"]):
        (line,) = [line for line in lines if f"127.0.0.{number + 1}:" in line]
        assert {"r", str(number), "step", "3"} <= set(line.split())
        assert state in line


def test_status_names_a_host_that_does_not_answer(cloud):
    hosts = cloud.write_hosts('[[host]]\naddress = "127.0.0.1"\nport = 1\n', name="three.toml")
    done = cloud("status", hosts=hosts)
    assert done.exit_code == 1
    assert "host 127.0.0.1:1 does not answer" in done.output


def test_logs_end_with_the_last_lines_of_each_rank(cloud):
    cloud.play('for n in range(9): print("line", n)')
    cloud.run("--name", "r")
    done = cloud("logs", "-n", "2")
    assert sorted(done.output.splitlines()) == [
        f"rank {r} | line {n}" for r in range(2) for n in (7, 8)
    ]


def test_logs_without_a_run_are_refused(cloud):
    assert "no host has any run" in cloud("logs").output
    done = cloud("logs", "--run", "x")
    assert done.exit_code == 2
    assert "no host has a run x" in done.output


@pytest.mark.slow
def test_collect_brings_all_but_tensors(cloud, tmp_path):
    cloud.play(LEAVES)
    cloud.run("--name", "r")
    done = cloud("collect", "--into", tmp_path)
    assert done.exit_code == 0, done.output
    files = {
        str(path.relative_to(tmp_path / "r"))
        for path in (tmp_path / "r").rglob("*")
        if path.is_file()
    }
    step = "checkpoints/step-00000001"
    outputs = {"output/rank-0.log", "output/rank-1.log"}
    assert files == {"metrics.jsonl", "checkpoints.json", f"{step}/index.json", *outputs}
    index = json.loads((tmp_path / "r/checkpoints.json").read_text())
    assert index[f"127.0.0.2:{cloud.port}"] == {
        f"{step}/index.json": 2,
        f"{step}/model-1.safetensors": 7,
    }


@pytest.mark.slow
def test_collect_puts_every_machine_s_tensors_together(cloud, tmp_path):
    cloud.play(LEAVES)
    cloud.run("--name", "r")
    cloud("collect", "--checkpoints", "--into", tmp_path)
    step = tmp_path / "r/checkpoints/step-00000001"
    assert {path.name for path in step.glob("*.safetensors")} == {
        "model-0.safetensors",
        "model-1.safetensors",
    }


def test_collect_of_an_unknown_run_is_refused(cloud):
    done = cloud("collect", "--run", "x")
    assert done.exit_code == 2
    assert "no host has a run x" in done.output


@pytest.mark.slow
def test_down_stops_ranks_and_takes_profiles_off(cloud):
    cloud.play(WAITS)
    (cloud.root / "near.toml").write_text("delay_ms = 10\nbandwidth_gbps = 1\n")
    cloud("netem", cloud.root / "near.toml")
    cloud.run("--name", "r", "--detach")
    done = cloud("down")
    assert done.exit_code == 0, done.output
    assert cloud("status").output.count("exit code 0") == 2
    assert not (cloud.folder(0) / "shaped").exists()


@pytest.mark.slow
def test_down_kills_what_does_not_stop(cloud):
    cloud.play(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(60)"
    )
    cloud.run("--name", "r", "--detach")
    assert cloud("down", "--grace", "0.5").exit_code == 0
    assert cloud("status").output.count("exit code 137") == 2


@pytest.mark.slow
def test_down_removes_what_was_installed(fresh):
    fresh.play(WAITS)
    fresh.run("--name", "r", "--detach")
    assert fresh("down", "--kill", "--remove").exit_code == 0
    assert not fresh.folder(0).exists()
    assert fresh("down").exit_code == 0  # again, on nothing


def test_exec_runs_on_every_host(cloud):
    done = cloud("exec", "--", "sh", "-c", "echo $SSH_CONNECTION | cut -d' ' -f3")
    assert done.output.splitlines() == [f"127.0.0.{n}:{cloud.port} | 127.0.0.{n}" for n in (1, 2)]


def test_command_that_hangs_is_ended(cloud):
    done = cloud("exec", "--timeout", "0.5", "--", "sleep", "60")
    assert done.exit_code == 1
    assert f"host 127.0.0.2:{cloud.port}: `sleep 60` has not ended after 0.5 s" in done.output
