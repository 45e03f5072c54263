"""Who coordinates an elastic run, where its coordinator's machine may be lost: one holder a term,
as records at a URL say that all machines reach.

records.py      what is written there, and its schemas
policy.py       what a standby decides, and what a holder may still answer
storing.py      the records at the URL: a term is created by one alone
copying.py      what of a coordinator's folder is copied there, and brought from there
tenancy.py      what a coordinator asks of its term, and of none
holding.py      a coordinator's term, while it has it
standing_by.py  what a standby does, until the next term is its own
following.py    how a machine finds the coordinator that has taken over

To add a file system: its protocol in storing.py, once two processes that create one name at once
have been seen to be told apart there.
"""
