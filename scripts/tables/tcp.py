"""TCP's slow start on the published networks: virtual machines of AWS with NCCL over sockets.

A connection that was idle for longer than its timeout restarts with ten segments, and sends twice
as many each round trip until the link is full (RFC 2861, RFC 6928; Linux's default):

    round trip    1   2     3         4
    link         [w ][2w  ][4w      ][full ..............
                  \\_ the unused rest is the start-up

In a step of GPipe it slows the first message of every hop, in each direction. The later messages
follow closely and are late by the same time.
"""

from dataclasses import dataclass, replace

from dpipe.network.link import Link
from tables.form import Parameter


@dataclass(frozen=True)
class Frames:
    """What a network carries at a time, and the messages' share of it."""

    frame_bytes: Parameter
    payload_bytes: Parameter

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.frame_bytes, self.payload_bytes


_PAYLOAD = "nominal: what IP and TCP with timestamps leave of it"
JUMBO = Frames(
    Parameter(
        "Ethernet frame", 9015, "bytes", "nominal: AWS's MTU within a region, 9001, and its header"
    ),
    Parameter("payload of a frame", 8949, "bytes", _PAYLOAD),
)
STANDARD = Frames(
    Parameter("Ethernet frame", 1514, "bytes", "deduced from all rows: of the two usual MTUs 1500"),
    Parameter("payload of a frame", 1448, "bytes", _PAYLOAD),
)
SOCKETS = Parameter(
    "sockets of a hop", 16, "", "nominal: NCCL's default on AWS, 2 threads of 8 sockets"
)
FIRST_SEGMENTS = Parameter(
    "segments that a quiet socket begins with", 10, "", "nominal: Linux, RFC 6928"
)
PARAMETERS = (SOCKETS, FIRST_SEGMENTS)


def for_payload(link: Link, frames: Frames = JUMBO) -> Link:
    """`link` as messages see it: netem's rate includes the headers of packets."""
    share = frames.payload_bytes.value / frames.frame_bytes.value
    return replace(link, bandwidth_gbps=link.bandwidth_gbps * share)


def after_quiet(link: Link, num_bytes: int, frames: Frames = JUMBO) -> Link:
    """`link` for a message of `num_bytes` of the published systems, with the start-up as delay."""
    link = replace(for_payload(link, frames), window_bytes=None)
    return replace(link, delay_ms=link.delay_ms + start_up_ms(link, num_bytes, frames))


def start_up_ms(link: Link, num_bytes: int, frames: Frames = JUMBO) -> float:
    """How much later the message arrives than over connections that fill the link at once."""
    round_trip_ms = 2 * link.delay_ms
    bytes_a_ms = link.bandwidth_gbps * 1e6 / 8
    window = SOCKETS.value * FIRST_SEGMENTS.value * frames.payload_bytes.value
    sent = 0.0
    taken_ms = 0.0
    while sent < num_bytes and window < bytes_a_ms * round_trip_ms:
        burst = min(window, num_bytes - sent)
        taken_ms += round_trip_ms * burst / window
        sent += burst
        window *= 2
    return taken_ms - sent / bytes_a_ms
