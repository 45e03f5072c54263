"""A trained model, for other programs: it leaves as Hugging Face's libraries read it.

folder.py       the layers of a checkpoint as a folder that transformers or peft opens
run.py          of a run's newest or best checkpoint
evaluation.py   its model at the tasks of lm-evaluation-harness

To add a format: a function beside `folder.export_run`, and an option of `dpipe export`.
"""
