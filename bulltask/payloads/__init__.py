"""How arguments, results and exceptions are stored: as plain JSON, or in an envelope, which is also JSON.

Values are serialized, compressed, signed and encrypted, in this order (docs/reference/payloads.md). Plain JSON is the
default and needs no envelope.
"""
