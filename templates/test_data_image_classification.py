"""Your data: forms that are read, splits by content, messages that help. Delete with data.py."""

import re

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def load(module):
    """Load the data set at a path."""
    config, data = module("config"), module("data")
    return lambda path: data.load(config.Config(data=config.DataConfig(path=str(path))))


def write(path, images, labels, **others):
    np.savez(path, images=images, labels=labels, **others)
    return path


def contents(data):
    """The set of images and labels of each split."""
    splits = (data.train, data.validation, data.test)
    return [
        {(image.tobytes(), int(label)) for image, label in zip(x.images, x.labels, strict=True)}
        for x in splits
    ]


def draw(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, 4, 4), dtype=np.uint8)


def test_every_row_is_in_one_split_and_every_class_in_each(load, tmp_path):
    images = np.arange(200, dtype=np.uint8).repeat(16).reshape(200, 4, 4)
    data = load(write(tmp_path / "my.npz", images, np.arange(200) % 10))
    splits = (data.train, data.validation, data.test)
    parts = [split.rows(np.arange(len(split)))["image"][:, 0, 0, 0] for split in splits]
    assert [len(part) for part in parts] == [144, 16, 40]
    assert sorted(np.concatenate(parts)) == list(range(200))
    for split, part in zip(splits, parts, strict=True):
        np.testing.assert_array_equal(split.rows(np.arange(len(split)))["label"], part % 10)
    assert (data.num_outputs, data.warnings) == (10, ())
    assert "every fifth image" in data.split_rule and "splits, version 1" in data.split_rule
    # Labels that go 0 1 2 ... 9 0 1 2 ...: every fifth row would be of two classes only.
    assert set(data.train.labels) == set(data.validation.labels) == set(data.test.labels)
    assert data.test.summary == "40 rows, 10 classes of 4 to 4 rows"


def test_the_splits_do_not_depend_on_the_order_of_the_rows(load, tmp_path):
    images, labels = draw(300), np.arange(300) % 7
    labels[:60] = 0
    groups = np.array([f"patient {i}" for i in np.arange(300) // 4])
    order = np.random.default_rng(1).permutation(300)
    for others in ({}, {"groups": groups}):
        shuffled = {name: x[order] for name, x in others.items()}
        first = load(write(tmp_path / "a.npz", images, labels, **others))
        again = load(write(tmp_path / "b.npz", images[order], labels[order], **shuffled))
        assert contents(first) == contents(again)
        assert first.fingerprint != again.fingerprint  # a run would see them in another order


def test_what_belongs_together_is_in_one_split(load, tmp_path):
    # 60 different images, four times each, and groups of 8 different ones.
    images = np.tile(draw(60), (4, 1, 1))
    data = load(write(tmp_path / "equal.npz", images, np.arange(240) % 3))
    train, validation, test = contents(data)
    assert not train & validation and not train & test and not validation & test
    for kind in (int, str, "S9"):
        groups = (np.arange(240) // 8).astype(kind)
        path = write(tmp_path / "groups.npz", draw(240), np.arange(240) % 3, groups=groups)
        data = load(path)
        train, validation, test = (
            set(groups[split.numbers]) for split in (data.train, data.validation, data.test)
        )
        assert not train & validation and not train & test and not validation & test
        assert (len(train), len(validation), len(test)) == (21, 3, 6)
        assert "every fifth group" in data.split_rule


def test_a_rare_class_is_trained_on(load, module, tmp_path):
    labels = np.where(np.arange(100) < 98, 0, [1, 2] * 50)
    for seed in range(10):  # held out or not, by the content of its only row
        data = load(write(tmp_path / "my.npz", draw(100, seed), labels))
        assert set(data.train.labels) == {0, 1, 2}
        warnings = "; ".join(data.warnings)
        assert "validation has no row of classes 1, 2" in warnings
        assert "the test has no row of classes 1, 2" in warnings
        assert "98 of 100 rows are of class 0" in warnings
        assert data.train.baseline == {"largest_class": (len(data.train) - 2) / len(data.train)}
        assert data.test.summary == "20 rows, 3 classes: 0 20, 1 0, 2 0"
    with pytest.raises(module("config").SettingError, match=r"no row is left .* classes 0, 1, 2,"):
        load(write(tmp_path / "few.npz", draw(12), np.arange(12)))
    groups = np.arange(12) // 6
    with pytest.raises(module("config").SettingError, match=r"2 units.* class"):
        load(write(tmp_path / "two.npz", draw(12), np.arange(12) % 2, groups=groups))


def test_what_is_doubtful_about_the_splits_is_said(load, tmp_path):
    def warnings(images, **groups):
        path = write(tmp_path / "my.npz", images, np.arange(100) % 2, **groups)
        return "; ".join(load(path).warnings)

    assert warnings(draw(100)) == ""
    three = warnings(draw(100), groups=np.arange(100) * 3 // 100)
    assert "validation has 33.0% of the rows" in three or "validation has 34.0% of" in three
    images = draw(100)
    images[11] = images[80]
    assert "1 images occur again with another label, such as rows 11 and 80" in warnings(images)
    images[:] = np.tile(images[:10], (10, 1, 1))
    said = warnings(images, groups=np.arange(100))
    assert "images of the test are trained on as well" in said
    assert "almost black" in warnings(images % 2)


def test_the_splits_share_one_array(load, tmp_path):
    data = load(write(tmp_path / "my.npz", draw(100), np.arange(100) % 3))
    assert np.shares_memory(data.train.shared_images, data.test.shared_images)


@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", ">f4", "f8", ">f8", "C", "zip"])
def test_images_of_each_dtype_and_order_are_read(load, module, monkeypatch, tmp_path, dtype):
    monkeypatch.setattr(module("sources.arrays"), "BLOCK", 7)
    monkeypatch.setattr(module("sources.checks"), "BLOCK", 100)
    images = np.random.default_rng(0).integers(0, 256, (30, 5, 4, 3), dtype=np.uint8)
    labels = np.arange(30, dtype=">i4") % 2
    save = np.savez_compressed if dtype == "zip" else np.savez
    if dtype == "C":
        images = np.asfortranarray(images)
    elif dtype not in ("u1", "zip"):
        images = (images / 255).astype(dtype)
    save(tmp_path / "my.npz", images=images, labels=labels)
    train = load(tmp_path / "my.npz").train
    is_float = images.dtype.kind == "f"
    assert train.images.dtype == (np.float32 if is_float else np.uint8)
    np.testing.assert_array_equal(train.images, images.astype(train.images.dtype)[train.numbers])
    np.testing.assert_array_equal(train.labels, labels[train.numbers])


def test_the_fingerprint_follows_images_and_labels_and_groups(load, tmp_path):
    images, labels, groups = draw(20), np.arange(20) % 2, np.arange(20)
    first = load(write(tmp_path / "a.npz", images, labels)).fingerprint
    assert load(write(tmp_path / "b.npz", images, labels)).fingerprint == first
    assert load(write(tmp_path / "c.npz", images, 1 - labels)).fingerprint != first
    with_groups = load(write(tmp_path / "d.npz", images, labels, groups=groups)).fingerprint
    assert with_groups != first
    images[7, 1, 1] += 1
    assert load(write(tmp_path / "e.npz", images, labels)).fingerprint != first


def test_folders_of_pictures_are_read_as_arrays_are(load, module, monkeypatch, tmp_path):
    images, labels = draw(60), np.arange(60) * 3 // 60
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / "photos" / ["cat", "dog", "eel"][label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number:02}.png")
    arrays, pictures = load(write(tmp_path / "my.npz", images, labels)), load(tmp_path / "photos")
    assert contents(arrays) == contents(pictures)
    assert pictures.metadata == {"classes": ["cat", "dog", "eel"], "image_shape": [4, 4, 1]}
    # Too many to be kept in memory: decoded when they are asked for.
    monkeypatch.setattr(module("sources"), "IN_MEMORY", 0)
    (tmp_path / "photos" / "cat" / "00.png").write_bytes(b"damaged")
    later = load(tmp_path / "photos")
    batches = [split.rows(np.arange(len(split))) for split in (later.train, later.test)]
    assert sum(map(len, (later.train, later.validation, later.test))) == 60
    for batch in batches:
        for image, mask in zip(batch["image"], batch["mask"], strict=True):
            assert (image[..., 0] == images).all(axis=(1, 2)).sum() == mask
    assert later.train.workers > 0 and pictures.train.workers == 0


def test_balanced_classes_count_the_same(module, tmp_path):
    config, data, task = module("config"), module("data"), module("task")
    images, labels = draw(400), np.repeat([0, 1, 2], [300, 80, 20])
    settings = config.DataConfig(path=str(write(tmp_path / "my.npz", images, labels)))
    balanced = task.TaskConfig(class_weights="balanced")
    train = data.load(config.Config(data=settings, task=balanced)).train
    batch = train.rows(np.arange(len(train)))
    totals = np.bincount(batch["label"], weights=batch["class_weight"])
    np.testing.assert_allclose(totals, len(train) / 3, rtol=1e-5)


IMAGES, LABELS = np.random.default_rng(0).uniform(0, 1, (60, 8, 8)), np.arange(60) % 3
TEXTS = np.array(["cat", "dog", "eel"])[LABELS]
ONE_HOT = np.eye(3)[LABELS]


def changed(array, value):
    array = np.array(array, np.result_type(array, np.min_scalar_type(value)))
    array[7] = value
    return array


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": np.moveaxis(np.stack([IMAGES] * 3), 0, 1)}, "(60, 3, 8, 8)"),
        ({"images": IMAGES.reshape(60, 64)}, "(60, 64)"),
        ({"images": (IMAGES * 255).astype(np.int64)}, "int64"),
        ({"images": (IMAGES * 2000 - 1000).astype(np.int16)}, "int16"),
        ({"images": (IMAGES * 65535).astype(np.uint16)}, "uint16"),
        ({"images": IMAGES > 0.5}, "bool"),
        ({"images": IMAGES * 255}, "float32 and values from"),
        ({"images": IMAGES * 2 - 1}, "float32 and values from -"),
        ({"images": IMAGES.astype(str)}, "<U"),
        ({"images": IMAGES.astype(object)}, "object"),
        ({"images": changed(IMAGES, np.nan)}, "number 7"),
        ({"images": changed(IMAGES, 1e300)}, "number 7"),
        ({"labels": LABELS + 1}, "from 1 up to 3"),
        ({"labels": LABELS * 5}, "up to 10 but [1, 2] never"),
        ({"labels": changed(LABELS, -1)}, "from -1"),
        ({"labels": changed(LABELS, 2**40)}, str(2**40)),
        ({"labels": (LABELS + 1)[:, None]}, "from 1 up to 3"),
        ({"labels": LABELS / 2}, "row 1 is 0.5"),
        ({"labels": changed(LABELS / 1, np.nan)}, "row 7 is nan"),
        ({"labels": TEXTS.astype(object)}, "object"),
        ({"labels": ONE_HOT * 0.8 + 0.2 / 3}, "not one-hot, row 0 is [0.8"),
        ({"labels": np.stack([LABELS * 0 + 5, LABELS], 1)}, "not one-hot, row 0 is [5, 0]"),
        ({"labels": TEXTS[:, None].repeat(2, 1)}, "['cat', 'cat']"),
        ({"images": (IMAGES > 0.5).astype(int)}, "int64 and values from 0 to 1"),
        ({"labels": changed(ONE_HOT, 1)}, "not one-hot, row 7 is [1.0, 1.0, 1.0]"),
        ({"labels": np.eye(6)[LABELS * 2]}, "up to 4"),
        ({"groups": np.arange(60) / 4}, "float64"),
        ({"groups": np.arange(60).astype(object)}, "object"),
    ],
)
def test_a_message_names_what_is_wrong_and_its_code_mends_it(load, module, tmp_path, change, words):
    arrays = {"images": IMAGES, "labels": LABELS} | change
    with pytest.raises(module("config").SettingError) as error:
        load(write(tmp_path / "my.npz", **arrays))
    assert words in str(error.value) and str(tmp_path) in str(error.value)
    for _ in range(2):  # what is text may have to be numbers first
        exec(re.findall("`(\\w+(?:, \\w+)* = .*?)`", str(error.value))[-1], {"np": np}, arrays)
        arrays = {name: arrays[name] for name in ("images", "labels", "groups") if name in arrays}
        try:
            data = load(write(tmp_path / "my.npz", **arrays))
        except module("config").SettingError as another:
            error.value.args = another.args
        else:
            break
    assert data.num_outputs >= 2 and len(data.train) > 30


@pytest.mark.parametrize(
    "labels",
    [LABELS, LABELS[:, None], LABELS / 1, ONE_HOT, ONE_HOT > 0, TEXTS, TEXTS[:, None]],
)
def test_labels_come_in_several_forms(load, tmp_path, labels):
    data = load(write(tmp_path / "my.npz", IMAGES, labels))
    np.testing.assert_array_equal(data.test.labels, LABELS[data.test.numbers])


def test_other_names_of_arrays_are_listed_and_the_line_makes_a_right_file(load, module, tmp_path):
    small = {"x_few": IMAGES[:20], "x_all": IMAGES, "y_few": LABELS[:20], "y_all": LABELS}
    sets = {"x_all": IMAGES, "y_few": LABELS * 9, "x_few": IMAGES, "y_all": LABELS}
    alike = {"test_images": IMAGES, "test_labels": LABELS * 9}
    for arrays, wanted in (
        (small, LABELS),
        (sets, LABELS),
        (alike, None),
        ({"data": IMAGES[..., None], "target": LABELS[:, None]}, LABELS),
        ({"images": IMAGES, "y": TEXTS}, LABELS),
    ):
        np.savez(tmp_path / "my data.npz", **arrays)
        with pytest.raises(module("config").SettingError) as error:
            load(tmp_path / "my data.npz")
        message = str(error.value)
        for name, array in arrays.items():
            assert f"`{name}` {array.dtype} {list(array.shape)}" in message
        exec(re.findall("`(import .*?)`", message)[0], {})
        new = re.findall(r"makes (.*\.npz)", message)[0]
        if wanted is None:  # named as they should be: what is in them is another matter
            with pytest.raises(module("config").SettingError, match="labels"):
                load(new)
        else:
            assert len(load(new).train) == 43


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": np.ones((60, 8, 8))}, "every value of the images is 1"),
        ({"images": np.zeros((60, 8, 0))}, "(60, 8, 0)"),
        ({"images": IMAGES[..., None, None]}, "channels last"),
        ({"images": np.ones((60, 8, 8, 9), np.uint8)}, "CHANNELS in checks.py"),
        ({"labels": LABELS[1:]}, "(59,) for 60 images"),
        ({"labels": LABELS.reshape(30, 2)}, "(30, 2) for 60 images"),
        ({"labels": LABELS * 0}, "all labels are 0"),
        ({"images": IMAGES[:9], "labels": LABELS[:9]}, "9 rows: three splits need at least 10"),
        ({"groups": np.arange(59)}, "groups have shape (59,)"),
    ],
)
def test_data_that_no_line_of_code_mends_is_refused(load, module, tmp_path, change, words):
    with pytest.raises(module("config").SettingError) as error:
        load(write(tmp_path / "my.npz", **{"images": IMAGES, "labels": LABELS} | change))
    assert words in str(error.value)


def test_what_is_no_data_set_is_refused(load, module, tmp_path):
    (tmp_path / "junk.npz").write_bytes(b"junk")
    (tmp_path / "empty.npz").touch()
    (tmp_path / "directory").mkdir()
    with pytest.raises(module("config").SettingError, match=r"no files.*arrays: .*folders: "):
        load(tmp_path / "directory")
    for name in ("junk.npz", "empty.npz"):
        with pytest.raises(module("config").SettingError, match=f"{name}.*`images`.*`labels`"):
            load(tmp_path / name)
    with pytest.raises(module("config").SettingError, match=r"absent.npz: .*no such file"):
        load(tmp_path / "absent.npz")


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), MemoryError()])
def test_one_failure_is_not_taken_for_another(load, module, monkeypatch, tmp_path, error):
    path = write(tmp_path / "my.npz", IMAGES, LABELS)

    def fail(*_, **__):
        raise error

    if isinstance(error, MemoryError):
        monkeypatch.setattr(module("sources.arrays").np, "empty", fail)
        words = "needs 0.0 GiB of memory"
    else:
        monkeypatch.setattr(module("sources.arrays").zipfile, "ZipFile", fail)
        words = r"Permission denied.*chmod"
    with pytest.raises(module("config").SettingError, match=words) as refusal:
        load(path)
    assert ".npz file" not in str(refusal.value)
