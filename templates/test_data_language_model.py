"""Your text: windows lose no byte, texts are held out by bytes. Delete with data.py."""

import gzip
import json
import os
import re
import subprocess

import jax
import numpy as np
import pytest


@pytest.mark.parametrize("context", [1, 5, 16, 1000])
def test_every_byte_is_predicted_once(module, context):
    texts = [np.frombuffer(x, np.uint8) for x in (b"a", b"hello world", bytes(range(1, 100)))]
    split = module("data").Split(texts, context)
    batch = split.rows(np.arange(len(split)))
    assert batch["tokens"].shape == (len(split), context + 1)
    targets = batch["tokens"][:, 1:][batch["mask"] == 1]
    assert targets.tobytes() == b"".join(x.tobytes() + b"\0" for x in texts)
    shifted = batch["tokens"][:, :-1][batch["mask"] == 1]
    assert shifted.tobytes() == b"".join(b"\0" + x.tobytes() for x in texts)


@pytest.fixture
def load(module):
    """Load the text at a path, with windows of 16 bytes."""
    config, data = module("config"), module("data")

    def load(path, **settings):
        settings = config.DataConfig(path=str(path), **settings)
        return data.load(config.Config(data=settings, model=module("model").TINY))

    return load


def contents(data):
    """The texts of each split."""
    splits = (data.train, data.validation, data.test)
    return [{text.tobytes() for text in split.texts} for split in splits]


def shares(data):
    """The part of all bytes that validation and test have."""
    sizes = [sum(map(len, split.texts)) for split in (data.train, data.validation, data.test)]
    return [size / sum(sizes) for size in sizes[1:]]


def write(folder, texts):
    folder.mkdir(exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i:04}.txt").write_bytes(text)
    return folder


def draw(sizes, seed=0):
    letters = np.random.default_rng(seed)
    return [letters.integers(97, 123, size, np.uint8).tobytes() for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [
        [1000] * 40,
        [4990] * 19 + [5190],  # one over a twentieth, which is cut, the others just below
        [900, 1100] * 10,
        [60_000] + [400] * 100,
        [int(10 ** (2 + i % 40 / 10)) for i in range(300)],
    ],
)
def test_the_held_out_share_of_the_bytes_is_plausible(load, tmp_path, sizes):
    for seed in range(3):
        data = load(write(tmp_path / str(seed), draw(sizes, seed)))
        assert all(0.024 < share < 0.076 for share in shares(data)), shares(data)
        assert data.warnings == ()
        assert sum(len(text) for part in contents(data) for text in part) == sum(sizes)


def test_the_splits_depend_on_the_content_alone(load, tmp_path):
    texts = draw(range(10, 1000, 9))
    first = load(write(tmp_path / "a", texts))
    again = load(write(tmp_path / "b", texts[::-1]))
    assert contents(first) == contents(again) and first.fingerprint == again.fingerprint
    assert "splits, version 1" in first.split_rule
    texts[7] += b"!"
    assert load(write(tmp_path / "c", texts)).fingerprint != first.fingerprint


def test_whole_files_are_held_out_and_equal_ones_stay_together(load, tmp_path):
    texts = draw([50] * 60) * 2
    write(tmp_path, texts)
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("not this")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "more.txt").write_text("is read")
    data = load(tmp_path)
    train, validation, test = contents(data)
    assert train | validation | test == {*texts, b"is read"}
    assert not train & validation and not train & test and not validation & test
    assert load(tmp_path / "**" / "*.txt").fingerprint == data.fingerprint
    assert data.test.summary == "6 texts, 300 bytes, 24 windows"


def test_of_a_single_file_the_end_is_held_out(load, module, tmp_path, monkeypatch):
    file = tmp_path / "book.txt"
    file.write_text("".join(chr(97 + i % 26) for i in range(100)))
    data = load(file)
    splits = (data.train, data.validation, data.test)
    parts = [split.texts[0].tobytes().decode() for split in splits]
    assert [len(part) for part in parts] == [90, 5, 5]
    assert "".join(parts) == file.read_text()
    monkeypatch.setattr(module("sources.texts"), "LARGE", 10)
    mapped = load(file)
    assert isinstance(mapped.train.texts[0], np.memmap)
    assert mapped.fingerprint == data.fingerprint
    rows = np.arange(len(data.train))
    jax.tree.map(np.testing.assert_array_equal, mapped.train.rows(rows), data.train.rows(rows))


def test_a_split_that_is_too_small_to_say_anything_is_named(load, module, tmp_path):
    texts = draw([1000]) * 30 + draw([3], 1) + draw([4], 2)
    data = load(write(tmp_path / "a", texts))
    assert len(data.warnings) == 2
    assert all("0.0% of the text" in warning for warning in data.warnings)
    with pytest.raises(module("config").SettingError, match=r"30 files \(1 different"):
        load(write(tmp_path / "b", texts[:30]))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.txt", None, ["absent.txt", "a text file, a directory or a glob"]),
        ("*.md", None, ["*.md", "glob"]),
        ("empty.txt", b"", ["empty.txt", "not empty"]),
        ("image.png", b"\x89PNG\r\n\x00\x00" * 9, ["image.png", "not text", "/**/*.txt"]),
        ("short.txt", b"abc", ["3 bytes", "too little"]),
    ],
)
def test_what_is_not_text_is_refused(load, module, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(module("config").SettingError) as error:
        load(tmp_path / name)
    assert all(word in str(error.value) for word in words)


def test_what_a_message_advises_helps(load, module, tmp_path):
    words = "ordinary words, " * 90
    for name, encoding in (("it's a.txt", "utf-16"), ("b.txt", "utf-32")):
        (tmp_path / name).write_text(words, encoding=encoding)
        with pytest.raises(module("config").SettingError, match=encoding.upper()) as error:
            load(tmp_path / name)
        command = re.findall("`(iconv .*?)`", str(error.value))[0]
        subprocess.run(["sh", "-c", command], check=True)
        assert b"".join(x.tobytes() for x in load(tmp_path / name).train.texts) in words.encode()

    def follow(path):
        """Load a path, which is refused, and then the one that the message names instead."""
        with pytest.raises(module("config").SettingError) as error:
            load(path)
        (better,) = re.findall("--data.path ('[^']*'|\\S+)", str(error.value))[1:]
        return load(better.strip("'"))

    (tmp_path / "one" / "two").mkdir(parents=True)
    (tmp_path / "one" / "two" / "c.txt").write_text(words)
    assert len(follow(tmp_path / "o*").train) > 60
    (tmp_path / "one" / "photo").write_bytes(b"\0\1")
    assert len(follow(tmp_path / "one").train) > 60


def test_what_cannot_be_read_is_not_left_out(load, module, monkeypatch, tmp_path):
    write(tmp_path / "inner", draw([100] * 30))
    scandir = os.scandir

    def refuse(path):
        if os.fspath(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    words = r"inner cannot be read \(Permission denied\)"
    with pytest.raises(module("config").SettingError, match=words):
        load(tmp_path)


def test_records_are_the_same_as_files(load, module, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    texts = [text + "é\r\n".encode() for text in draw(range(10, 1000, 9))] + draw([50]) * 3
    lines = b"".join(json.dumps({"id": 1, "text": x.decode()}).encode() + b"\n" for x in texts)
    (tmp_path / "all.jsonl").write_bytes(b"\xef\xbb\xbf" + lines + b"\n")
    (tmp_path / "all.jsonl.gz").write_bytes(gzip.compress(lines))
    wanted = load(write(tmp_path / "files", texts))
    for name in ("all.jsonl", "all.jsonl.gz", "all.jsonl"):
        data = load(tmp_path / name)
        assert data.fingerprint == wanted.fingerprint and contents(data) == contents(wanted)
        rows = np.arange(len(wanted.train))
        jax.tree.map(np.testing.assert_array_equal, data.train.rows(rows), wanted.train.rows(rows))
    assert "jsonl, field 'text': 113 texts" in data.found
    # Converted once, each; what is not whole is converted again.
    cached = sorted((tmp_path / "runs" / "cache").iterdir())
    assert len(cached) == 2 and not [x for x in cached if x.name.startswith(".")]
    monkeypatch.setattr(module("sources.records"), "write", None)
    load(tmp_path / "all.jsonl")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    for place in cached:
        (place / "text.bin").write_bytes(b"damaged")
    assert load(tmp_path / "all.jsonl").fingerprint == wanted.fingerprint
    with (tmp_path / "all.jsonl").open("ab") as file:
        file.write(json.dumps({"text": "more"}).encode())
    assert load(tmp_path / "all.jsonl").fingerprint != wanted.fingerprint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n{"text": \n', ["line 2 is no JSON", '\'{"text": ']),
        (b'{"text": "a"}\n[1]\n', ["line 2", "must be one object"]),
        (b'{"body": "a", "id": 1}\n', ["line 1 has no 'text' but 'body', 'id'", "--data.field"]),
        (b'{"text": 3}\n', ["line 1", "text is int, must be text"]),
        (b'{"text": "a\\u0000"}\n', ["line 1", "character 0"]),
        (b'{"text": ""}\n', ["no record in 1 files"]),
        (b'{"text": "a"}\n{"text": "\xff"}\n', ["line 2", "not UTF-8"]),
        (b'{"text": "a\\ud800"}\n', ["line 1 has half a character", "ud800"]),
        (b"[" * 100_000, ["line 1 is no JSON", "jq -c ."]),
        (b'[{"text": "a"}]', ["line 1", "jq -c '.[]'"]),
        ('{"text": "a"}\n'.encode("utf-16"), ["UTF-16", "iconv"]),
        ('{"text": "a"}\n'.encode("utf-16le"), ["line 1 is no JSON"]),
    ],
)
def test_records_that_are_no_texts_are_named(load, module, monkeypatch, tmp_path, content, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(module("config").SettingError) as error:
        load(tmp_path / "bad.jsonl")
    assert all(word in str(error.value) for word in words), error.value
    assert not list((tmp_path / "runs" / "cache").iterdir())
    whole = gzip.compress(b'{"text": "words"}\n' * 900)
    for name, content in (("cut", whole[:-20]), ("no", b'{"text": "words"}\n')):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(content)
        with pytest.raises(module("config").SettingError, match="no whole gzip file"):
            load(tmp_path / f"{name}.jsonl.gz")


def test_tokens_of_another_program_are_read(load, module, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50_000, 4000)
    (tmp_path / "both").mkdir()
    tokens[:3000].astype("<u2").tofile(tmp_path / "both" / "train.bin")
    tokens[3000:].astype("<u2").tofile(tmp_path / "both" / "val.bin")
    np.save(tmp_path / "all.npy", tokens)
    data = load(tmp_path / "both", vocab_size=50_000)
    sizes = [len(split.tokens) for split in (data.train, data.validation, data.test)]
    assert sizes == [3000, 500, 500] and data.num_outputs == 50_000
    batch = data.train.rows(np.array([0, 7]))
    assert batch["tokens"].dtype == np.uint16 and batch["mask"].all()
    np.testing.assert_array_equal(batch["tokens"][1], tokens[7 * 16 : 8 * 16 + 1])
    one = load(tmp_path / "all.npy", vocab_size=70_000)
    assert one.train.rows(np.array([1]))["tokens"].dtype == np.int32
    assert [len(x.tokens) for x in (one.train, one.validation, one.test)] == [3600, 200, 200]
    error = module("config").SettingError
    with pytest.raises(error, match=r"token 4\d\d\d\d at place \d+: must be below .* 40000"):
        load(tmp_path / "both", vocab_size=40_000)
    with pytest.raises(error, match=r"give --data\.vocab-size"):
        load(tmp_path / "both")
    with pytest.raises(error, match=r"has no train\.bin"):
        load(tmp_path, vocab_size=9, format="tokens")
    np.save(tmp_path / "wrong.npy", tokens / 2)
    with pytest.raises(error, match="dtype float64"):
        load(tmp_path / "wrong.npy", vocab_size=50_000)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("text")
    (tmp_path / "mixed" / "b.jsonl").write_text("text")
    with pytest.raises(error, match="several forms, jsonl, text"):
        load(tmp_path / "mixed")
