"""From host memory to the device without waiting for it.

Invariant: on CUDA every copy is queued from pinned memory, so the host goes on at once, however much the device still
has to do. torch's allocator of pinned memory gives a block out again only when the copies from it are done.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, behind what the current stream already has to do: for tables, which are small."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_beside(tensors: Sequence[Tensor], copy_stream: torch.cuda.Stream) -> list[Tensor]:
    """The CPU tensors, all of one type, on the stream's device, in one copy that runs beside what is being computed.

    What the current stream does from here on waits for it.
    """
    sizes = [tensor.numel() for tensor in tensors]
    staged = torch.empty(sum(sizes), dtype=tensors[0].dtype, pin_memory=True)
    torch.cat([tensor.flatten() for tensor in tensors], out=staged)
    with torch.cuda.stream(copy_stream):
        sent = staged.to(copy_stream.device, non_blocking=True)
    compute_stream = torch.cuda.current_stream(copy_stream.device)
    compute_stream.wait_stream(copy_stream)
    # The memory is the copy stream's: once freed here, the next upload must not get it before the computation is done.
    sent.record_stream(compute_stream)
    return [part.view(tensor.shape) for part, tensor in zip(torch.split(sent, sizes), tensors, strict=True)]
