"""Commands through OpenSSH's client: results, errors, and that nothing is left behind."""

import time
from tempfile import TemporaryDirectory

import pytest
from fleet import ssh
from fleet.hosts import load_hosts
from fleet.ssh import HostFailed, HostRefused, Unreachable, connected, each

DISCONNECT = ssh.Machine.disconnect  # the original, not the tests' shared connections


@pytest.fixture
def machines(bare):
    with connected(load_hosts(bare.root / "hosts.toml").hosts) as machines:
        yield machines


def test_command_gets_bytes_and_gives_bytes(machines):
    assert machines[0].run("cat; echo said >&2", stdin=b"\0\xff") == b"\0\xff"


def test_failed_command_is_shown_with_its_output(machines):
    with pytest.raises(HostFailed) as error:
        machines[0].run("echo out; echo oops >&2; exit 7")
    assert (
        str(error.value)
        == f"host {machines[0].host.name}: `echo out; echo oops >&2; exit 7` failed (7):\nout\noops"
    )


def test_commands_on_one_machine_share_a_connection_that_ends_with_the_block(
    bare, command_lines, monkeypatch
):
    monkeypatch.setattr(ssh, "TemporaryDirectory", TemporaryDirectory)
    monkeypatch.setattr(ssh.Machine, "disconnect", DISCONNECT)
    hosts = load_hosts(bare.root / "hosts.toml").hosts[:1]
    with connected(hosts) as (machine,):
        ports = {machine.run("echo $SSH_CONNECTION") for _ in range(2)}
        assert len(ports) == 1
        shared = [
            words[0] for words in command_lines() if words[0].startswith(f"ssh: {machine.socket}")
        ]
        assert len(shared) == 1
    deadline = time.monotonic() + 5
    while (
        left := [words for words in command_lines() if words[0] in shared]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_same_on_all_names_every_machine_where_it_failed(machines):
    with pytest.raises(HostFailed) as error:
        each(machines, lambda machine: machine.run("echo no; exit 1"))
    assert [line for line in str(error.value).splitlines() if line != "no"] == [
        f"host {machine.host.name}: `echo no; exit 1` failed (1):" for machine in machines
    ]


def test_refusals_alone_are_input_errors(machines):
    def refuse(machine):
        raise HostRefused("no") if machine is machines[0] else Unreachable("nobody")

    with pytest.raises(HostRefused, match="no\nnobody"):
        each(machines, refuse)


def test_bug_of_ours_is_not_reported_as_a_machines_failure(machines):
    def fail(machine):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        each(machines, fail)


def test_wrong_host_key_is_refused(bare, monkeypatch):
    monkeypatch.setattr(ssh, "TemporaryDirectory", TemporaryDirectory)
    path = bare.root / "hosts.toml"
    known = bare.root / "known"
    known.write_text(f"[127.0.0.1]:{bare.port} {(bare.keys.folder / 'user.pub').read_text()}")
    path.write_text(path.read_text().replace(f"{bare.keys.folder}/known", str(known)))
    words = r"(?s)does not answer: .*REMOTE HOST IDENTIFICATION HAS CHANGED"
    with (
        connected(load_hosts(path).hosts[:1]) as (machine,),
        pytest.raises(Unreachable, match=words),
    ):
        machine.run("true")
