"""One stream of bytes each way between two ranks, over connections that break.

session.py   `LinkSession`, a state machine: what a connection has left undone, the next one does
frames.py    what is written on a connection: bytes of the session, and which of the other's arrived
stream.py    the bytes of one TCP or TLS connection
uplink.py    turns on the way out of a machine, where its links share a slow one
window.py    what TCP lets it send at once: through pauses, and past losses
dial.py      who opens a connection, and how: in smaller segments where large ones were lost
forward.py   smaller segments for gRPC, which opens its connections itself
stops.py     when this process did not run, so that silence is no sign
redial.py    another connection in the place of one that broke
listen.py    the socket on which others dial
lobby.py     the threads of connections that have not greeted yet
greeting.py  how the two ends of a TCP connection prove who they are
grpc_stream.py  the bytes of one gRPC stream, how it is opened and greets

To change what is written on a connection: frames.py, greeting.py and transport.proto say it
together, and `PROTOCOL` of transport/mesh.py counts up.
"""
