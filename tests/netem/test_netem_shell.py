import os

import pytest

from netem import shell
from netem.shell import NetemError


def test_output_is_returned():
    assert shell.run(["echo", "hello"]) == "hello\n"


def test_failure_names_the_command_and_its_message():
    with pytest.raises(
        NetemError, match=r"`sh -c echo no such luck >&2; exit 3` failed\nno such luck"
    ):
        shell.run(["sh", "-c", "echo no such luck >&2; exit 3"])


def test_command_that_does_not_end_times_out():
    with pytest.raises(NetemError, match=r"`sleep 5` has not ended after 0.05 s"):
        shell.run(["sleep", "5"], timeout_s=0.05)


def test_missing_program_names_its_package(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NetemError, match="tc not found; .* apt-get install iproute2"):
        shell.run(["tc", "qdisc", "show"])


def test_error_without_root_names_the_shaped_transport(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetemError, match="a lab needs root; .*`shaped` transport"):
        shell.require_root("a lab")


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        (
            "RTNETLINK answers: Operation not permitted",
            "this needs root; without root the `shaped` transport",
        ),
        (
            "Error: Specified qdisc kind is unknown.",
            "this kernel lacks a module .*`shaped` transport, or .*lab",
        ),
        ("RTNETLINK answers: No such file or directory", "this kernel lacks a module"),
    ],
)
def test_failure_of_tc_says_what_to_do(message, advice):
    explained = shell.explain(["tc", "qdisc", "add"], message)
    with pytest.raises(NetemError, match=rf"`tc qdisc add` failed: {advice}"):
        raise NetemError(explained)
    assert explained.endswith(message)


def test_failure_to_set_congestion_control_names_the_list_of_those_allowed():
    message = 'sysctl: setting key "net.ipv4.tcp_congestion_control": Operation not permitted'
    explained = shell.explain(["ip", "netns", "exec", "host", "sysctl", "-qw", "..."], message)
    assert "net.ipv4.tcp_allowed_congestion_control lists" in explained
