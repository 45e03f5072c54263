"""What a run leaves on disk, and reads again: checkpoints, and the run's folder.

load.py             a checkpoint's values into the tensors of a model
checkpoint.py       one step's parameters and optimizer state, on a disk or an object store
checkpoint_part.py  what each rank tells of its part of a checkpoint, and its schema
storage.py          the folder or URL of checkpoints: its steps, and files written whole
identity.py         which run a folder of checkpoints is of: any other is refused
tensor_shards.py    a tensor-parallel group's part of a checkpoint, whole again under any other size
run_folder.py       the folder of a run: opened by one process, never written over

To add a format of checkpoints: a file with `save` and `load` of checkpoint.py, which give and take
tensors by the names of the whole model. What is on disk keeps its names, so that earlier runs can
be resumed.
"""
