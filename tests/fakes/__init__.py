"""Stand-ins for what a test machine lacks: GPUs, NCCL and Megatron.

cuda_on_cpu       pytest plugin: a CUDA device for a CPU build of torch, which reports races between streams;
                  whole runs and everything marked `gpu` or `stand_in`
fake_cuda.py      the part of `torch.cuda` that `streams.CudaStreams` uses, on threads: what waits for what
fake_nccl.py      the part of `cupy.cuda.nccl` that `transport.nccl` uses, between threads: full buffers, lost peers
fake_megatron.py  the part of megatron-core that `baselines.megatron` uses, for one rank
cpu_megatron.py   the real megatron-core, where it is installed, as an engine on a CPU

To add a stand-in: refuse what the real thing refuses, and say in its docstring which version was looked at.
"""
