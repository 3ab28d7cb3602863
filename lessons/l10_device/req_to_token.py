"""Lesson 10. The slot of every token of every request, in one tensor on the device.

    req_to_token[row, position] -> slot of the pool

A block table is built on the host and copied to the device in each step. This one stays there: a request has a row for
as long as it runs, and from rows and lengths the device makes the plan of a decode step by itself.

Row 0 is the padding row: it is never handed out, and all its entries are slot 0. So a batch can be filled up with rows
of length 0, which write into the padding slot and read nothing.

It is only a table: the caller keeps track of a request's row and length. Names and shape are those of SGLang (Zheng et
al., 2024) and pymllm.
"""

import torch
from torch import Tensor

from mini_engine.base.errors import OutOfBlocks, UserError
from mini_engine.kv.block_tensor import ForwardMeta

PADDING_ROW = 0


class ReqToTokenPool:
    """Rows 1 … max_reqs for requests, and the tensor of their slots.

    Attributes:
        req_to_token: `[max_reqs + 1, max_context_len]` int32. Entries not yet written are slot 0.
    """

    def __init__(self, max_reqs: int, max_context_len: int, device: str | torch.device = "cpu") -> None:
        if max_reqs < 1 or max_context_len < 1:
            raise UserError(f"max_reqs is {max_reqs} and max_context_len {max_context_len}; each must be at least 1")
        self.max_reqs = max_reqs
        self.max_context_len = max_context_len
        self.req_to_token = torch.zeros(max_reqs + 1, max_context_len, dtype=torch.int32, device=device)
        self.clear()

    def available_size(self) -> int:
        """Return the number of free rows."""
        return len(self.free_rows)

    def clear(self) -> None:
        """Free every row and point it at the padding slot."""
        self.req_to_token.zero_()
        self.free_rows = list(range(self.max_reqs, PADDING_ROW, -1))  # handed out from the end: 1, 2, 3, …
        self.held: set[int] = set()

    def alloc(self, n: int = 1) -> list[int]:
        """Hand out n rows; `[]` for 0.

        Raises:
            OutOfBlocks: fewer than n are free; nothing was changed.
            ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"cannot allocate {n} rows; n must be 0 or more")
        if n > len(self.free_rows):
            raise OutOfBlocks(f"need {n} rows, {len(self.free_rows)} free of {self.max_reqs}")
        rows = [self.free_rows.pop() for _ in range(n)]
        self.held.update(rows)
        return rows

    def free(self, row: int) -> None:
        """Free a row, but not its slots: read them first, and free them in the allocator.

        Its entries become slot 0, so that a stale read finds padding instead of another request's tokens.

        Raises:
            ValueError: the row is not held; nothing was changed.
        """
        self._check_held(row)
        self.held.remove(row)
        self.free_rows.append(row)
        self.req_to_token[row].zero_()

    def write(self, row: int, start: int, kv_indices: Tensor) -> None:
        """Write the slots of positions start, start + 1, … of a row; `kv_indices` is `[n]` int32.

        Raises:
            ValueError: the row is not held or too short, or `kv_indices` is not `[n]` int32; nothing was written.
        """
        self._check_held(row)
        if kv_indices.dtype != torch.int32 or kv_indices.dim() != 1:
            raise ValueError(f"kv_indices is {list(kv_indices.shape)} of {kv_indices.dtype}; it must be [n] int32")
        stop = start + len(kv_indices)
        if not 0 <= start <= stop <= self.max_context_len:
            raise ValueError(f"positions {start} … {stop - 1} do not fit a row of {self.max_context_len}")
        self.req_to_token[row, start:stop] = kv_indices

    def read(self, row: int, length: int) -> Tensor:
        """Return the slots of the row's first `length` tokens, `[length]` int32: a view of the table, not a copy.

        Raises:
            ValueError: the row is not held, or is shorter than that.
        """
        self._check_held(row)
        if not 0 <= length <= self.max_context_len:
            raise ValueError(f"cannot read {length} positions of a row; length must be 0 … {self.max_context_len}")
        return self.req_to_token[row, :length]

    def plan_decode(self, rows: Tensor, seq_lens_kv: Tensor, page_size: int) -> ForwardMeta:
        """Plan a step that feeds the last token of each of S rows, on the device: nothing is copied or waited for.

        Args:
            rows: `[S]` int64. Padding rows come last.
            seq_lens_kv: `[S]` int32, the tokens of each row, including the one that is fed; 0 for padding rows.
            page_size: the allocator's. A row must hold its slots in the order in which the allocator returned them.

        Returns:
            a plan as lesson 5's runner makes it: positions and slot_mapping `[S]` int64, cu_seqlens_q `[S + 1]` int32,
            and a block table as wide as a row of this table has pages. A padding row is at position 0, writes into the
            slot that its row has there (row 0: slot 0), and feeds no query. The arguments are not changed.
        """
        positions = (seq_lens_kv - 1).clamp(min=0).long()
        cu_seqlens_q = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
        torch.cumsum(seq_lens_kv > 0, 0, dtype=torch.int32, out=cu_seqlens_q[1:])
        return ForwardMeta(
            positions=positions,
            slot_mapping=self.req_to_token[rows, positions].long(),
            cu_seqlens_q=cu_seqlens_q,
            seq_lens_kv=seq_lens_kv,
            block_table=self.block_table(rows, page_size),
            block_size=page_size,
        )

    def block_table(self, rows: Tensor, page_size: int) -> Tensor:
        """Return the pages of `rows` `[S]` int64, then zeros: `[S, ceil(max_context_len / page_size)]` int32."""
        return self.req_to_token[:, ::page_size][rows] // page_size

    def _check_held(self, row: int) -> None:
        if row not in self.held:
            raise ValueError(f"row {row} is not held; it was never allocated, is already free, or is the padding row")
