"""What lies between ranks: links, what a rank can send in all, and the profiles that describe them.

link.py      `Link`, `Network`, `Host`
egress.py    what one rank sends through one interface, message by message
profile.py   a network profile: one TOML file, four readers
"""
