"""Combine: expert results go back to the tokens' owners, who sum them with the router's weights.

Algorithm: CAM's throughput combine. Push per row with a flag per row; the owner waits token by token and accumulates
in fp32, so that summing starts while other rows are still on their way.

Combines have epochs of their own, so that one dispatch may be combined several times. Window layout, one half by
epoch % 2:

    slot of (t, k)    H elements of the payload type    at (t * K + k) * H
    flag of (t, k)    int32 [8]                         at (t * K + k) * 8

    ready flag of rank s    int32 [8]                   at s * 8

Flag protocol: a rank that enters combine n raises its ready flag to n at every peer (notify.raise_flag) and pushes when
all ready flags have reached n - 1: then no owner still reads the half that is written now. Per row: row, full barrier,
flag = epoch in all 8 lanes. CAM clears flags after use; here epochs grow instead, so the owner never writes to memory
that a peer writes.

Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cam_kernels.ascend.kernel import Kernel


@triton.jit
def push_results(y_ptr, source_ptr, slot_peers_ptr, flag_peers_ptr, R, H, K, epoch, BH: tl.constexpr):
    """Copy every received row's result into the window of the rank that sent the row.

    y [R, H] bf16, fp16 or fp32; source [R, 3] int32 (rank, token, k), rank -1 = padding, skipped.
    slot_peers, flag_peers [W] int64: addresses of this epoch's areas. Grid: any; program p takes rows p, p + grid, ...
    Tiling: BH elements of a row.
    """
    lane = tl.arange(0, BH)
    for r in range(tl.program_id(0), R, tl.num_programs(0)):
        row = r.to(tl.int64)
        peer = tl.load(source_ptr + row * 3)
        if peer >= 0:
            slot = tl.load(source_ptr + row * 3 + 1).to(tl.int64) * K + tl.load(source_ptr + row * 3 + 2)
            there = tl.load(slot_peers_ptr + peer).to(tl.pointer_type(y_ptr.dtype.element_ty))
            for h in range(0, H, BH):
                mask = h + lane < H
                tile = tl.load(y_ptr + row * H + h + lane, mask=mask, other=0.0)
                tl.store(there + slot * H + h + lane, tile, mask=mask)
            tl.debug_barrier()
            flags = tl.load(flag_peers_ptr + peer).to(tl.pointer_type(tl.int32))
            tl.store(flags + slot * 8 + tl.arange(0, 8), tl.full([8], 0, tl.int32) + epoch)


@triton.jit
def sum_results(slots_ptr, flags_ptr, position_ptr, weight_ptr, bias_ptr, out_ptr, done_ptr, T, K, H, epoch, polls,
                BH: tl.constexpr, KP: tl.constexpr, WEIGHTED: tl.constexpr, BIASED: tl.constexpr):  # fmt: skip
    """out[t] = round(sum over k, ascending, of weight[t, k] * slot[t, k], in fp32, then + bias[t]).

    slots [T, K, H] and flags [T, K, 8] int32 in the own window; position [T, K] int32, < 0 = nothing was sent for this
    slot; weight [T, K] fp32 (read only when WEIGHTED, else 1); bias [T, H] (read only when BIASED); out [T, H].
    done [T, 8] int32: all lanes 1 when out[t] is final. A token whose flags do not arrive within `polls` looks stays 0;
    tokens that are 1 on entry are skipped: the host clears `done`, launches, and launches again until all are 1.
    Rounding: every product and every sum is rounded to fp32 (no fused multiply-add), the result once to out's type.
    Grid: any; program p takes tokens p, p + grid, ... Tiling: BH elements; KP: power of two >= K.
    """
    lane = tl.arange(0, BH)
    flag_lane = tl.arange(0, KP * 8)
    slot_of_lane = flag_lane // 8
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        token = t.to(tl.int64)
        if tl.sum(tl.load(done_ptr + token * 8 + tl.arange(0, 8)), axis=0) == 0:
            in_row = flag_lane < K * 8
            expected = tl.load(position_ptr + token * K + slot_of_lane, mask=in_row, other=-1) >= 0
            flag = flags_ptr + token * K * 8 + flag_lane
            seen = tl.load(flag, mask=in_row, other=epoch)
            pending = tl.sum(tl.where(expected, (seen < epoch).to(tl.int32), 0), axis=0)
            looks = 1
            while (pending > 0) & (looks < polls):
                tl.debug_barrier()
                seen = tl.load(flag, mask=in_row, other=epoch)
                pending = tl.sum(tl.where(expected, (seen < epoch).to(tl.int32), 0), axis=0)
                looks += 1
            tl.debug_barrier()
            if pending == 0:
                for h in range(0, H, BH):
                    mask = h + lane < H
                    total = tl.zeros([BH], tl.float32)
                    for k in range(K):
                        if tl.load(position_ptr + token * K + k) >= 0:
                            slot = token * K + k
                            row = tl.load(slots_ptr + slot * H + h + lane, mask=mask, other=0.0).to(tl.float32)
                            if WEIGHTED:
                                row = row * tl.load(weight_ptr + slot)
                            total += row
                    if BIASED:
                        total += tl.load(bias_ptr + token * H + h + lane, mask=mask, other=0.0).to(tl.float32)
                    tl.store(out_ptr + token * H + h + lane, total.to(out_ptr.dtype.element_ty), mask=mask)
                tl.store(done_ptr + token * 8 + tl.arange(0, 8), tl.full([8], 1, tl.int32))


PUSH_RESULTS = Kernel(push_results)
SUM_RESULTS = Kernel(sum_results)
