"""A user's own pictures: every form of them is understood, and what is wrong with them is named."""

import csv
import hashlib
import io
import itertools
import json
import os
import shutil

import numpy as np
import pyarrow
import pytest
from children import (
    IMAGES,
    IMAGES_NNX,
    end_with,
    evaluate,
    flags,
    read_state,
    result_of,
    start_two,
    train,
    train_with,
)
from PIL import Image
from pyarrow import parquet

pytestmark = pytest.mark.slow

ROWS = 60


def draw(rows=ROWS, height=8, width=8, seed=0):
    """Grey images that all differ, and their labels: 0, 1 and 2, in this order."""
    images = np.random.default_rng(seed).integers(0, 256, (rows, height, width), dtype=np.uint8)
    return images, np.arange(rows) * 3 // rows


def write_folders(root, images=None, names="012", ending="png", **options):
    """A folder for each class."""
    images, labels = draw() if images is None else images
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = root / names[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:03}.{ending}", **options)
    return root


def load_all(get, cases):
    """What load() says of each --data.path with these settings: facts, or the error."""
    config, data, answers = get("config"), get("data"), []
    for path, settings in cases:
        try:
            found = data.load(config.Config(data=config.DataConfig(path=path, **settings)))
        except config.SettingError as error:
            answers.append({"error": str(error)})
            continue
        splits = (found.train, found.validation, found.test)
        rows = [split.rows(np.arange(len(split))) for split in splits]
        content = b"".join(x["image"].tobytes() + x["label"].tobytes() for x in rows)
        answers.append(
            {
                "digest": hashlib.sha256(content).hexdigest(),
                "images": [x["image"].tolist() for x in rows],
                "labels": [x["label"].tolist() for x in rows],
                "mask": [x["mask"].tolist() for x in rows],
                "found": found.found,
                "rule": found.split_rule,
                "classes": found.metadata["classes"],
                "fingerprint": found.fingerprint,
                "warnings": "; ".join(found.warnings),
            }
        )
    return answers


def all_rows(answer):
    """Images and labels of all splits together."""
    return [list(itertools.chain(*answer[name])) for name in ("images", "labels")]


@pytest.fixture(scope="module")
def load(server):
    """Load one place, or several of them."""

    def load(*paths, **settings):
        cases = [[str(path), settings] for path in paths]
        answers = server.start(load_all, cases).answer()
        return answers[0] if len(paths) == 1 else answers

    return load


def test_the_same_pictures_in_every_form_are_the_same_rows(load, tmp_path):
    images, labels = draw()
    folders = write_folders(tmp_path / "folders")
    arrays = {
        "own": {"images": images, "labels": labels},
        "column": {"images": images[..., None], "labels": labels[:, None]},
        "one-hot": {"images": images, "labels": np.eye(3)[labels]},
        "texts": {"images": images, "labels": labels.astype(str)},
    }
    for name, contents in arrays.items():
        np.savez(tmp_path / f"{name}.npz", **contents)
    np.savez_compressed(tmp_path / "compressed.npz", **arrays["own"])
    (tmp_path / "npy").mkdir()
    np.save(tmp_path / "npy" / "images.npy", images)
    np.save(tmp_path / "npy" / "labels.npy", labels)
    rows = [(f"folders/{label}/{number:03}.png", label) for number, label in enumerate(labels)]
    with open(tmp_path / "semicolons.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=";").writerows([("Path", "Class"), *rows])
    lines = [json.dumps({"file_name": path, "label": int(label)}) for path, label in rows]
    (tmp_path / "table.jsonl").write_text("\n".join(lines))
    (folders / "metadata.csv").write_text(
        "file_name,label\n" + "".join(f"{path[8:]}, {label} \n" for path, label in rows)
    )
    places = [*(f"{name}.npz" for name in arrays), "compressed.npz", "npy"]
    places += ["semicolons.csv", "table.jsonl", "folders"]
    answers = load(*(tmp_path / place for place in places))
    (folders / "metadata.csv").unlink()
    answers.append(load(folders))
    assert {x.get("digest", x.get("error")) for x in answers} == {answers[0]["digest"]}
    assert len({x["fingerprint"] for x in answers}) == 1
    assert all(x["classes"] == ["0", "1", "2"] and not x["warnings"] for x in answers)
    assert answers[0]["found"].startswith("arrays in memory: 60 images 8 x 8 x 1 uint8, 3 classes")
    assert answers[-1]["found"].startswith("folders, decoded into memory: 60 images 8 x 8 x 1")
    assert answers[-2]["found"].startswith("table, decoded into memory")
    assert answers[0]["found"].endswith("3 classes (0, 1, 2), values from 0 to 255")


def test_splits_that_the_data_bring_are_kept(load, tmp_path):
    images, labels = draw()
    held = np.arange(ROWS) % 5
    parts = {"train": held > 1, "val": held == 1, "test": held == 0}
    for name, rows in parts.items():
        write_folders(tmp_path / "folders" / name, (images[rows], labels[rows]))
    medmnist = {}
    for name, rows in parts.items():
        medmnist |= {f"{name}_images": images[rows], f"{name}_labels": labels[rows, None]}
    np.savez(tmp_path / "medmnist.npz", **medmnist)
    keras = {f"x_{name}": images[rows] for name, rows in parts.items()}
    np.savez(tmp_path / "keras.npz", **keras, **{f"y_{x}": labels[y] for x, y in parts.items()})
    lines = ["path\tlabel\tsplit\n"]
    for name, rows in parts.items():
        shown = {"val": "Validation", "test": "evaluation"}.get(name, name)
        lines += [
            f"folders/{name}/{labels[i]}/{place:03}.png\t{labels[i]}\t{shown}\n"
            for place, i in enumerate(np.flatnonzero(rows))
        ]
    (tmp_path / "table.tsv").write_text("".join(lines))
    names = ("folders", "medmnist.npz", "keras.npz", "table.tsv")
    for answer in load(*(tmp_path / name for name in names)):
        assert answer["labels"] == [labels[rows].tolist() for rows in parts.values()]
        assert answer["images"][2] == images[parts["test"], ..., None].tolist()
        assert answer["rule"] == "The data bring their splits."
    # Without one of the held-out splits it is cut from the rows to train on, and that is said.
    shutil.rmtree(tmp_path / "folders" / "val")
    answer = load(tmp_path / "folders")
    assert answer["labels"][2] == labels[parts["test"]].tolist()
    assert [len(x) for x in answer["labels"]] == [32, 4, 12]
    assert answer["rule"].startswith("The data bring no validation: of the rows to train on")
    (tmp_path / "folders" / "test").rename(tmp_path / "folders" / "Valid")
    answer = load(tmp_path / "folders")
    assert [len(x) for x in answer["labels"]] == [28, 12, 8]
    assert answer["rule"].startswith("The data bring no test: of the rows to train on")
    # A class that is not trained on is named.
    shutil.rmtree(tmp_path / "folders" / "train" / "1")
    assert "no row of class 1 is trained on" in load(tmp_path / "folders")["warnings"]


def write_parquet(path, images, labels, names):
    """A file as Hugging Face's data sets write it."""
    rows = [{"bytes": png(image), "path": f"{i}.png"} for i, image in enumerate(images)]
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pyarrow.table({"image": rows, "label": pyarrow.array(labels, pyarrow.int64())})
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table.replace_schema_metadata(metadata), path, row_group_size=7)


def png(image):
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    return content.getvalue()


def test_parquet_is_read_as_folders_are(load, tmp_path):
    images, labels = draw()
    names = ["zebra", "cat", "dog"]
    wanted = load(write_folders(tmp_path / "folders", names=names))
    numbers = np.array([2, 0, 1])[labels]  # folders are in the order of their names
    order = np.argsort(numbers, kind="stable")
    write_parquet(tmp_path / "hub" / "data" / "train.parquet", images[order], labels[order], names)
    answer = load(tmp_path / "hub")
    assert answer["classes"] == wanted["classes"] == ["cat", "dog", "zebra"]
    assert answer["digest"] == wanted["digest"]
    assert answer["rule"].startswith("Sorted by class and by a digest of the pixels")
    # Splits are in the names of the files; a second start reads what the first converted.
    held = np.arange(ROWS) % 5 == 0
    for name, rows in (("train-00000-of-00001", ~held), ("test-00000-of-00001", held)):
        path = tmp_path / "split" / f"{name}.parquet"
        write_parquet(path, images[rows], labels[rows], names)
    first, again = load(tmp_path / "split"), load(tmp_path / "split")
    assert first == again and first["rule"].startswith("The data bring no validation")
    assert first["labels"][2] == numbers[held].tolist()
    (tmp_path / "junk.parquet").write_bytes(b"junk")
    parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "other.parquet")
    assert "no whole Parquet file" in load(tmp_path / "junk.parquet")["error"]
    assert "has the columns 'a'" in load(tmp_path / "other.parquet")["error"]


def hostile_pictures(folder):
    """Pictures, each with the pixel that it must give at the centre, or why it is left out."""
    grey = Image.new("L", (8, 8), 100)
    colour = Image.new("RGB", (8, 8), (200, 10, 10))
    cases = {}

    def save(name, picture, outcome, **options):
        picture.save(folder / name, **options)
        cases[name] = outcome

    save("grey.png", grey, [100, 100, 100])
    save("UPPER.PNG", colour, [200, 10, 10])
    save("with 'quotes' and spaces.png", colour, [200, 10, 10])
    save("новый 新 ü\n.png", colour, [200, 10, 10])
    save("palette.png", colour.convert("P"), [200, 10, 10])
    save("one bit.png", grey.convert("1", dither=0), [0, 0, 0])
    deep = np.full((8, 8), 100 * 256 + 7, np.uint16)
    save("sixteen bits.png", Image.fromarray(deep), [100, 100, 100])
    save("transparent.png", Image.new("RGBA", (8, 8), (9, 9, 9, 0)), [255, 255, 255])
    save("half.png", Image.new("LA", (8, 8), (0, 128)), [127, 127, 127])
    save("ink.tif", Image.new("CMYK", (8, 8), (0, 255, 255, 0)), [255, 0, 0])
    save("frames.gif", colour, [200, 10, 10], save_all=True, append_images=[grey.convert("RGB")])
    save("one pixel.png", Image.new("RGB", (1, 1), (1, 2, 3)), [1, 2, 3])
    save("wide.png", Image.new("RGB", (30_000, 2), (1, 2, 3)), [1, 2, 3])
    save("floats.tif", Image.fromarray(np.ones((8, 8), np.float32)), "pixels of 32 bits")
    save("huge.png", Image.new("1", (20_000, 10_000)), "too many pixels")
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.png").write_text("no picture")
    whole = io.BytesIO()
    Image.fromarray(draw(1, 99, 99)[0][0]).save(whole, "JPEG")
    (folder / "cut.jpg").write_bytes(whole.getvalue()[:2000])
    os.symlink(folder / "nowhere.png", folder / "broken link.png")
    reasons = {"empty.jpg": "empty", "text.png": "no picture", "cut.jpg": "damaged or cut off"}
    return cases | reasons | {"broken link.png": "No such file"}


def test_hostile_pictures_are_right_or_named(load, tmp_path):
    write_folders(tmp_path / "data", draw(90))
    folder = tmp_path / "data" / "more"
    folder.mkdir()
    cases = hostile_pictures(folder)
    good = [name for name, outcome in cases.items() if isinstance(outcome, list)]
    answer = load(tmp_path / "data")
    rows, labels = all_rows(answer)
    assert len(rows) == 90 + len(good)
    assert f"left out: {len(cases) - len(good)} pictures that cannot be read" in answer["warnings"]
    assert "1 pictures have several frames, of which the first is taken" in answer["warnings"]
    assert np.shape(rows)[1:] == (64, 64, 3)  # they have different sizes
    more = answer["classes"].index("more")
    centres = [rows[i][32][32] for i, label in enumerate(labels) if label == more]
    wanted = {tuple(cases[name]) for name in good}
    assert all(min(np.abs(np.subtract(x, y)).max() for y in centres) <= 3 for x in wanted)
    # Each of those left out alone: the reason is the right one.
    for name, reason in cases.items():
        if isinstance(reason, str):
            place = tmp_path / "alone"
            write_folders(place, draw(30))
            shutil.copy(folder / name, place / "0" / name, follow_symlinks=False)
            said = load(place)["warnings"]
            assert f"left out: 1 pictures that cannot be read, such as 0/{name} ({reason}" in said
            shutil.rmtree(place)


def test_what_lies_around_is_left_out(load, tmp_path):
    root = write_folders(tmp_path / "photos", names=["tabby cat", "dog", "貓"])
    before = load(root)
    assert before["classes"] == ["dog", "tabby cat", "貓"]
    (root / ".DS_Store").write_bytes(b"x")
    (root / "__MACOSX" / "dog").mkdir(parents=True)
    (root / "dog" / "._000.png").write_bytes(b"x")
    (root / "dog" / "notes.txt").write_text("x")
    (root / "nothing in it").mkdir()
    Image.new("L", (8, 8)).save(root / "loose.png")
    os.symlink(root, root / "dog" / "loop")
    answer = load(root)
    assert answer["digest"] == before["digest"] and answer["fingerprint"] == before["fingerprint"]
    for words in (
        "1 files that are no pictures (.txt)",
        "1 folders without a picture",
        "1 pictures that are in no",
    ):
        assert f"left out: {words}" in answer["warnings"]
    (root / "dog" / "loop").unlink()
    # Deeper folders belong to the class; links to folders are followed.
    (tmp_path / "linked").mkdir()
    os.symlink(root / "tabby cat", tmp_path / "linked" / "tabby cat")
    os.symlink(root / "dog", tmp_path / "linked" / "dog")
    (tmp_path / "linked" / "貓").mkdir()
    (root / "貓").rename(tmp_path / "linked" / "貓" / "deeper")
    assert load(tmp_path / "linked")["digest"] == before["digest"]


def test_places_that_are_not_understood(load, tmp_path):
    (tmp_path / "nothing").mkdir()
    write_folders(tmp_path / "one" / "photos")
    write_folders(tmp_path / "two" / "train")
    write_folders(tmp_path / "two" / "cats")
    write_folders(tmp_path / "mixed")
    np.save(tmp_path / "mixed" / "images.npy", draw()[0])
    (tmp_path / "flat").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "flat" / "a.png")
    write_folders(tmp_path / "tested" / "test")
    (tmp_path / "tables").mkdir()
    tables = {
        "a.csv": "name,kind\n1.png,2\n",
        "b.csv": "path,label\n",
        "latin.csv": "path,label\n1.png,caf\xe9\n".encode("latin-1"),
        "c.csv": "path,label,split\n1.png,2,train\n2.png,3,later\n",
        "d.csv": "path,label\n1.png,2\n2.png,2\n",
        "e.csv": "path,file,label\n1.png,1.png,2\n",
        "e.jsonl": '{"path": "1.png", "label": 2}\n{"path": \n',
        "gone.csv": "path,label\n1.png,2\n2.png,3\n",
    }
    for name, text in tables.items():
        (tmp_path / "tables" / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    cases = {
        "nothing": ["no files", "folders:", "table:", "arrays:"],
        "one": ["one class only, 'photos'", "'0', '1', '2'"],
        "two": ["folders of splits ('train') beside others ('cats')"],
        "mixed": ["may be several things", "--data.format", "images.npy"],
        "flat": ["is nothing that is understood", "a.png"],
        "tested": ["no rows to train on"],
        "tables": ["8 tables", "--data.path"],
        "tables/a.csv": ["'name', 'kind'", "one must be the path", "file_name"],
        "tables/b.csv": ["without rows"],
        "tables/latin.csv": ["not UTF-8 from byte 20"],
        "tables/c.csv": ["row 2", "'later'", "validation"],
        "tables/d.csv": ["rows of 1 classes"],
        "tables/e.csv": ["must be the path", "found 2"],
        "tables/e.jsonl": ["line 2", "one JSON object"],
        "tables/gone.csv": ["none of the pictures", "No such file"],
    }
    answers = load(*(tmp_path / name for name in cases))
    for (name, words), answer in zip(cases.items(), answers, strict=True):
        missing = [word for word in words if word not in answer.get("error", "")]
        assert not missing, f"{name}: {missing} not in {answer}"
        assert answer["error"].startswith(f"--data.path {tmp_path / name}: ")
    assert "error" not in load(tmp_path / "mixed", format="folders")


def test_sizes_and_crops(load, tmp_path):
    """The right half is white: what of it is left shows how the picture was brought to its size."""
    image = np.zeros((8, 16), np.uint8)
    image[:, 8:] = 255
    wide = np.array([np.where(np.arange(16) == i % 16, 7, image) for i in range(ROWS)], np.uint8)
    root = write_folders(tmp_path / "wide", (wide, draw()[1]))
    asked = {crop: load(root, image_size=8, crop=crop) for crop in ("center", "stretch", "pad")}
    assert np.shape(load(root)["images"][0])[1:] == (8, 16, 1)  # all alike: as they are
    first = {crop: np.array(answer["images"][0][0])[..., 0] for crop, answer in asked.items()}
    assert {x.shape for x in first.values()} == {(8, 8)}
    assert (first["pad"][[0, 1, 6, 7]] == 0).all() and first["pad"][3, 7] > 200
    assert first["center"][0, 7] > 200 and first["stretch"][0, 7] > 200
    # A photograph that is stored turned: half of it, seen upright, is white at the bottom.
    turned = Image.new("RGB", (16, 8))
    turned.paste((255, 255, 255), (8, 0, 16, 8))
    exif = Image.Exif()
    exif[0x0112] = 6
    write_folders(tmp_path / "turned")
    shutil.rmtree(tmp_path / "turned" / "0")
    (tmp_path / "turned" / "0").mkdir()
    turned.save(tmp_path / "turned" / "0" / "a.jpg", exif=exif, quality=95)
    for name in ("1", "2"):
        shutil.rmtree(tmp_path / "turned" / name)
        (tmp_path / "turned" / name).mkdir()
        for i in range(15):
            Image.fromarray(draw(1, 16, 8, seed=i + 20 * int(name))[0][0]).convert("RGB").save(
                tmp_path / "turned" / name / f"{i}.png"
            )
    answer = load(tmp_path / "turned")
    images, labels = all_rows(answer)
    upright = np.array(images[labels.index(0)])
    assert upright.shape == (16, 8, 3)
    assert upright[:6].max() < 40 and upright[10:].min() > 215


# --------------------------------------------------------------- Pictures that do not fit in memory


def keep_nothing_in_memory(get, _):
    """Decode every picture when it is needed, as if all were too many for the memory."""
    get("sources").IN_MEMORY = 0


def train_and_read(get, words, resumed_words):
    """Train, go on, and return a digest of each array of the last state."""
    keep_nothing_in_memory(get, None)
    codes = [train(get, *words)] + ([train(get, *resumed_words)] if resumed_words else [])
    workdir = words[words.index("--workdir") + 1]
    return codes, read_state(get, workdir)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """160 pictures of 4 classes that can be told apart."""
    images = draw(160)[0]
    labels = np.sort(np.arange(160) % 4)
    images //= 2
    images[np.arange(160), labels, labels] = 255
    return write_folders(tmp_path_factory.mktemp("photos"), (images, labels), names="abcd")


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_run_on_decoded_pictures_resumes_exactly(server, tmp_path, photos, workers):
    changes = {"data__path": photos, "data__augment": "crop-flip", "data__workers": workers}
    words = {
        name: flags(server, IMAGES, workdir=tmp_path / name, **changes, **more)
        for name, more in {"whole": {}, "parts": {"stop_after_step": 5}}.items()
    }
    whole = server.start(train_and_read, words["whole"], []).answer()
    again = flags(server, IMAGES, workdir=tmp_path / "parts", **changes)
    parts = server.start(train_and_read, words["parts"], again).answer()
    assert (whole[0], parts[0]) == ([0], [75, 0])
    assert whole[1] == parts[1]
    log = (tmp_path / "whole" / "train.log").read_text()
    assert "folders, decoded when needed: 160 images 8 x 8 x 1 uint8, 4 classes (a, b, c, d)" in log
    assert "by a digest of the path" in log


@pytest.mark.parametrize("package", [IMAGES, IMAGES_NNX])
def test_two_processes_decode_and_resume_exactly(server, tmp_path, photos, package):
    changes = {"data__path": photos, "data__augment": "flip"}
    hooks = {keep_nothing_in_memory: None}
    states = []
    for name, *stops in (("whole", {}), ("parts", {"stop_after_step": 5}, {})):
        for more in stops:
            words = flags(server, package, workdir=tmp_path / name, **changes, **more)
            processes = start_two(server, train_with, hooks, *words, package=package)
            end_with(processes, 75 if more else 0)
        states.append(server.start(read_state, tmp_path / name, package=package).answer())
    assert states[0] == states[1]
    words = flags(server, package, workdir=tmp_path / "one", **changes)
    server.start(train_with, hooks, *words, package=package).ends_with(0)
    one, two = (result_of(tmp_path / name) for name in ("one", "whole"))
    assert one["eval"]["accuracy"] == two["eval"]["accuracy"]
    np.testing.assert_allclose(one["eval"]["loss"], two["eval"]["loss"], rtol=1e-4)


def test_a_picture_that_cannot_be_read_does_not_count(server, tmp_path, photos):
    data = shutil.copytree(photos, tmp_path / "data")
    for file in sorted((data / "a").iterdir())[::2]:
        file.write_bytes(b"damaged")
    words = flags(server, IMAGES, workdir=tmp_path / "run", data__path=data, data__workers=2)
    run = server.start(train_with, {keep_nothing_in_memory: None}, *words)
    text = run.ends_with(0)
    assert text.count("a/000.png cannot be read (no picture, or a damaged one)") == 1
    assert text.count("cannot be read") == 20
    rows = result_of(tmp_path / "run")["eval"]["num_examples"]
    assert 20 < rows < 32


def test_other_pictures_are_scored_with_the_classes_of_the_run(server, tmp_path, photos):
    words = flags(server, IMAGES, workdir=tmp_path / "run", data__path=photos, total_steps=80)
    server.start(train, *words).ends_with(0)
    other = shutil.copytree(photos, tmp_path / "other")
    shutil.rmtree(other / "a")
    words = ["--workdir", str(tmp_path / "run"), "--json", "--data.path"]
    run = server.start(evaluate, *words, str(other))
    scores = json.loads(run.ends_with(0).splitlines()[-1])
    assert scores["accuracy"] > 0.9
    (other / "b").rename(other / "strange")
    text = server.start(evaluate, *words, str(other)).ends_with(2)
    assert "without 'strange'" in text
