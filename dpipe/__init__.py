"""dpipe: pipeline-parallel training over slow, uneven networks.

The rooms, from the ground up; arrows point down only (`tests/test_architecture.py` holds them):

    front door   cli
    comparison   baselines
    meeting      engine        executor, recorder, trainer, checkpoint, launch
    specialists  timeline (when)  stage (a slice of the model)  transport (moving a tensor)
                 dataparallel (replicas agree)  coordinator (who is there)
    alphabets    schedule (what runs where in which order)  wire (bytes)
    ground       config  topology  errors
"""

__version__ = "0.1.0"
