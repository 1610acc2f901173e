"""How arguments, results and exceptions are stored: plain JSON, or an envelope that is JSON, too.

Values are serialized, compressed, signed and encrypted, in this order (docs/reference/payloads.md). Plain JSON is the
default and needs no envelope.
"""
