"""The layouts that are measured: how many pages of which size make a chunk of 256 tokens."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """One worker's KV cache: ``segments`` pages in each block."""

    name: str
    segments: int
    page_bytes: int
    blocks_per_chunk: int

    @property
    def chunk_bytes(self) -> int:
        return self.segments * self.page_bytes * self.blocks_per_chunk

    @property
    def block_tokens(self) -> int:
        return CHUNK_TOKENS // self.blocks_per_chunk


# K and V apart, heads of 128, blocks of 16 tokens: 32 layers of 8 KV heads; then 80 layers of the
# one KV head that is left to each of eight ranks. MLA: 61 layers of 576 elements, blocks of 64.
LLAMA_8B = Shape("8B, bf16", 64, 32 * KIB, 16)
TP8_70B = Shape("70B TP8, bf16", 160, 4 * KIB, 16)
# Chunks of 3 MiB, of which the agent moves several in one call: 48 layers of one KV head.
TP4_30B = Shape("30B-A3B TP4, fp8", 96, 2 * KIB, 16)
SHAPES = (
    LLAMA_8B,
    Shape("8B, fp8", 64, 16 * KIB, 16),
    TP8_70B,
    Shape("70B TP8, fp8", 160, 2 * KIB, 16),
    Shape("MLA, bf16", 61, 72 * KIB, 4),
)
CHUNK_COUNTS = (1, 4, 16, 64)
QUICK_CHUNK_COUNTS = (1, 16)
