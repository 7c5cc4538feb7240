"""Makes this workspace's caching allocator PyTorch's own.

    import gpu_alloc
    gpu_alloc.install("path/to/liballoc_torch.so")   # before anything is allocated on a GPU

GPU_ALLOC_CONF takes the settings of PYTORCH_CUDA_ALLOC_CONF, GPU_ALLOC_POLICY `ours` or `pytorch`.
"""

import ctypes
import json

import torch

_library = None
_sources = []


def _load(path):
    library = ctypes.CDLL(path)
    library.gpu_alloc_stats.restype = ctypes.c_size_t
    library.gpu_alloc_last_error.restype = ctypes.c_size_t
    library.gpu_alloc_check.restype = ctypes.c_bool
    library.gpu_alloc_reset_peak_stats.restype = ctypes.c_bool
    return library


def install(path):
    """Loads the library and makes it the allocator of all CUDA devices of this process."""
    global _library
    library = _load(path)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "gpu_alloc_malloc", "gpu_alloc_free")
    hooks = allocator.allocator()
    for setter, function in [
        ("set_init_fn", "gpu_alloc_init"),
        ("set_reset_fn", "gpu_alloc_reset"),
        ("set_memory_fraction_fn", "gpu_alloc_set_memory_fraction"),
        ("set_base_alloc_fn", "gpu_alloc_base"),
        ("set_record_stream_fn", "gpu_alloc_record_stream"),
        ("set_begin_allocate_to_pool", "gpu_alloc_begin_pool"),
        ("set_end_allocate_to_pool_fn", "gpu_alloc_end_pool"),
        ("set_release_pool", "gpu_alloc_release_pool"),
    ]:
        # record_stream must be there; without the others something is merely less good.
        address = ctypes.cast(getattr(library, function), ctypes.c_void_p).value
        if setter == "set_record_stream_fn" or hasattr(hooks, setter):
            getattr(hooks, setter)(address)
    torch.cuda.memory.change_current_allocator(allocator)
    _library = library
    return allocator


def mem_pool(path):
    """A torch.cuda.MemPool whose segments come from the library, while PyTorch's own allocator is the
    one in charge. Use it with torch.cuda.use_mem_pool. `stats` tells what it holds."""
    global _library
    _library = _library or _load(path)
    source = torch.cuda.memory.CUDAPluggableAllocator(path, "gpu_alloc_malloc", "gpu_alloc_free")
    pool = torch.cuda.MemPool(source.allocator())
    # Whoever frees its last segment needs the source.
    _sources.append(source)
    return pool


def stats(device=0):
    """The statistics of a device, under the names of torch.cuda.memory_stats."""
    return json.loads(_text(lambda buffer, size: _library.gpu_alloc_stats(device, buffer, size)))


def reset_peak_stats(device=0):
    """As torch.cuda.reset_peak_memory_stats."""
    if not _library.gpu_alloc_reset_peak_stats(device):
        raise RuntimeError(last_error())


def check():
    """Recomputes the state of the allocator from scratch and raises if anything is wrong."""
    if not _library.gpu_alloc_check():
        raise RuntimeError(last_error())


def last_error():
    """Why the last failed call on this thread failed."""
    return _text(_library.gpu_alloc_last_error)


def _text(call):
    length = call(None, ctypes.c_size_t(0))
    buffer = ctypes.create_string_buffer(length + 1)
    call(buffer, ctypes.c_size_t(length + 1))
    return buffer.value.decode()
