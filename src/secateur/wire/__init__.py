"""Sparse updates and masks as bytes: values, and the cheapest coding of their positions.

A message is b"SCTR", a version byte, the CRC-32 of all that follows, the length of the deflated table of tensors and
that table (table.py), the positions of each tensor that needs them, the entropy coder's stream that tensors share
(rans.py), and the values that are kept, little-endian as their bits are.

The checksum is CRC-32 because it is there to find accidents: four bytes, and faster than the values are copied. It is
no proof against a forger, and neither would a longer one be without a key, so the decoder believes nothing that it
reads: what it allocates is bounded by the shapes that the receiver expects, and whatever does not add up is refused.
"""

from __future__ import annotations

from secateur.wire.message import decode, decode_mask, encode, encode_mask

__all__ = ["decode", "decode_mask", "encode", "encode_mask"]
