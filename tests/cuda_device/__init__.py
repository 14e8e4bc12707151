"""A simulated CUDA device in torch's CPU build: run code for GPUs on machines without one.

Tensors are on `cuda:N` with CUDA's dispatch keys: autocast, autograd, Lightning and transformers
take their CUDA branches. Kernels are torch's CPU kernels on the same memory. Unlike a CPU, and like
a GPU:

- tensors of the CPU and of a device, or of two devices, do not mix;
- memory is counted and limited, and fresh memory is not zero;
- launches of kernels and waits of the host are counted;
- random numbers belong to the device;
- CUDA graphs are recorded and replayed, and a capture raises on waits;
- a non-blocking copy to the host has no values until the host waits;
- NCCL takes only tensors on the current device.

It does not show rounding of CUDA's kernels, times, races between streams (all work is done in the
order of its submission), fragmentation of CUDA's allocator, errors of cuBLAS, cuDNN and the driver,
or NCCL's own failures. vLLM, bitsandbytes and Triton do not run on it. It is compiled once, in
minutes, by the system's C++ compiler (Linux, CPU build of torch), and kept in ~/.cache/litgrpo.

    python -m tests.cuda_device cli.py fit -c configs/quickstart.yaml -c configs/hardware/cuda.yaml
    python -m tests.cuda_device -m pytest tests/distributed/test_cuda.py

Environment:

    CUDA_DEVICE_COUNT=1     number of devices
    CUDA_DEVICE_LIMIT_MB    memory of each; default: 80 GiB
    CUDA_DEVICE_FLOAT64=0   raise TypeError for float64, as Apple's devices do
    HIDDEN_PACKAGES         packages that are not found, such as accelerate,peft
"""
