"""The published tables beside their predictions, and what their systems are taken to be.

micro_batches.py          GPT-3 XL under GPipe by micro-batch and network
tcp.py                    what TCP does to messages on the published networks
megatron.py               Megatron-LM as the simulator sees it: memory of a rank, time of a layer
devices.py                GPUs: nominal figures, and what a table assumes beside them
megatron_memory_time.py   BERT and GPT-2 345M by sequence length and strategy: memory, relative time
iteration.py              an iteration of tensor x pipeline x data parallel ranks, simulated
scaling.py                rows of tables by cut: how an iteration is predicted, and the errors
gpt3xl.py                 GPT-3 XL by cut and micro-batch: Megatron, and PyTorch's Pipe
bert345m.py               BERT 345M by number of GPUs, in parts as Megatron timed them
measured.py               what scripts/sweep.py measured of those, beside what was published
replayed.py               what it measured on replay stages: tensor parallelism over slow links
form.py                   rows as Markdown, CSV or JSON; `Parameter`

Each table is a module with MODES, `simulated(source) -> rows`, `note(rows)`, `draw(rows, figure)`
and PARAMETERS, which declares every figure that the source does not say; one that can be run on
GPUs says `published(source)` by layout. The rows of a simulated table are kept in
`scripts/results/sim/NAME.csv`, and a test holds them against today's prediction.
"""

from tables import bert345m, gpt3xl, megatron_memory_time, micro_batches

SIMULATED = {
    "gpt3xl_gpipe_micro_batches": micro_batches,
    "megatron_memory_time": megatron_memory_time,
    **gpt3xl.TABLES,
    **bert345m.TABLES,
}
