"""Links of ranks that cannot dial each other: the coordinator's machine passes their bytes.

reach.py   who can dial whom, and the way that each link takes
ends.py    `RelayEnds`: a rank's doorways to ranks behind the relay, and how it is dialled there
server.py  `Relay`: pairs what two ranks have opened, and passes the bytes

    rank 1 (lower: dials)                coordinator's port                 rank 2
    transport --> doorway ==gRPC stream==> Relay <==gRPC stream== ear --> its own listener

The transports know nothing of it: one dials a port of its own machine, the other is dialled from
there. Their greetings, token and TLS are between the two ends, as on any link; the hop to the
relay has a token and TLS of its own.

To add a request to the relay: a method of its gRPC service in server.py, beside `METHOD`.
"""
