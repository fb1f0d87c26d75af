import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hymo.data.json_values as module
from hymo.data import DataError, open_source, read_documents
from hymo.data.json_values import JSONError, values

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda x: st.lists(x) | st.dictionaries(st.text(), x),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(JSON, max_size=6), indent=st.sampled_from([None, 2]), block=st.integers(1, 50), in_list=st.booleans()
)
def test_values_are_those_of_json_whatever_is_read_at_once(rows, indent, block, in_list):
    if in_list:
        text = json.dumps(rows, indent=indent, ensure_ascii=False)
    else:
        rows = [{"a": row} for row in rows]
        text = "\n".join(json.dumps(row, indent=indent) for row in rows)
    before, module._BLOCK = module._BLOCK, block
    try:
        assert list(values(io.BytesIO(text.encode("utf-8", "replace")))) == json.loads(
            json.dumps(rows, ensure_ascii=False).encode("utf-8", "replace"), parse_int=float
        )
    finally:
        module._BLOCK = before


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"[1, 2", "it ends inside its list"),
        (b'["a" "b"]', "found '\"' after an element"),
        (b'["a"] x', "more text after its list"),
        (b'[{"a": "never ends', "Unterminated string"),
        (b'{"a": 1} {"b" 2}', "Expecting ':' delimiter"),
        (b'["\xff"]', "can't decode byte 0xff"),
    ],
)
def test_faults(text, fault):
    with pytest.raises(JSONError, match=fault):
        list(values(io.BytesIO(text)))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "folder/a.json"])
def test_an_integer_of_any_length_is_a_number(tmp_path, name):
    """Python refuses those of over 4,300 digits, which ended a build in a traceback."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    lines = [b'{"n": ' + b"1" * 5000 + b', "text": "one"}', b'{"text": "two"}']
    path.write_bytes(b"\n".join(lines))
    found = open_source([path.parent if "/" in name else path]).documents()
    assert [document.text for document in found] == [b"one", b"two"]
    path.write_bytes(b'{"text": ' + b"1" * 5000 + b"}")
    with pytest.raises(DataError, match="'text' is a number; accepted: "):
        list(read_documents(path))


def test_a_fault_far_from_the_end_is_found_without_reading_on():
    class Counted(io.BytesIO):
        taken = 0

        def read(self, size=-1):
            self.taken += size
            return super().read(size)

    stream = Counted(b'[{"a" 1}, ' + b'"word", ' * 5_000_000 + b"1]")
    with pytest.raises(JSONError):
        list(values(stream))
    assert stream.taken < 4 << 20


def test_lists_of_objects_and_strings_and_lines_are_documents(tmp_path: Path):
    rows = [{"text": "one", "id": 1}, "two ü", {"id": 3, "text": ""}, {"text": None}, {"text": "three"}]
    expected = [b"one", "two ü".encode(), b"three"]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "marked.json").write_bytes(json.dumps(rows, ensure_ascii=False).encode("utf-8-sig"))
    (tmp_path / "lines.json").write_text("\n".join(json.dumps(row) for row in rows if isinstance(row, dict)))
    for name in ("list.json", "marked.json"):
        documents = list(read_documents(tmp_path / name))
        assert [document.text for document in documents] == expected
        assert sum(document.source_bytes for document in documents) <= (tmp_path / name).stat().st_size
    assert [document.text for document in read_documents(tmp_path / "lines.json")] == [b"one", b"three"]


def test_what_is_no_list_of_texts_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "a.json"
    for content, message in [
        ('{"name": "x", "version": 1}', r"a\.json, record 1: no field 'text'; found name, version; accepted: .*NAME"),
        ('{"data": [{"text": "x"}]}', r"record 1: no field 'text'; found data"),
        ('["a", 3]', r"record 2: found a number; accepted: an object with a string 'text', or a string"),
        ('["a", {"text": [1]}]', r"record 2: 'text' is a list"),
        ("just words", r"a\.json: not valid JSON \(Expecting value\); accepted: a list of objects or strings"),
    ]:
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            list(read_documents(path))
        if "record" in message:
            faults: list[str] = []
            list(read_documents(path, faults.append))
            assert len(faults) == 1


def test_in_folders_json_without_records_is_text(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    (tmp_path / "b.json").write_text('{"name": "package"}')
    (tmp_path / "c.json").write_text('["es2020", 1]')
    (tmp_path / "d.json").write_text(json.dumps([{"id": 1, "text": "long " * 5000}]))
    (tmp_path / "e.json").write_text(json.dumps(["three", "four"]))
    texts = [document.text for document in open_source([tmp_path]).documents()]
    assert texts == [
        b"one", b"two", b'{"name": "package"}', b'["es2020", 1]', b"long " * 5000, b"three", b"four"
    ]  # fmt: skip
    assert [document.text for document in open_source([tmp_path / "a.json"]).documents()] == [b"one", b"two"]
