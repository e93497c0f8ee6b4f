"""Data files: reading them, and never trusting them."""

import gzip
import hashlib
import struct
from pathlib import Path

import pytest
import torch

from gxd.lab import data
from gxd.lab.data import cifar, fetch, idx
from gxd.lab.errors import UserError


def idx_bytes(array):
    return b"\0\0\x08" + bytes([array.dim()]) + struct.pack(f">{array.dim()}I", *array.shape) + bytes(array.flatten())


def test_an_idx_file_is_read_plain_and_gzipped(tmp_path):
    array = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    (tmp_path / "a").write_bytes(idx_bytes(array))
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx_bytes(array)))
    assert torch.equal(idx.read(tmp_path / "a"), array) and torch.equal(idx.read(tmp_path / "a.gz"), array)


@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("a", lambda b: b[:-1], "truncated"),
        ("a", lambda b: b + b"x", "damaged"),
        ("a", lambda b: b[:7], "ends within its header"),
        ("a", lambda b: b"", "not an IDX file"),
        ("a", lambda b: b"<html>" + b, "not an IDX file"),
        ("a.gz", lambda b: gzip.compress(b)[:-12], "not a complete gzip file"),
        ("a.gz", lambda b: b, "not a complete gzip file"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path, name, spoil, words):
    (tmp_path / name).write_bytes(spoil(idx_bytes(torch.zeros(5, 2, dtype=torch.uint8))))
    with pytest.raises(UserError, match=f"{name} .*{words}.*; the remedy"):
        idx.read(tmp_path / name, "; the remedy")


def cifar_arrays(n=7):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return images, torch.randint(100, (n,), generator=generator)


def cifar_bytes(images, labels):
    """What train.bin holds: coarse label, fine label, and three planes, for each image."""
    records = torch.cat([torch.full((len(labels), 1), 9), labels[:, None], images.flatten(1)], dim=1).to(torch.uint8)
    return bytes(records.flatten())


def test_cifar_100_s_records_are_read(tmp_path):
    images, labels = cifar_arrays()
    (tmp_path / "train.bin").write_bytes(cifar_bytes(images, labels))
    read = cifar.read(tmp_path / "train.bin")
    assert torch.equal(read[0], images) and torch.equal(read[1], labels) and read[1].dtype == torch.int64


@pytest.mark.parametrize("content", [b"", bytes(3074 * 2 - 1)])
def test_a_truncated_cifar_file_is_named(tmp_path, content):
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"train.bin .*truncated or damaged; the remedy"):
        cifar.read(tmp_path / "train.bin", "; the remedy")


def test_a_cifar_label_that_no_class_has_is_damage(tmp_path):
    (tmp_path / "train.bin").write_bytes(cifar_bytes(cifar_arrays()[0], torch.full((7,), 100)))
    with pytest.raises(UserError, match=r"train.bin has a label 100, .*0 to 99.*; the remedy"):
        cifar.read(tmp_path / "train.bin", "; the remedy")


def test_missing_and_incomplete_data_sets_name_the_file_and_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("GXD_DATA", str(tmp_path))
    with pytest.raises(
        UserError, match=f"MNIST is not in {tmp_path} .*train-images-idx3-ubyte.*`gxd data fetch mnist`"
    ):
        data.mnist()
    with pytest.raises(UserError, match=r"CIFAR-100 is not in .*train.bin.*`gxd data fetch cifar100`"):
        data.cifar100()
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(idx_bytes(torch.zeros(3, 28, 28, dtype=torch.uint8)))
    with pytest.raises(
        UserError, match=rf"{path} has shape \(3, 28, 28\), not \(60000, 28, 28\); `gxd data fetch mnist`"
    ):
        data.mnist()
    (tmp_path / "cifar-100-python").mkdir()
    with pytest.raises(UserError, match=r"cifar-100-python, a pickle, which is not read.*`gxd data fetch cifar100`"):
        data.cifar100()
    (tmp_path / "cifar-100-binary").mkdir()
    (tmp_path / "cifar-100-binary" / "train.bin").write_bytes(cifar_bytes(*cifar_arrays()))
    with pytest.raises(UserError, match=r"train.bin has 7 images, not 50000"):
        data.cifar100()


def test_a_label_that_no_class_has_is_damage(tmp_path, monkeypatch):
    arrays = {
        "train-images-idx3-ubyte": torch.zeros(1, dtype=torch.uint8).expand(60000, 28, 28),
        "train-labels-idx1-ubyte": torch.full((60000,), 200, dtype=torch.uint8),
    }
    monkeypatch.setattr(idx, "read", lambda path, remedy: arrays[path.name])
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for name in arrays:
        (tmp_path / "MNIST" / "raw" / name).touch()
    with pytest.raises(
        UserError, match=r"train-labels.* a label 200, but the classes are 0 to 9.*`gxd data fetch mnist`"
    ):
        data.mnist(tmp_path)


def test_the_digits_that_come_along_are_those_that_all_committed_results_were_trained_on():
    """They came from scikit-learn's load_digits, divided as they are now."""
    found = data.digits()
    tensors = (found.train_images, found.train_labels, found.test_images, found.test_labels)
    assert [(tuple(t.shape), t.dtype) for t in tensors] == [
        ((1440, 64), torch.uint8),
        ((1440,), torch.int64),
        ((357, 64), torch.uint8),
        ((357,), torch.int64),
    ]
    content = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors))
    assert content.hexdigest() == "b19970fccfa140f25391429ca2b9259d1956e63420542db9d91aa1a6d2240063"


def test_the_data_directory_is_the_argument_then_the_environment_then_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GXD_DATA", "/somewhere")
    assert data.directory(tmp_path) == tmp_path and data.directory() == Path("/somewhere")
    monkeypatch.delenv("GXD_DATA")
    assert data.directory() == Path.home() / ".cache" / "gxd" / "data"


def test_the_real_files_are_what_the_checksums_say():
    root, found = data.directory(), {}
    for source in fetch.SOURCES.values():
        states = fetch.verify(source, root)
        if set(states.values()) != {"missing"}:
            found |= states
    if not found:
        pytest.skip(f"no data in {root}")
    assert set(found.values()) == {"ok"}
    if fetch.verify(fetch.MNIST, root).keys() <= found.keys():
        mnist = data.mnist()
        assert mnist.train_images.shape == (60000, 784) and mnist.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
        assert mnist.test_images.shape == (10000, 784) and mnist.test_labels[:5].tolist() == [7, 2, 1, 0, 4]
    if any("cifar" in name for name in found):
        cifar100 = data.cifar100()
        assert cifar100.train_labels.bincount().tolist() == [500] * 100 and len(cifar100.test_images) == 10000
        assert cifar100.train_labels[:3].tolist() == [19, 29, 0]  # cattle, dinosaur, apple
