"""Sparse updates and masks as bytes: values, and the cheapest coding of their positions.

A message begins with b"SCTR", a version byte and the CRC-32 of all later bytes. The length of the deflated table of
tensors and that table (table.py) are next. Then follow the positions of each tensor that needs them and the entropy
coder's stream that tensors share (rans.py). The kept values are last, bit by bit in little-endian order.

The checksum detects accidents: CRC-32 takes four bytes, and is faster than copying the values. It does not prevent
forgery, and neither would a longer checksum without a key. So the decoder trusts nothing that it reads. Its allocations
are bounded by the shapes that the receiver expects, and inconsistent messages are refused.
"""

from __future__ import annotations

from secateur.wire.message import decode, decode_mask, encode, encode_mask

__all__ = ["decode", "decode_mask", "encode", "encode_mask"]
