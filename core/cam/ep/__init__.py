"""Expert parallelism: tokens to the ranks of their experts, and the experts' rows back.

    buffer = cam.ep.Buffer(group, num_experts=64)
    recv, handle = buffer.dispatch(x, topk_idx, topk_weights)      # on every rank
    y = experts(recv.x, recv.expert_counts)
    out = buffer.combine(y, handle)                                # on every rank

`buffer` says which rank has which expert and what travels; `received` is what a dispatch gives; `pending` is its
asynchronous form.
"""

from cam.ep.buffer import Buffer
from cam.ep.pending import Pending
from cam.ep.received import Handle, Received

__all__ = ["Buffer", "Handle", "Pending", "Received"]
