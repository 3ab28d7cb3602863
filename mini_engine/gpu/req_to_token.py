"""Lesson 10. Where every token of every request lies, in one tensor on the device.

    req_to_token[row, position] -> slot of the pool

A block table is made on the host and sent with each step. This one stays: a request has a row for as long as it runs,
and a decode step is told rows and lengths, from which the device makes the rest of its plan by itself.

Row 0 is the padding row: no request is given it, and all its entries are slot 0. So a batch is filled up with rows of
length 0 that write into the padding slot and read nothing.

It is a table and no more: how long a request is, and which row it has, its owner keeps. Names and shape are SGLang's
(Zheng et al., 2024) and pymllm's.
"""

import torch
from torch import Tensor

from mini_engine.errors import OutOfBlocks, UserError
from mini_engine.kv.block_tensor import ForwardMeta

PADDING_ROW = 0


class ReqToTokenPool:
    """Rows 1 … max_reqs for requests, and the tensor of their slots.

    Attributes:
        req_to_token: `[max_reqs + 1, max_context_len]` int32. What no request has written is slot 0.
    """

    def __init__(self, max_reqs: int, max_context_len: int, device: str | torch.device = "cpu") -> None:
        if max_reqs < 1 or max_context_len < 1:
            raise UserError(
                f"max_reqs is {max_reqs} and max_context_len {max_context_len}; give at least 1 for each of them"
            )
        self.max_reqs = max_reqs
        self.max_context_len = max_context_len
        self.req_to_token = torch.zeros(max_reqs + 1, max_context_len, dtype=torch.int32, device=device)
        self.clear()

    def available_size(self) -> int:
        """Rows that `alloc` can still give."""
        return len(self.free_rows)

    def clear(self) -> None:
        """Every row is free and points at the padding slot."""
        self.req_to_token.zero_()
        self.free_rows = list(range(self.max_reqs, PADDING_ROW, -1))  # the end is handed out first: 1, 2, 3, …
        self.held: set[int] = set()

    def alloc(self, n: int = 1) -> list[int]:
        """Hand out n rows; `[]` for 0.

        Raises:
            OutOfBlocks: fewer than n are free; nothing was changed.
            ValueError: n is negative.
        """
        if n < 0:
            raise ValueError(f"{n} rows were asked for; ask for 0 or more")
        if n > len(self.free_rows):
            raise OutOfBlocks(f"need {n} rows, {len(self.free_rows)} free of {self.max_reqs}")
        rows = [self.free_rows.pop() for _ in range(n)]
        self.held.update(rows)
        return rows

    def free(self, row: int) -> None:
        """Take a row back. Its slots are not freed: read them first, and give them to the allocator.

        Its entries become slot 0, so that whoever reads the row too late reads padding and not another's tokens.

        Raises:
            ValueError: nobody holds this row; nothing was changed.
        """
        self._check_held(row)
        self.held.remove(row)
        self.free_rows.append(row)
        self.req_to_token[row].zero_()

    def write(self, row: int, start: int, kv_indices: Tensor) -> None:
        """Put the slots of positions start, start + 1, … of a row into the table; `kv_indices` is `[n]` int32.

        Raises:
            ValueError: nobody holds the row, it is too short, or these are no slots; nothing was written.
        """
        self._check_held(row)
        if kv_indices.dtype != torch.int32 or kv_indices.dim() != 1:
            raise ValueError(f"kv_indices is {list(kv_indices.shape)} of {kv_indices.dtype}; give [n] int32")
        stop = start + len(kv_indices)
        if not 0 <= start <= stop <= self.max_context_len:
            raise ValueError(f"positions {start} … {stop - 1} do not fit a row of {self.max_context_len}")
        self.req_to_token[row, start:stop] = kv_indices

    def read(self, row: int, length: int) -> Tensor:
        """The slots of the row's first `length` tokens, `[length]` int32: a view of the table, not a copy.

        Raises:
            ValueError: nobody holds the row, or it is shorter.
        """
        self._check_held(row)
        if not 0 <= length <= self.max_context_len:
            raise ValueError(f"a row has {self.max_context_len} positions; {length} of them cannot be read")
        return self.req_to_token[row, :length]

    def plan_decode(self, rows: Tensor, seq_lens_kv: Tensor, page_size: int) -> ForwardMeta:
        """The plan of a step that feeds each of S rows its last token, made on the device: nothing waits or is sent.

        Args:
            rows: `[S]` int64. Padding rows come last.
            seq_lens_kv: `[S]` int32, tokens of each row, the one that is fed included; 0 for padding rows.
            page_size: the allocator's. The slots of a row's pages must lie as the allocator gave them.
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
        """The pages of each of `rows` `[S]` int64, in order, then page 0: `[S, max_context_len / page_size]` int32."""
        return self.req_to_token[:, ::page_size][rows] // page_size

    def _check_held(self, row: int) -> None:
        if row not in self.held:
            raise ValueError(f"row {row} is not held; it was freed before, never given, or is the padding row")
