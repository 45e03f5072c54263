"""A whole cluster in one thread, on a virtual clock: elastic runs under seeded faults.

    seed ──▶ faults.py ──▶ cluster.py: machines (machine.py), coordinators (head.py), a network
                               │
                               └──▶ truth.py: was there ever more than one truth, or less?

served.py is a parameter server by itself. heads.py is the same for coordinators that take over from
each other.

What decides is dpipe's own: `elastic.rendezvous`, `elastic.attendance`, `keeper.pieces`,
`terms.policy`. The rest stands in for processes, sockets and training. A seed gives the same run
each time.
"""
