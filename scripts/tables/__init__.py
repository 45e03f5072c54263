"""Published tables beside their predictions, and the assumptions about their systems.

micro_batches.py          GPT-3 XL under GPipe by micro-batch and network
tcp.py                    TCP's slow start on the published networks
waves.py                  products on a GPU, which computes them in waves of tiles
megatron.py               a model of Megatron-LM: memory of a rank, time of a layer
devices.py                GPUs: nominal figures, and the assumptions of a table
megatron_memory_time.py   BERT and GPT-2 345M by sequence length and strategy: memory, relative time
iteration.py              an iteration of tensor x pipeline x data parallel ranks, simulated
scaling.py                rows of tables by layout: predicted iterations, and the errors
gpt3xl.py                 GPT-3 XL by layout and micro-batch: Megatron, and PyTorch's Pipe
bert345m.py               BERT 345M by number of GPUs, in the parts that Megatron timed
measured.py               what scripts/sweep.py measured of these, beside the published values
replayed.py               what it measured on replay stages: tensor parallelism over slow links
by_wire.py                measured steps by wire format, beside what was predicted
form.py                   rows as Markdown, CSV or JSON, and on a page; `Parameter`

Each table is a module with MODES, `simulated(source) -> rows`, `note(rows)`, `draw(rows, figure)`
and PARAMETERS, which declares every figure that the source does not give. A table that can be run
on GPUs also has `published(source)`, by layout. The rows of a simulated table are kept in
`scripts/results/sim/NAME.csv`; a test compares them with today's prediction.
"""

from tables import bert345m, gpt3xl, megatron_memory_time, micro_batches

SIMULATED = {
    "gpt3xl_gpipe_micro_batches": micro_batches,
    "megatron_memory_time": megatron_memory_time,
    **gpt3xl.TABLES,
    **bert345m.TABLES,
}
