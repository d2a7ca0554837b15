"""The hot path in C++. `build.load` makes it a module whose ``NativeEngine`` is the twin of `PythonEngine`.

    module.cpp   what Python sees
    engine       counts gradients, fills buckets, launches them
    hook         on the nodes of autograd; ends before the engine does
    host         calls into Python
    sum          all-reduce of a bucket on the communication stream
    copy         loops over memory
    quantize     the arithmetic of the hooks that send 8 bits or 1 (hooks/stages.py)
    shm/         the process group backend for CPU ranks of one host (shm_backend.py); on Linux
        memory       files that processes share; the arena that tensors lie in
        collective   what a collective does to memory
        board        where ranks post collectives and carry them out
        staging      copies of tensors that lie elsewhere
        work         a collective in flight; futures
        rendezvous   how ranks find each other's memory
        backend      what torch sees

No CUDA header is used: streams and events are torch's generic ones, so that a plain C++ compiler builds it all.
"""
