"""The router of a lab: one network stack that every host's interface leads to.

    kernel with sch_netem                  kernel without
    host's eth0 ── veth ── port0           host's eth0 = tap ── vec0, renamed port0
    in the namespace dpipe-NAME-router     in a user-mode Linux guest, its process in that namespace

Both give the lab the same: devices `port0`, `port1`, ... and a shell that runs scripts beside them.
"""

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from netem import shell
from netem.shell import NetemError

BOOT_S = 60.0
SCRIPT_S = 60.0
# The guest reads its console on a signal. If it has missed one, another line brings another.
NUDGE_S = 1.0
MODULES = Path("/usr/lib/uml/modules")
GUEST_PROGRAMS = ("linux.uml", "insmod", "ethtool", "ip", "tc", "setsid", "nice")
# The default of 1,000 packets is 12 ms at 1 Gbit/s: on a busy machine the guest may wait longer.
QUEUE_PACKETS = "10000"

_INIT = """#!/bin/sh
# The guest's only process: loads what shaping needs, then runs each script whose path it is sent.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
stty -echo -icanon
mount -t proc proc /proc && mount -t sysfs sys /sys
cd /usr/lib/uml/modules/"$(uname -r)"/kernel
failed=0
for module in drivers/net/ifb net/sched/sch_ingress net/sched/act_mirred net/sched/cls_u32 \\
    net/sched/sch_htb net/sched/sch_netem; do
    insmod $module.ko || failed=1
done
for vec in /sys/class/net/vec*; do
    number=${vec##*vec}
    ip link set "vec$number" name "port$number" &&
        ip link set "port$number" txqueuelen QUEUE up &&
        ethtool -K "port$number" tso on >/dev/null || failed=1
done
echo "@init $failed"
while read -r script; do
    [ -n "$script" ] || continue
    sh -e "$script" 2>&1
    echo "@$(basename "$script") $?"
done
""".replace("QUEUE", QUEUE_PACKETS)


class Router(Protocol):
    @property
    def kind(self) -> str: ...

    def start(self, hosts: Sequence[str]) -> None:
        """Start, with `port<i>` linked to the device `eth0` of the namespace hosts[i]."""

    def run(self, script: str) -> str:
        """Run a shell script where the ports are; returns what it prints. Raises `NetemError` with
        that output if a command fails.
        """


@dataclass(frozen=True)
class NamespaceRouter:
    namespace: str
    kind: str = "namespace"

    def start(self, hosts: Sequence[str]) -> None:
        shell.run(["ip", "netns", "add", self.namespace])
        for i, host in enumerate(hosts):
            peer = ["peer", "name", "eth0", "netns", host]
            shell.run(
                ["ip", "-n", self.namespace, "link", "add", f"port{i}", "type", "veth", *peer]
            )
            shell.run(["ip", "-n", self.namespace, "link", "set", f"port{i}", "up"])

    def run(self, script: str) -> str:
        return shell.run(
            ["ip", "netns", "exec", self.namespace, "sh", "-ec", script], timeout_s=SCRIPT_S
        )


@dataclass(frozen=True)
class GuestRouter:
    """`folder` holds its console, the pipe to it and its scripts; the guest reads them through
    hostfs.
    """

    namespace: str
    folder: Path
    kind: str = "guest"

    def start(self, hosts: Sequence[str]) -> None:
        shell.require_programs(*GUEST_PROGRAMS)
        if not any(MODULES.glob("*/kernel/net/sched/sch_netem.ko")):
            raise NetemError(f"{MODULES} holds no sch_netem.ko; run scripts/apt-lab")
        shell.run(["ip", "netns", "add", self.namespace])
        for i in range(len(hosts)):
            shell.run(
                ["ip", "-n", self.namespace, "tuntap", "add", f"port{i}", "mode", "tap", "vnet_hdr"]
            )
            shell.run(
                [
                    "ip",
                    "-n",
                    self.namespace,
                    "link",
                    "set",
                    f"port{i}",
                    "txqueuelen",
                    QUEUE_PACKETS,
                    "up",
                ]
            )
        self._boot(len(hosts))
        # The guest holds its end of a tap by a file descriptor, so the other end may move under it.
        for i, host in enumerate(hosts):
            shell.run(
                [
                    "ip",
                    "-n",
                    self.namespace,
                    "link",
                    "set",
                    f"port{i}",
                    "netns",
                    host,
                    "name",
                    "eth0",
                ]
            )

    def run(self, script: str) -> str:
        # A new name each time: the guest's hostfs may cache the content of an older file.
        path = self.folder / f"script-{time.monotonic_ns()}"
        path.write_text(script, encoding="utf-8")
        offset = self._console.stat().st_size
        self._tell(f"{path}\n")
        return self._await(path.name, offset, SCRIPT_S)

    @property
    def _console(self) -> Path:
        return self.folder / "console"

    @property
    def _pipe(self) -> Path:
        return self.folder / "pipe"

    def _boot(self, num_ports: int) -> None:
        init = self.folder / "init"
        init.write_text(_INIT, encoding="utf-8")
        init.chmod(0o700)
        os.mkfifo(self._pipe, 0o600)
        kernel = [
            "linux.uml",
            "mem=512M",
            "rootfstype=hostfs",
            "rootflags=/",
            "ro",
            "quiet",
            f"init={init}",
        ]
        control = [f"uml_dir={self.folder}", "umid=router", "con=null", "con0=fd:0,fd:1"]
        ports = [f"vec{i}:transport=tap,ifname=port{i},gro=1" for i in range(num_ports)]
        # nice -20: the network must not wait for the programs that are tested on it.
        enter = ["setsid", "--fork", "ip", "netns", "exec", self.namespace, "nice", "-n", "-20"]
        # Opened for both, so that the guest never reads an end of file between two scripts.
        with (
            open(os.open(self._pipe, os.O_RDWR), "rb") as pipe,
            self._console.open("wb") as console,
        ):
            subprocess.run(
                [*enter, *kernel, *control, *ports],
                stdin=pipe,
                stdout=console,
                stderr=console,
                check=True,
                timeout=BOOT_S,
            )
        self._await("init", 0, BOOT_S)

    def _tell(self, line: str) -> None:
        """Write to the guest. Raises `NetemError` if it has ended."""
        try:
            pipe = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
            with open(pipe, "w", encoding="utf-8") as console:
                console.write(line)
        # It may end before it is opened, or after.
        except OSError as error:
            raise NetemError(
                f"the lab's router has ended ({error}); take the lab down and up again"
            ) from None

    def _await(self, name: str, offset: int, timeout_s: float) -> str:
        """What precedes `@name STATUS` on the console. Raises `NetemError` with it if STATUS is not
        0.
        """
        began, num_nudges = time.monotonic(), 0
        while (passed_s := time.monotonic() - began) < timeout_s:
            output = self._console.read_bytes()[offset:].decode(errors="replace").replace("\r", "")
            before, mark, after = output.partition(f"@{name} ")
            if mark and "\n" in after:
                if (status := after.split()[0]) != "0":
                    raise NetemError(f"the router's script failed ({status}):\n{before.strip()}")
                return before
            nudge = passed_s > (num_nudges + 1) * NUDGE_S
            num_nudges += nudge
            self._tell("\n" if nudge else "")  # it may have ended meanwhile
            time.sleep(0.02)
        raise NetemError(
            f"the router has not answered within {timeout_s:g} s; see its console: {self._console}"
        )
