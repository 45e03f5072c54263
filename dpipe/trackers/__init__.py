"""A run's numbers where people keep those of all their runs: W&B, MLflow, OpenTelemetry.

    rows of metrics.jsonl ──▶ Background ──queue──▶ thread ──▶ Tracker ──▶ a file or a server
    spans of the trace    ──▶

kinds.py        every tracker and what it needs, each declared once
tracker.py      what a tracker is given
background.py   a tracker on a thread of its own, which the run never waits for
wandb.py        Weights & Biases
mlflow.py       MLflow
otel.py         OpenTelemetry: a span for each step and each action

To add one: write a function of a `TrackedRun` that returns a `Tracker`, and declare it in
`kinds.py`.
"""
