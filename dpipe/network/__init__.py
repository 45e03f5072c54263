"""What lies between ranks: links, what one rank can send in all, and profiles that describe them.
No torch.

link.py        `Link`, `Interface`, `Network`, `Host`
shared_rate.py messages that share one rate: whose moves, and how fast
egress.py      what one interface sends, and what it takes in
in_transit.py  what one rank has sent and has not arrived: egress, then delay; what that cannot say
profile.py     a network profile: one TOML file, four readers

To add a property of links: a field of `Link` with its check, a key in profile.py, and what it does
in each of the four readers: the simulator and the shaped transport (both by egress.py),
`netem/tc.py`, and the label of a table's row.
"""
