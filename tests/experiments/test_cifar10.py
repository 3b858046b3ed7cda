"""CIFAR-10 in both published forms: tiny files are read exactly, and each kind of damage is named."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from experiments.tasks import load_task
from experiments.tasks.cifar10 import normalised

NAMES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
IMAGES = 4  # in each file
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


def contents(file: int) -> tuple[Pixels, list[int]]:
    random = np.random.default_rng(file)
    return random.integers(256, size=(IMAGES, 3072), dtype=np.uint8), random.integers(10, size=IMAGES).tolist()


class Python2(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, as in the published files."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + struct.pack("<i", len(value)) + value)  # type: ignore[attr-defined]  # not in typeshed

    dispatch[bytes] = save_bytes


def write_python(folder: Path) -> Path:
    place = folder / "cifar-10-batches-py"
    place.mkdir()
    for number, name in enumerate(NAMES):
        pixels, labels = contents(number)
        with (place / name).open("wb") as file:
            Python2(file, protocol=2).dump({b"batch_label": b"a batch", b"labels": labels, b"data": pixels})
    return place


def write_binary(folder: Path) -> Path:
    place = folder / "cifar-10-batches-bin"
    place.mkdir()
    for number, name in enumerate(NAMES):
        pixels, labels = contents(number)
        records = [bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True)]
        (place / f"{name}.bin").write_bytes(b"".join(records))
    return place


@pytest.mark.parametrize("write", [write_python, write_binary])
@pytest.mark.parametrize("above", [False, True])
def test_both_forms_hold_the_same_images_and_labels(write: Callable[[Path], Path], above: bool, tmp_path: Path) -> None:
    place = write(tmp_path)
    task = load_task(f"cifar10:folder={tmp_path if above else place},network=cnn,channels=2,batch_size=4")
    data: Any = task.task.data
    pixels, labels = zip(*(contents(number) for number in range(5)), strict=True)
    assert data.images.numpy().reshape(-1, 3072).tolist() == np.concatenate(pixels).tolist()
    assert data.labels.tolist() == np.concatenate(labels).tolist()
    held_out: Any = task.task.held_out
    test = torch.from_numpy(contents(5)[0]).view(-1, 3, 32, 32)
    assert torch.equal(torch.stack([image for image, _ in held_out]), normalised(test))
    assert [int(label) for _, label in held_out] == contents(5)[1]
    task.check(2)
    assert set(task.evaluate()) == {"loss", "accuracy"}


def test_augmentation_shifts_and_mirrors_and_follows_seed_step_and_rank(tmp_path: Path) -> None:
    name = f"cifar10:folder={write_binary(tmp_path)},network=cnn,channels=2,batch_size=4"
    one, same, other = load_task(name, 1), load_task(name, 1), load_task(name, 2)
    assert torch.equal(one.batch(3, 1, 2)[0], same.batch(3, 1, 2)[0])
    assert not torch.equal(one.batch(3, 1, 2)[0], other.batch(3, 1, 2)[0])
    data: Any = one.task.data
    possible = possible_views(data.images[0])
    torch.manual_seed(0)
    seen = {possible.index(as_bytes(data[0][0])) for _ in range(30)}  # raises for a view that is none of them
    assert len(seen) > 10


def possible_views(image: torch.Tensor) -> list[bytes]:
    padded = torch.zeros(3, 40, 40, dtype=torch.uint8)
    padded[:, 4:36, 4:36] = image
    views = [padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    return [as_bytes(normalised(one)) for view in views for one in (view, view.flip(-1))]


def as_bytes(image: torch.Tensor) -> bytes:
    return image.contiguous().numpy().tobytes()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3073])


def mislabel(path: Path) -> None:
    path.write_bytes(bytes([10]) + path.read_bytes()[1:])


def pickled(value: object) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(pickle.dumps(value, protocol=2))

    return write


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    ("write", "damage", "message"),
    [
        (write_binary, Path.unlink, "has no data_batch_3.bin; unpack the archive again .*'digits' needs no files"),
        (write_python, Path.unlink, "has no data_batch_3; unpack"),
        (write_binary, truncate, "data_batch_3.bin is damaged: expected a multiple of 3,073 bytes .got 12,192."),
        (write_binary, shorten, "data_batch_3.bin has 3 images, and data_batch_1.bin has 4: one of them is incomplete"),
        (write_binary, mislabel, "data_batch_3.bin is damaged: expected labels from 0 to 9 .got 10."),
        (write_python, truncate, "data_batch_3 is damaged: "),
        (write_python, lambda path: path.write_bytes(b"<html>not found</html>"), "data_batch_3 is damaged: "),
        (write_python, pickled([1, 2]), "expected a dictionary with b'data' and b'labels'"),
        (write_python, pickled({b"data": [[1]], b"labels": [1]}), "expected images of 3,072 bytes each"),
        (write_python, pickled({b"data": contents(0)[0], b"labels": [1]}), "a label for each of 4 images .got 1."),
        (write_python, pickled(Harmful()), r"it names \w+.mkdir, which CIFAR-10's files do not"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(
    write: Callable[[Path], Path],
    damage: Callable[[Path], object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    place = write(tmp_path)
    (victim,) = place.glob("data_batch_3*")
    damage(victim)
    with pytest.raises(ValueError, match=message):
        load_task(f"cifar10:folder={place},network=cnn,channels=2")
    assert not (tmp_path / "harmed").exists()


def test_a_folder_that_is_another_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    for folder, message in (
        (tmp_path / "nowhere", "nowhere does not exist; the task 'digits' needs no files"),
        (tmp_path / "cifar-10-python.tar.gz", "is a file; unpack it, and name the folder"),
        (tmp_path, "has neither data_batch_1 to data_batch_5 and test_batch"),
    ):
        with pytest.raises(ValueError, match=message):
            load_task(f"cifar10:folder={folder}")
