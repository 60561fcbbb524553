"""The tensor codec: what goes in comes out, nothing is copied on the way back, and hostile descriptions are refused."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from gradwire_proto.codec import CodecError, Column, check, decode, digest, encode, spec_bytes
from gradwire_proto.v1 import training_pb2 as pb
from hypothesis import given
from hypothesis import strategies as st

DTYPES = ["bool", "int32", "int64", "float32", "float64", "uint8"]


@st.composite
def columns(draw: st.DrawFn) -> Column:
    dense = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    levels: list[np.ndarray] = []
    total = draw(st.integers(0, 4))
    for _ in range(draw(st.integers(0, 2))):
        lengths = np.array(draw(st.lists(st.integers(0, 4), min_size=total, max_size=total)), np.uint32)
        levels.append(lengths)
        total = int(lengths.sum())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.integers(0, 2 if dtype == np.bool_ else 100, (total, *dense)).astype(dtype)
    if draw(st.booleans()):
        values = values.astype(dtype.newbyteorder(">"))
    if draw(st.booleans()):
        values = np.repeat(values, 2, axis=0)[::2]
    return Column(values, tuple(levels))


@given(st.dictionaries(st.text("abc_", min_size=1, max_size=5), columns(), max_size=4))
def test_round_trip(batch: dict[str, Column]) -> None:
    specs, buffers = encode(batch)
    payload = b"".join(buffers)
    assert sum(map(spec_bytes, specs)) == len(payload)
    back = decode([pb.TensorSpec.FromString(spec.SerializeToString()) for spec in specs], payload)
    assert list(back) == list(batch)
    for name, column in batch.items():
        assert back[name].values.dtype == column.values.dtype.newbyteorder("<")
        np.testing.assert_array_equal(back[name].values, column.values)
        assert back[name].num_rows == column.num_rows
        assert len(back[name].levels) == len(column.levels)
        for ours, theirs in zip(back[name].levels, column.levels, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert digest(buffers) == digest([payload])


def test_special_floats_survive() -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0], ">f4")
    specs, buffers = encode({"x": Column(values)})
    assert b"".join(buffers) == values.astype("<f4").tobytes()
    assert decode(specs, b"".join(buffers))["x"].values.tobytes() == values.astype("<f4").tobytes()


def test_encoding_shares_memory_and_decoding_is_a_read_only_view() -> None:
    values = np.arange(6, dtype="<i4")
    specs, buffers = encode({"x": Column(values, (np.array([2, 4], np.uint32),))})
    assert np.shares_memory(np.frombuffer(buffers[1], np.int32), values)
    payload = b"".join(buffers)
    column = decode(specs, payload)["x"]
    assert np.shares_memory(column.values, np.frombuffer(payload, np.uint8))
    assert not column.values.flags.writeable
    assert [row.tolist() for row in column.rows()] == [[0, 1], [2, 3, 4, 5]]


def test_rows_of_a_column() -> None:
    rows = [np.array([1.0, 2.0]), np.zeros(0), np.array([3.0])]
    column = Column.from_rows(rows)
    assert column.levels[0].tolist() == [2, 0, 1]
    assert [row.tolist() for row in column.rows()] == [[1.0, 2.0], [], [3.0]]
    assert Column.from_rows([]).rows() == []
    with pytest.raises(ValueError, match="one ragged level"):
        Column(np.zeros(3)).rows()


def test_digest_is_blake2b_128_of_the_concatenation() -> None:
    assert digest([b"ab", b"", b"c"]) == hashlib.blake2b(b"abc", digest_size=16).digest()
    assert digest([b""]) == digest([]) == b""


def spec(
    name: str = "x", dtype: int = pb.DTYPE_INT32, shape: tuple[int, ...] = (2,), levels: tuple[int, ...] = ()
) -> pb.TensorSpec:
    return pb.TensorSpec(name=name, dtype=dtype, shape=shape, level_sizes=levels)


HOSTILE = {
    "overflowing shape": (spec(shape=(2**63, 2**63)), "values"),
    "overflow to the right size": (spec(shape=(2**62, 4)), "values"),
    "negative as unsigned": (spec(shape=(2**64 - 1,)), "values"),
    "hidden behind a zero": (spec(shape=(0, 2**63)), "values"),
    "zero dense dimension": (spec(shape=(2**39, 0)), "dense dimensions"),
    "huge level": (spec(shape=(1,), levels=(2**63,)), "values"),
    "no dimension": (spec(shape=()), "dimensions"),
    "many dimensions": (spec(shape=(1,) * 40), "dimensions"),
    "many levels": (spec(shape=(1,), levels=(1,) * 40), "levels"),
    "no dtype": (spec(dtype=0), "dtype"),
    "unheard of dtype": (spec(dtype=99), "dtype"),
    "no name": (spec(name=""), "1 to"),
    "long name": (spec(name="x" * 10_000), "1 to"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_description(case: str) -> None:
    bad, rule = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(CodecError) as caught:
            check([spec("fine"), bad], 8)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert caught.value.field == bad.name[:50]
    assert rule in caught.value.rule


def test_duplicate_field() -> None:
    with pytest.raises(CodecError) as caught:
        check([spec("x"), spec("x")], 16)
    assert caught.value.field == "x"


@pytest.mark.parametrize("payload_bytes", [0, 7, 9, 2**62])
def test_payload_of_another_size(payload_bytes: int) -> None:
    with pytest.raises(CodecError, match="8 bytes"):
        check([spec()], payload_bytes)


@pytest.mark.parametrize("lengths", [[1, 0], [1, 2], [2**32 - 1, 3]])
def test_lengths_that_do_not_add_up(lengths: list[int]) -> None:
    payload = np.array(lengths, "<u4").tobytes() + bytes(8)
    with pytest.raises(CodecError) as caught:
        decode([spec(levels=(2,))], payload)
    assert caught.value.field == "x"
    assert caught.value.rule == "sum of level 0 == 2"
    with pytest.raises(CodecError, match="level 0"):
        encode({"x": Column(np.zeros(2), (np.array(lengths, np.uint32),))})


def test_inner_lengths_that_do_not_add_up() -> None:
    payload = np.array([2, 1, 1, 1, 1], "<u4").tobytes() + bytes(8)
    with pytest.raises(CodecError, match="level 1 add up to 3"):
        decode([spec(levels=(2, 3), shape=(2,))], payload)


def test_bool_that_is_neither() -> None:
    with pytest.raises(CodecError, match="above 1"):
        decode([spec(dtype=pb.DTYPE_BOOL, shape=(3,))], b"\x00\x01\x02")


@pytest.mark.parametrize(
    "values", [np.array(["a"]), np.array([None]), np.zeros(2, np.complex64), np.zeros(2, np.float16)]
)
def test_dtype_the_wire_has_not(values: np.ndarray) -> None:
    with pytest.raises(CodecError, match="dtype"):
        encode({"x": Column(values)})
