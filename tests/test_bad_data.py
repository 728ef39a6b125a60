"""Data that cannot be trained on, and places that may not be written, are refused and named."""

import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from children import (
    IMAGES,
    TEXT,
    flags,
    one_message,
    snapshot,
    train,
    train_with,
    try_settings,
)
from run_hooks import become_nobody

pytestmark = pytest.mark.slow


def image_cases(folder):
    """Data that cannot be trained on: {name: (file, words of the message)}."""
    draw = np.random.default_rng(0)
    images, labels = draw.uniform(0, 1, (160, 8, 8, 1)), np.arange(160) % 4
    cases = {}

    def add(name, *words, images=images, labels=labels, **others):
        np.savez(folder / f"{name}.npz", images=images, labels=labels, **others)
        cases[name] = (folder / f"{name}.npz", words)

    def label(value, dtype=np.int64):
        changed = labels.astype(dtype)
        changed[7] = value
        return changed

    def pixel(value):
        changed = images.copy()
        changed[7, 3, 3, 0] = value
        return changed

    gap = ("without gaps", "[4")
    add("label 10", "10", *gap, labels=label(10))
    add("label -1", "from -1", "without gaps", labels=label(-1))
    add("label 255", "255", *gap, labels=label(255, np.uint8))
    add("label 2e9", "2000000000", *gap, labels=label(2_000_000_000))
    add("label beyond int32", "4294967297", *gap, labels=label(2**32 + 1))
    add("labels from 1", "[0]", "0 to 3 without gaps", "np.unique", labels=labels + 1)
    add("one class", "two classes", labels=labels * 0)
    soft, several = np.eye(4)[labels] * 0.8 + 0.05, np.eye(4)[labels] + np.eye(4)[0]
    add("labels soft", "(160, 4)", "not one-hot", "argmax", labels=soft)
    add("labels several", "(160, 4)", "row 0 is [2.0", "column", labels=several)
    add("labels in pairs", "(80, 2)", "one label for each", labels=labels.reshape(80, 2))
    add("labels half", "row 1 is 0.5", "whole number", "np.unique", labels=labels / 2)
    add("labels NaN", "row 7 is nan", "isfinite", labels=label(np.nan, float))
    add("labels complex", "complex128", "whole numbers", "np.unique", labels=labels * 1j)
    add("labels objects", "`labels`", "object", "tolist", labels=labels.astype(object))
    add("labels missing", "(159,)", "one label for each", labels=labels[1:])
    add("NaN", "number 7", "not finite", "remove", images=pixel(np.nan))
    add("infinite", "number 7", "not finite", images=pixel(np.inf))
    add("beyond float32", "number 7", "not finite", images=pixel(1e300))
    add("0 to 255", "to 255", "0 to 1", images=pixel(255.0))
    add("negative", "-1", "0 to 1", images=pixel(-1))
    add("channels first", "(160, 3, 8, 8)", "moveaxis", images=np.ones((160, 3, 8, 8)))
    add("constant", "every value", "is 1", images=np.ones((160, 8, 8)))
    add("flat", "(160, 64)", "height", images=images.reshape(160, 64))
    add("five dimensions", "(1, 160, 8, 8, 1)", "height", images=images[None])
    add("no dimension", "()", "height", images=np.float32(1))
    add("no width", "(160, 8, 0, 1)", "height", images=images[:, :, :0])
    add("integers", "int64", "255", "uint8", images=(images * 255).astype(int))
    add("bool", "bool", "astype(np.uint8) * 255", images=images > 0.5)
    add("complex", "complex128", "uint8", images=images * 1j)
    add("text", "<U3", "uint8", images=np.full((160, 8, 8, 1), "0.5"))
    add("objects", "`images`", "object", "tolist", images=images.astype(object))
    add("groups missing", "(159,)", "160 images", groups=np.arange(159))
    add("two groups", "2 units", "no row is left", groups=np.arange(160) % 2)
    add("one row a class", "no row is left", "classes 0, 1, ", labels=np.arange(160))
    add("one image", "no row is left", "1 units", images=np.repeat(images[:1], 160, axis=0))
    add("no rows", "0 rows", "at least", images=images[:0], labels=labels[:0])
    add("few rows", "9 rows", "at least", images=images[:9], labels=labels[:9])
    add(
        "fewer than a batch",
        "--batch-size 16",
        "at most 14",
        images=images[:20],
        labels=labels[:20],
    )
    whole = (folder / "NaN.npz").read_bytes()
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 1
    contents = {
        "cut": whole[: len(whole) // 2],
        "flipped": broken,
        "empty": b"",
        "words": b"a,b\n1,2",
    }
    at = whole.index(b"160")
    contents["longer header"] = whole[:at] + b"960" + whole[at + 3 :]
    contents["pickle"] = b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x07builtin\x94."
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        cases[name] = (folder / name, ["--data.path", ".npz", "images", "labels"])
    np.save(folder / "one.npy", images)
    np.savez(folder / "other.npz", x_all=images, y_all=labels)
    with zipfile.ZipFile(folder / "photos.zip", "w") as file:
        file.writestr("a.jpg", b"no array")
    os.mkfifo(folder / "pipe")
    (folder / "directory").mkdir()
    for name in ("one.npy", "other.npz", "photos.zip", "pipe"):
        cases[name] = (folder / name, ["--data.path", ".npz", "images", "labels"])
    cases["other.npz"][1].extend(["`x_all` float64 [160, 8, 8, 1]", "file['y_all']"])
    cases["directory"] = (folder / "directory", ["no files", "arrays:", "folders:", "table:"])
    cases["absent.npz"] = (folder / "absent.npz", ["--data.path", "no such file"])
    below = folder / "one.npy" / "my.npz"
    cases["below a file"] = (below, ["--data.path", "Not a directory"])
    return cases


def text_cases(folder):
    cases = {}
    contents = {
        "binary": (b"words\0" * 900, ["zero", "not text", "--data.path"]),
        "utf-16": (("words " * 900).encode("utf-16"), ["UTF-16", "iconv"]),
        "utf-16 without mark": (("words " * 900).encode("utf-16le"), ["zero", "not text"]),
        "utf-32": (("words " * 900).encode("utf-32"), ["UTF-32", "iconv"]),
        "empty": (b"", ["--data.path", "not empty"]),
        "tiny": (b"word", ["4 bytes", "too little"]),
        "fewer than a batch": (b"words " * 20, ["--batch-size 16", "at most 7"]),
    }
    for name, (content, words) in contents.items():
        (folder / name).write_bytes(content)
        cases[name] = (folder / name, words)
    (folder / "nothing in it" / "inner").mkdir(parents=True)
    (folder / "binary in it").mkdir()
    (folder / "binary in it" / "a.txt").write_bytes(b"words " * 900)
    (folder / "binary in it" / "b.bin").write_bytes(b"\0" * 900)
    (folder / "the same").mkdir()
    for i in range(30):
        (folder / "the same" / f"{i}.txt").write_bytes(b"words " * 900)
    cases["the same"] = (folder / "the same", ["30 files", "1 different"])
    cases["directories"] = (folder / "binary i*", ["directories only", "/**/*"])
    os.mkfifo(folder / "pipe")
    for name in ("absent", "nothing in it", "*.none", "pipe"):
        cases[name] = (folder / name, ["--data.path", "text file", "glob"])
    cases["binary in it"] = (folder / "binary in it", ["b.bin", "several forms", "glob"])
    (folder / "zeros in it").mkdir()
    (folder / "zeros in it" / "a.txt").write_bytes(b"words " * 900)
    (folder / "zeros in it" / "b.dat").write_bytes(b"\0" * 900)
    cases["zeros in it"] = (folder / "zeros in it", ["b.dat", "not text", "glob"])
    return cases


@pytest.mark.parametrize(("package", "make_cases"), [(IMAGES, image_cases), (TEXT, text_cases)])
def test_bad_data_is_refused_before_anything_happens(server, tmp_path, package, make_cases):
    words = flags(server, package, workdir=tmp_path / "run", total_steps=4, stop_after_step=2)
    server.start(train, *words, package=package).ends_with(75)
    (tmp_path / "data").mkdir()
    cases = make_cases(tmp_path / "data")
    before = snapshot(tmp_path / "run")
    attempts = [
        flags(server, package, workdir=tmp_path / place, data__path=path)
        for path, _ in cases.values()
        for place in ("run", "new")
    ]
    answers = server.start(try_settings, attempts, package=package).answer()
    wrong = []
    for (name, (_, expected)), *two in zip(cases.items(), answers[::2], answers[1::2], strict=True):
        for code, text, compiled in two:
            fine = code == 2 and text.count("error:") == 1 and "Traceback" not in text
            if not fine or compiled or [word for word in expected if word not in text]:
                wrong.append(f"{name}: {code}, {compiled} compiled, {text[-600:]}")
    assert not wrong, "\n".join(wrong)
    assert before == snapshot(tmp_path / "run")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("package", [IMAGES, TEXT])
def test_files_that_may_not_be_read(server, tmp_path, package):
    data = tmp_path / "data"
    shutil.copy(server.root / ("images.npz" if "image" in package else "text.txt"), data)
    data.chmod(0)
    hooks = {become_nobody: None}
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        words = flags(server, package, workdir=Path(place, "new"), data__path=data)
        text = server.start(train_with, hooks, *words, package=package).ends_with(2)
        assert not Path(place, "new").exists()
    one_message(text, f"--data.path {data}", "ermission denied", "read it")
    assert "npz" not in text


def test_a_place_that_may_not_be_written(server, tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    place.chmod(0o555)
    words = flags(server, IMAGES, workdir=place, data__path=None)
    hooks = {become_nobody_with_data: None}
    text = server.start(train_with, hooks, *words).ends_with(2)
    one_message(text, "--workdir", "ermission denied")


def become_nobody_with_data(get, _):
    load = get("data").load

    def load_first(config):
        dataset = load(config)
        become_nobody(get, None)
        return dataset

    get("data").load = load_first
