"""One stream of bytes each way between two ranks.

stream.py    the bytes of one TCP or TLS connection
greeting.py  how the two ends of a connection prove that they know the token

To change what is said first: greeting.py and transport.proto say it together, and `PROTOCOL` of
transport/mesh.py counts up.
"""
