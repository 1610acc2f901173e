from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.flaky_proxy import Frames

lines = st.sampled_from([b"+OK\r\n", b"-ERR no\r\n", b":12\r\n", b"_\r\n", b"#t\r\n", b",1.5\r\n", b"(123\r\n"])
empty = st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"$0\r\n\r\n", b"*0\r\n", b"%0\r\n"])
strings = st.builds(
    lambda kind, text: b"%s%d\r\n%s\r\n" % (kind, len(text), text), st.sampled_from([b"$", b"!", b"="]), st.binary()
)


def collections(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    def build(kind: bytes, items: list[bytes]) -> bytes:
        pairs = kind in b"%|"
        items = items[: len(items) // 2 * 2] if pairs else items
        attributed = b":1\r\n" if kind == b"|" else b""
        return b"%s%d\r\n%s%s" % (kind, len(items) // (1 + pairs), b"".join(items), attributed)

    return st.builds(build, st.sampled_from([b"*", b"~", b">", b"%", b"|"]), st.lists(values, max_size=5))


resp_values = st.recursive(lines | empty | strings, collections, max_leaves=8)


@given(st.lists(resp_values, max_size=6), st.lists(st.integers(1, 20), min_size=1))
def test_values_are_complete_however_the_stream_is_split(values: list[bytes], cuts: list[int]) -> None:
    frames, stream, parsed, position = Frames(), b"".join(values), list[bytes](), 0
    while position < len(stream):
        size = cuts[position % len(cuts)]
        parsed += frames.feed(stream[position : position + size])
        position += size
    assert parsed == values
    assert not frames.opaque
    assert frames.rest() == b""


@given(st.lists(st.binary(min_size=1), min_size=1))
def test_no_byte_of_any_stream_is_lost_or_added(chunks: list[bytes]) -> None:
    frames = Frames()
    passed = b"".join(value for chunk in chunks for value in frames.feed(chunk))
    assert passed + frames.rest() == b"".join(chunks)
