"""Other engines on our configuration: their ranks start as ours do and leave the same rows.

foreign.py            one rank of another engine on our configuration: same place, same rows
fsdp.py               the GPT on torch alone: torch.distributed.pipelining, FSDP2 over replicas
megatron.py           the GPT or BERT on megatron-core: tensor x pipeline x data parallel
megatron_weights.py   our parameters by Megatron's names, and each tensor-parallel rank's part
torch_replay.py       torch.distributed.pipelining on a replay configuration, a process a rank
torch_schedule.py     one of our schedules as a schedule of torch.distributed.pipelining

To add an engine: `check_config` and `make_step`, as in `fsdp.py`.
"""
