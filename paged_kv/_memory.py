"""Large allocations on huge pages, where Linux has them."""

import mmap
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20  # bytes; of x86-64, and of arm64 with pages of 4 KiB


def allocate(nbytes: int, device: torch.device) -> tuple[Tensor, bool]:
    """Uninitialised bytes ``[nbytes]`` on `device`, and whether huge pages were asked for.

    On the CPU, from the size of a huge page on, an anonymous mapping that begins at a huge page's boundary
    and is marked with madvise(2), MADV_HUGEPAGE. The system commits such a page when it is first touched, all
    zero, if it has one to give then; else pages of the usual size. On another device or system, and where a mode of
    torch makes tensors without memory (FakeTensorMode), torch.empty.

    Raises:
        MemoryError: the system refuses the mapping.
    """
    has_memory = type(torch.empty(0)) is Tensor
    if device.type != "cpu" or nbytes < HUGE_PAGE or not has_memory or not huge_pages_on_request():
        return torch.empty(nbytes, dtype=torch.uint8, device=device), False
    try:
        mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes} bytes of memory for the cache: {error}") from None
    mapping.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(
        mapping, dtype=torch.uint8
    )  # holds the mapping for as long as a view of it lives
    return everything[-everything.data_ptr() % HUGE_PAGE :][:nbytes], True


def apart(view: Tensor) -> Tensor:
    """The same elements as a tensor with a storage of its own, which begins with it.

    Where a compiled graph writes to a view inside a larger storage, torch 2.13's inductor writes back what it was
    before (one that begins later than the storage), and for many views of one storage it compiles for minutes longer.
    """
    if view.device.type not in ("cpu", "cuda") or type(view) is not Tensor:  # one without memory
        return view
    exchanged = view.view(torch.int8) if view.dtype.itemsize == 1 else view  # DLPack may not know fp8
    return torch.from_dlpack(exchanged).view(view.dtype)


def keep_what_is_freed() -> None:
    """Has glibc keep up to 64 MiB of freed memory for the next allocations, instead of the system.

    A model's step makes and drops tensors of megabytes in every layer. While glibc hands each back at once, as it
    does at first, its pages are mapped and zeroed anew every time: a quarter of the first prefills of SmolLM2-135M.
    glibc learns from the size of what is freed, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD), so it is shown that much
    once, untouched. Where malloc is another, or was told its thresholds, nothing changes.
    """
    torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)


def huge_pages_on_request() -> bool:
    """Whether this system gives huge pages to who asks for them with madvise(2)."""
    try:
        mode = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in mode


def huge_page_bytes(memory: Tensor) -> int:
    """Bytes on huge pages by now in the mapping around `memory`, which Linux may have joined with others."""
    address, inside = memory.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # the head of a mapping: "7f00-7f10 rw-p ..."
            first, last = (int(x, 16) for x in name.split("-"))
            inside = first <= address < last
        elif inside and name == "AnonHugePages:":
            return int(rest[0]) << 10
    return 0
