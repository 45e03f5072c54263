"""Stand-ins for what a test machine lacks: GPUs, NCCL and Megatron.

cuda_on_cpu/      pytest plugin: a CUDA device for a CPU build of torch, which reports races
                  between streams; for whole runs, and all tests marked `gpu` or `stand_in`
fake_cuda.py      what `CudaStreams` uses of `torch.cuda`, on threads: what waits for what
fake_nccl.py      what `transport.nccl` uses of cupy's NCCL, on threads: full buffers, lost peers
fake_megatron.py  what `baselines.megatron` uses of megatron-core, for one rank
cpu_megatron.py   the real megatron-core, where it is installed, as an engine on a CPU

To add a stand-in: refuse what the real thing refuses, and name the version that you looked at.
"""
