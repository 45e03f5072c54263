"""Slow and uneven networks, made by the kernel's own shaping. Needs root; dpipe never imports it.

tc       a node's share of a network profile as `tc` commands; pure
apply    runs them on a real device, and undoes them
probe    measures a link: round trips, loss, rate
measure  probes, run on the hosts of a lab
lab      hosts as network namespaces around one router that shapes every link
router   the router: a namespace, or a user-mode Linux guest where the kernel has no sch_netem
shell    runs commands, and says what is missing when one fails
cli      the commands
"""
