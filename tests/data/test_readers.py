import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from hymo.data import DataError, open_source, read_documents
from hymo.data.readers import read_piece

ROWS = [f"row {i} é " * (i % 7) for i in range(40)]
LINES = b"".join(json.dumps({"text": row}).encode() + b"\n" for row in ROWS)
EXPECTED = [row.encode() for row in ROWS if row]


def texts(path: Path, **options) -> list[bytes]:
    return [document.text for document in read_documents(path, **options)]


def in_units(path: Path, unit_bytes: int) -> list[bytes]:
    units = open_source([path]).units(unit_bytes)
    return [document.text for unit in units for piece in unit for document in read_piece(piece)]


@pytest.mark.parametrize("ending", [b"", b"\n", b"\n\n"])
def test_jsonl_in_parts_of_any_size_is_the_whole(tmp_path: Path, ending: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES.rstrip(b"\n") + ending)
    for unit_bytes in [1, 2, 3, 7, 50, 64, 100, 1000, 10**9]:
        assert in_units(path, unit_bytes) == EXPECTED
    assert len(open_source([path]).units(100)) > 10


def test_parquet_in_parts_of_any_size_is_the_whole(tmp_path: Path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), path, row_group_size=3)
    for unit_bytes in [1, 200, 500, 10**9]:
        assert in_units(path, unit_bytes) == EXPECTED
    assert len(open_source([path]).units(200)) > 5


def test_small_files_share_a_unit_in_order(tmp_path: Path):
    for i in range(10):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * 30)
    units = open_source([tmp_path]).units(100)
    assert [[piece.name for piece in unit] for unit in units] == [
        ["0.txt", "1.txt", "2.txt"], ["3.txt", "4.txt", "5.txt"], ["6.txt", "7.txt", "8.txt"], ["9.txt"]
    ]  # fmt: skip


def packed(path: Path, content: bytes) -> bytes:
    """Two members, as tools that append write them."""
    half = len(content) // 2
    pack = gzip.compress if path.suffix == ".gz" else zstandard.ZstdCompressor().compress
    return pack(content[:half]) + pack(content[half:])


def test_zeros_after_a_member_are_no_damage(tmp_path: Path):
    """As gzip and Python read it; of zeros alone the data is lost."""
    member, path = gzip.compress(b"hello"), tmp_path / "a.txt.gz"
    for content in (member + bytes(512), member + bytes(300 << 10) + member, member + bytes(3) + member + bytes(1)):
        path.write_bytes(content)
        assert b"".join(document.text for document in read_documents(path)) == gzip.decompress(content)
    for content in (bytes(512), bytes(512) + member, member + bytes(9) + b"x"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"its compressed data is damaged|it ends in the middle"):
            list(read_documents(path))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_packed_jsonl(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes(packed(path, LINES))
    documents = list(read_documents(path))
    assert [document.text for document in documents] == EXPECTED
    assert sum(document.source_bytes for document in documents) <= path.stat().st_size
    assert in_units(path, 10) == EXPECTED


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_packed_text(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes(packed(path, b"many lines\n" * 50_000))
    assert texts(tmp_path / name) == [b"many lines\n" * 50_000]
    assert open_source([tmp_path]).files[0].name == name


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz"])
def test_torn_and_damaged_packed_files_are_named(tmp_path: Path, name: str):
    path = tmp_path / name
    whole = packed(path, LINES)
    path.write_bytes(whole[:-5])
    with pytest.raises(DataError, match=rf"cannot read '.*{name}': it ends in the middle of its compressed data"):
        texts(path)
    path.write_bytes(b"no compressed data at all")
    with pytest.raises(DataError, match=rf"cannot read '.*{name}': its compressed data is damaged"):
        texts(path)


def test_a_packed_archive_in_a_folder_is_passed_over(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(b"name\0\0\0\0mode"))
    assert [file.name for file in open_source([tmp_path]).files] == ["a.txt"]


def test_a_broken_line_is_named_by_number_in_any_part_or_counted(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    lines = LINES.splitlines(keepends=True)
    lines[20:20] = [b'{"text": broken\n', b'{"no text": 1}\n']
    path.write_bytes(b"".join(lines))
    for unit_bytes in [100, 10**9]:
        with pytest.raises(DataError, match=r"a.jsonl:21: not valid JSON"):
            in_units(path, unit_bytes)
        faults: list[str] = []
        units = open_source([path]).units(unit_bytes)
        got = [d.text for unit in units for piece in unit for d in read_piece(piece, faults.append)]
        assert got == EXPECTED
        assert [fault.split("a.jsonl")[1][:4] for fault in faults] == [":21:", ":22:"]
