"""Other trainers' configurations as dpipe's. It needs neither torch nor transformers.

axolotl.py   axolotl's, with a report of what has no counterpart

To add a trainer: a file with a table of its keys beside ours, and its tables in
docs/coming-from.md.
"""
