from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bulltask.testing.flaky_frames import Frames

lines = st.sampled_from([b"+OK\r\n", b"-ERR no\r\n", b":12\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(123\r\n"])
empty = st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"$0\r\n\r\n", b"*0\r\n", b"%0\r\n"])
strings = st.builds(
    lambda kind, text: b"%s%d\r\n%s\r\n" % (kind, len(text), text), st.sampled_from([b"$", b"!", b"="]), st.binary()
)


def collections(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    def build(kind: bytes, items: list[bytes]) -> bytes:
        pairs = kind in b"%|"
        items = items[: len(items) // 2 * 2] if pairs else items
        described = b":1\r\n" if kind == b"|" else b""
        return b"%s%d\r\n%s%s" % (kind, len(items) // (1 + pairs), b"".join(items), described)

    return st.builds(build, st.sampled_from([b"*", b"~", b">", b"%", b"|"]), st.lists(values, max_size=5))


resp_values = st.recursive(lines | empty | strings, collections, max_leaves=8)


@given(st.lists(resp_values, max_size=6), st.lists(st.integers(1, 20), min_size=1))
def test_values_come_out_whole_however_the_stream_is_cut(values: list[bytes], cuts: list[int]) -> None:
    frames, stream, found, at = Frames(), b"".join(values), list[bytes](), 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        found += frames.feed(stream[at : at + size])
        at += size
    assert found == values
    assert not frames.opaque
    assert frames.rest() == b""


@given(st.lists(st.binary(min_size=1), min_size=1))
def test_no_byte_is_lost_or_added_whatever_the_stream_is(chunks: list[bytes]) -> None:
    frames = Frames()
    passed = b"".join(value for chunk in chunks for value in frames.feed(chunk))
    assert passed + frames.rest() == b"".join(chunks)
