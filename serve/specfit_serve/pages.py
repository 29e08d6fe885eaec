"""Which pages of a KV cache hold which sequence."""

import torch
from jaxtyping import Int64
from torch import Tensor


class PageTable:
    """Pages for slots, given out as sequences grow and taken back when they leave.

    Page 0 belongs to no one: entries of the table that name no page of a slot name it, so that what
    looks at them reads something, and nothing that counts.
    """

    def __init__(self, *, num_slots: int, max_length: int, page: int, num_pages: int) -> None:
        """All slots are empty.

        Args:
            num_slots: sequences in flight.
            max_length: columns of a slot.
            page: columns of a page.
            num_pages: of all slots together, page 0 included.
        """
        self.page = page
        self.num_pages = num_pages
        self.max_length = max_length
        pages_per_slot = -(-max_length // page)
        self.table: Int64[Tensor, "slots pages"] = torch.zeros(
            num_slots, pages_per_slot, dtype=torch.int64
        )
        self._held = [0] * num_slots
        self._free = list(range(num_pages - 1, 0, -1))  # the lowest is given first

    @classmethod
    def of_target(
        cls, *, context: int, num_slots: int, max_length: int, page: int, num_pages: int | None
    ) -> "PageTable":
        """Those of a model whose positions end at `context`.

        `num_pages` are without page 0; None: as many as full slots take.

        Raises:
            ValueError: `max_length` is beyond the context, or `num_pages` not even one.
        """
        if max_length > context:
            raise ValueError(
                f"a sequence of {max_length} tokens does not fit the target's context of {context}"
            )
        if num_pages is None:
            num_pages = num_slots * -(-max_length // page)
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        return cls(num_slots=num_slots, max_length=max_length, page=page, num_pages=num_pages + 1)

    @property
    def num_columns(self) -> int:
        """That sequences have room for, all together."""
        return (self.num_pages - 1) * self.page

    @property
    def num_free(self) -> int:
        """Pages that no slot has."""
        return len(self._free)

    def reserve(self, slot: int, length: int) -> bool:
        """Sees to it that `slot` has `length` columns; False, and nothing happens, without room."""
        missing = -(-length // self.page) - self._held[slot]
        if length > self.max_length or missing > len(self._free):
            return False
        for _ in range(missing):
            self.table[slot, self._held[slot]] = self._free.pop()
            self._held[slot] += 1
        return True

    def release(self, slot: int) -> None:
        """Takes back what `slot` has."""
        held = self.table[slot, : self._held[slot]].tolist()
        self._free += reversed(held)
        self.table[slot] = 0
        self._held[slot] = 0

    def move(self, source: int, to: int) -> None:
        """The sequence of `source` continues in `to`, another slot, whose pages are taken back."""
        assert source != to
        self.release(to)
        self.table[to] = self.table[source]
        self._held[to] = self._held[source]
        self.table[source] = 0
        self._held[source] = 0
