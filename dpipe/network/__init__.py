"""What lies between ranks: links, what a rank can send in all, and the profiles that describe them.

link.py      `Link`, `Network`, `Host`
egress.py    what one rank sends through one interface, message by message
in_transit.py  what one rank has sent and has not arrived: egress, then delay
profile.py   a network profile: one TOML file, four readers
"""
