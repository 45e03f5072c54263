"""Where it all meets: the only room that knows more than one of the specialists.

executor.py    runs a rank's program over stages and a transport
recorder.py    writes the spans of what it does
feed.py        a step's data, a function of seed and step; data.py: text to tokens; pairs.py: what BERT reads of them
update.py      what ranks agree on before the optimizer step, and the step
trainer.py     the loop; metrics.py: where its numbers go; display.py: what a person sees; rehearsal.py: a step before
               the first, without messages, for NCCL
checkpoint.py  safetensors by layer names, any cut; resume.py: going on from one
forecast.py    what a run will take, before it starts, without torch; arithmetic.py: its layers by formula; sizes.py,
               memory.py, exchange_memory.py, fit.py: what it holds, and whether that fits;
               run_plan.py: all of it checked
join.py        how a rank comes among the others; replicas.py: its seat, and how its replicas agree
stages.py      a rank's stages; build.py: configuration in, running rank out: the only composition root
serving.py     where parameter servers live: in ranks of replica 0, or `dpipe serve`
tensor.py      the ranks that hold a stage together, on one machine; shards.py: what they write down and read;
               tensor_cost.py: what it takes them to be one, without torch; replayed.py: those of
               replayed stages
trace.py       the last steps of all ranks beside their prediction
report.py      the summary at the end of a run
generate.py    text from a checkpoint
launch.py      all ranks as local processes: the only reader of the environment; leash.py: they end with the launcher
"""
