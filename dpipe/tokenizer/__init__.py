"""Text to token ids, and back. A tokenizer.json may be anybody's: it is applied in a process of its
own, within limits.

tokenizer.py  bytes, or the file that a configuration names; how many ids there are
process.py    a tokenizer.json applied in a process of its own
child.py      that process

To add a tokenizer: a class with the methods of `Tokenizer`, which `open_tokenizer` makes.
"""
