"""What a person sees of a run, while it trains and after it.

chrome.py       a timeline as a trace for Perfetto and chrome://tracing
display.py      rows of metrics on rank 0's terminal: a live line, or plain lines elsewhere
efficiency.py   how much of a device's arithmetic a step uses (no torch)
metrics.py      rows of metrics on disk: metrics.jsonl and TensorBoard
prometheus.py   rows of metrics for Prometheus, which asks for them
rows.py         rows of metrics on their way from rank 0 to the process that launched it
pace.py         how far a bench is and how long it will take; the minute of `--quick`
summary.py      the summary that rank 0 prints at the end of a run
processor_time.py  where the processor time of a rank's steps went
timers.py       where a rank's time goes, by the names of Megatron-LM's timers
trace.py        the last steps' spans of every rank beside the prediction; the Chrome trace
tracking.py     rows and spans for the trackers of run.trackers
trace_file.py   what the files of a trace may hold

To add a number to the rows: put it in the row that `engine/trainer.py` writes. metrics.py stores
any number, also one level down; display.py shows those that `describe` names.
"""
