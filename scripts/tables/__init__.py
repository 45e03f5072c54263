"""The tables about Megatron's parallelism inside a stage, and what their systems are taken to be.

megatron.py               Megatron-LM as the simulator sees it: memory of a rank, time of a layer
megatron_memory_time.py   BERT and GPT-2 345M by sequence length and strategy: memory, relative time
iteration.py              an iteration of tensor x pipeline x data parallel ranks, simulated
scaling.py                GPT-3 XL and BERT 345M by cut, micro-batch and number of machines
measured.py               what scripts/sweep.py measured of those, beside what was published
replayed.py               what it measured on replay stages: tensor parallelism over slow links
form.py                   rows as Markdown, CSV or JSON

Each table is a module with MODES, `simulated(source) -> rows`, `note(rows)` and `draw(rows,
figure)`; one that can be run on GPUs says `published(source)` by layout.
"""

from tables import megatron_memory_time, scaling

SIMULATED = {"megatron_memory_time": megatron_memory_time, **scaling.TABLES}
