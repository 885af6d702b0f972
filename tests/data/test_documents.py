"""Readers: every kind of file gives its documents in order; everything unreadable is refused with its place."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from vblackwell.data import documents, records
from vblackwell.data.documents import TextFiles, find_text
from vblackwell.errors import ConfigurationError, Unsupported


def texts(source: TextFiles) -> list[str]:
    """Whole documents, put together from their pieces."""
    found, held = [], ""
    for piece in source.pieces():
        held += piece.text
        if piece.ends_document:
            found.append(held)
            held = ""
    assert not held
    return found


def write_parquet(path, rows, name="text"):
    parquet.write_table(pyarrow.table({name: pyarrow.array(rows)}), path)


def test_a_folder_is_read_recursively_and_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "_private").mkdir()
    (tmp_path / "b" / "z.txt").write_text("last\n")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "zwei ä", "more": 1}\n')
    write_parquet(tmp_path / "b" / "c.parquet", ["three", "", "four"])
    for name in ("_SUCCESS", ".hidden.txt", "_private/x.bin"):
        (tmp_path / name).write_text("not read")
    assert texts(find_text(tmp_path)) == ["one", "zwei ä", "three", "", "four", "last\n"]
    assert texts(find_text(tmp_path / "b" / "c.parquet")) == ["three", "", "four"]


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab\n\r\té日😀", max_size=120), size=st.integers(4, 16))
def test_pieces_of_a_text_file_are_the_file(tmp_path_factory, text, size):
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_bytes(text.encode())
    before, documents.PIECE_BYTES = documents.PIECE_BYTES, size
    try:
        pieces = list(find_text(path).pieces())
    finally:
        documents.PIECE_BYTES = before
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(piece.text.endswith("\n") or len(piece.text.encode()) >= 16 * size - 3 for piece in pieces[:-1])


def test_a_large_file_is_never_held_whole(tmp_path):
    path = tmp_path / "large.txt"
    path.write_text("a line of text\n" * 300_000)
    sizes = [len(piece.text) for piece in find_text(path).pieces()]
    assert max(sizes) <= documents.PIECE_BYTES and sum(sizes) == path.stat().st_size


@pytest.mark.parametrize("offset", [0, 5, 1 << 20, (1 << 20) + 77])
def test_bad_utf8_is_named_by_file_and_byte(tmp_path, offset):
    path = tmp_path / "bad.txt"
    data = bytearray(b"0123456\n" * 200_000)
    data[offset] = 0xFF
    path.write_bytes(data)
    with pytest.raises(ConfigurationError, match=rf"bad\.txt: byte {offset} \(0xff\) is not UTF-8"):
        texts(find_text(path))


def test_a_character_cut_off_at_the_end_is_refused(tmp_path):
    path = tmp_path / "cut.txt"
    path.write_bytes("fünf €".encode()[:-1])
    with pytest.raises(ConfigurationError, match="byte 6 "):
        texts(find_text(path))


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"txt": "x"}', "no string under 'text'"),
        (b'{"text": null}', "no string under 'text'"),
        (b'["text"]', "holds a list, not an object"),
        (b'{"text": ' + b"[" * 100_000, "nested too deep"),
        (b'{"text": "x"', "is not JSON"),
        (b'{"text": "\xe4"}', r"line 3, byte 25 \(0xe4\) is not UTF-8"),
    ],
)
def test_a_bad_line_is_named_by_number(tmp_path, line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + line + b"\n")
    with pytest.raises(ConfigurationError, match=reason) as caught:
        texts(find_text(path))
    assert str(path) in str(caught.value) and "line 3" in str(caught.value)


def test_bad_tables_are_refused(tmp_path):
    write_parquet(tmp_path / "names.parquet", ["x"], name="content")
    write_parquet(tmp_path / "numbers.parquet", [1, 2])
    write_parquet(tmp_path / "nulls.parquet", ["a", None])
    (tmp_path / "no.parquet").write_bytes(b"PAR1 nothing")
    for name, reason in (
        ("names", "has none of the columns that are read, only content"),
        ("numbers", "row 0 has no string under 'text', but a number"),
        ("nulls", "row 1 has no string under 'text', but nothing"),
        ("no", "not a readable parquet"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            texts(find_text(tmp_path / f"{name}.parquet"))


def written(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.text(alphabet='a"\\\\[]{},\n é😀', max_size=40), max_size=6),
    size=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    ascii=st.booleans(),
)
def test_an_array_is_read_in_pieces_of_any_size(tmp_path_factory, rows, size, indent, ascii):
    path = tmp_path_factory.mktemp("array") / "a.json"
    values = [{"text": row, "more": [1, {"x": None}]} for row in rows]
    written(path, "\ufeff" * ascii + json.dumps(values, indent=indent, ensure_ascii=ascii) + "\n" * size)
    before, records.BLOCK_BYTES = records.BLOCK_BYTES, size
    try:
        assert [record for _, record in records.records(path)] == values
    finally:
        records.BLOCK_BYTES = before
    assert texts(find_text(path)) == rows


def test_an_array_is_never_held_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "BLOCK_BYTES", 1 << 16)
    path = written(tmp_path / "a.json", json.dumps([{"text": "a word " * 20}] * 4_000, indent=1))
    assert path.stat().st_size > 9 * records.BLOCK_BYTES
    tracemalloc.start()
    try:
        assert sum(1 for _ in records.records(path)) == 4_000
        assert tracemalloc.get_traced_memory()[1] < 5 * records.BLOCK_BYTES
    finally:
        tracemalloc.stop()


def test_json_may_also_be_an_object_a_line(tmp_path):
    path = written(tmp_path / "a.json", '{"text": "one"}\n{"text": "two"}\n')
    assert texts(find_text(path)) == ["one", "two"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ('[{"text": "a"}, {"txt": "x"}]', "record 2 has no string under 'text', but nothing"),
        ('[{"text": "a"}, {"text": 3}]', "record 2 has no string under 'text', but a number"),
        ('[{"text": "a"}, "b"]', "record 2 begins with '\"', not an object"),
        ('[{"text": "a"}, {"text": "x"', "record 2 is not JSON"),
        ('[{"text": "a"}, {"text": nan}]', "record 2 is not JSON"),
        ('[{"text": "a"}', "record 1 is the last, and no ']' follows"),
        ('[{"text": "a"} {"text": "b"}]', "record 1 is followed by '{'"),
        ('[{"text": "a"}][]', r"'\[' follows the array"),
        ('[{"text": "a"}, {"text": "\\ud83d"}]', "record 2 has half a character"),
        ('[{"text": ' + "[" * 100_000, "record 1 is nested too deep"),
        (b'[{"text": "a"}, {"text": "\xe4"}]', r"byte 26 \(0xe4\) is not UTF-8"),
        ("3", "line 1 holds a number, not an object"),
        ('{"data": [{"text": "a"}]}', "line 1 has no string under 'text'"),
    ],
)
def test_a_bad_record_of_an_array_is_named_by_number(tmp_path, data, reason):
    with pytest.raises(ConfigurationError, match=f"a\\.json: {reason}"):
        texts(find_text(written(tmp_path / "a.json", data)))


@pytest.mark.parametrize(("name", "command"), [("a.jsonl.gz", "gunzip"), ("a.zst", "unzstd"), ("a.zip", "unzip")])
def test_what_is_compressed_is_refused_by_name_and_by_content(tmp_path, name, command):
    with pytest.raises(ConfigurationError, match=f"is compressed .*{command}"):
        find_text(written(tmp_path / name, b"x"))
    magic = next(magic for magic, suffix in records.MAGIC.items() if name.endswith(suffix))
    for suffix in (".jsonl", ".txt", ".json"):
        with pytest.raises(ConfigurationError, match=rf"b\{suffix} is compressed .*{command}"):
            texts(find_text(written(tmp_path / f"b{suffix}", magic + b"\x80\xff")))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(Unsupported, match="pip install pyarrow"):
        texts(find_text(tmp_path / "a.parquet"))


def test_a_hub_datasets_card_is_left_out(tmp_path):
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train.parquet", ["x"])
    written(tmp_path / "README.md", "---\nlicense: mit\n---\n")
    written(tmp_path / "dataset_infos.json", "{}")
    found = find_text(tmp_path)
    assert texts(found) == ["x"] and [path.name for path in found.left_out] == ["README.md", "dataset_infos.json"]
    (tmp_path / "data" / "train.parquet").unlink()
    (tmp_path / "dataset_infos.json").unlink()
    assert texts(find_text(tmp_path)) == ["---\nlicense: mit\n---\n"]  # a text like any


def test_a_missing_path_is_told_with_the_nearest_or_how_to_get_it(tmp_path):
    written(tmp_path / "train.jsonl", "")
    with pytest.raises(ConfigurationError, match="did you mean 'train.jsonl'"):
        find_text(tmp_path / "trian.jsonl")
    with pytest.raises(ConfigurationError, match="hf download tatsu-lab/alpaca --repo-type dataset --local-dir alpaca"):
        find_text(Path("tatsu-lab/alpaca"))
    for path in ("gone/text.jsonl", "/gone/alpaca"):
        with pytest.raises(ConfigurationError, match="check the path$"):
            find_text(Path(path))


def test_a_missing_path_is_refused_before_torch_is_imported(tmp_path):
    words = ["train", "--model", str(tmp_path), "--data", str(tmp_path / "gone.jsonl")]
    program = f"import sys; from vblackwell import cli; code = cli.main({words}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", f"{program}; sys.exit(code)"], capture_output=True, text=True)
    assert done.returncode == 2 and "gone.jsonl: no such file" in done.stderr and done.stderr.count("\n") == 1


def test_paths_that_give_nothing_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "image.png").write_bytes(b"x")
    (tmp_path / "plain").write_text("x")
    for path, reason in (
        ("gone", "no such file"),
        ("empty", "holds no files"),
        ("image.png", "extension '.png'"),
        ("plain", "without extension"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            find_text(tmp_path / path)
    with pytest.raises(ConfigurationError, match=r"image\.png"):
        find_text(tmp_path)


def test_a_licence_next_to_the_data_is_left_out(tmp_path):
    for name in ("LICENSE", "sub/COPYING", "a.txt", "sub/LICENSE.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = find_text(tmp_path)
    assert texts(found) == ["a.txt", "sub/LICENSE.txt"]
    assert [str(path.relative_to(tmp_path)) for path in found.left_out] == ["LICENSE", "sub/COPYING"]
    with pytest.raises(ConfigurationError, match="name without extension"):
        find_text(tmp_path / "LICENSE")


def test_jsonl_keeps_what_json_says(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = ["a\nb", "tab\t \u2028 é", ""]
    path.write_text("".join(json.dumps({"text": row}) + "\r\n" for row in rows))
    assert texts(find_text(path)) == rows


def test_the_default_corpus_is_the_standard_library(tmp_path, monkeypatch):
    """A small one: to read all of Python's takes seconds."""
    for name in ("json/decoder.py", "json/__init__.py", "abc.py", "encodings/cp437.py", "lib/site-packages/pip.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("import sys\n")
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*- \xe4\n")
    monkeypatch.setattr(documents.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = find_text(None)
    assert [str(path.relative_to(tmp_path)) for path in source.files] == [
        "abc.py",
        "json/__init__.py",
        "json/decoder.py",
    ]
    assert source.size_bytes == 33
    for path in source.files:
        path.unlink()
    with pytest.raises(ConfigurationError, match="no sources under"):
        find_text(None)


@pytest.mark.slow
def test_the_default_corpus_of_this_python():
    source = find_text(None)
    names = [path.relative_to(source.root).as_posix() for path in source.files]
    assert "json/decoder.py" in names and names == sorted(names, key=lambda name: name.split("/"))
    assert not any("site-packages" in name or name.startswith("encodings/") for name in names)
    assert source.size_bytes > 5 << 20  # some distributions leave the library's tests out
