"""The tables about Megatron's parallelism inside a stage, and what their systems are taken to be.

megatron.py               Megatron-LM as the simulator sees it: memory of a rank, time of a layer, by strategy
megatron_memory_time.py   BERT and GPT-2 345M by sequence length and strategy: peak memory, time over the baseline
form.py                   rows as Markdown, CSV or JSON

Each table is a module with `simulated(source) -> rows`, `note(rows)` and `draw(rows, figure)`.
"""

from tables import megatron_memory_time

SIMULATED = {"megatron_memory_time": megatron_memory_time}
