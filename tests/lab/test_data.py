"""Data files: reading them, and never trusting them."""

import gzip
import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy
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


def python_layout(images, labels):
    """What the original file holds: a dict with bytes for keys, pickled in protocol 2."""
    return {
        b"filenames": [b"a.png"] * len(labels),
        b"batch_label": b"training batch 1 of 1",
        b"fine_labels": labels.tolist(),
        b"coarse_labels": [0] * len(labels),
        b"data": images.flatten(1).numpy(),
    }


def test_the_binary_layout_is_read(tmp_path):
    images, labels = cifar_arrays()
    records = torch.cat([torch.full((7, 1), 9), labels[:, None], images.flatten(1)], dim=1).to(torch.uint8)
    (tmp_path / "train.bin").write_bytes(bytes(records.flatten()))
    read = cifar.read_binary(tmp_path / "train.bin")
    assert torch.equal(read[0], images) and torch.equal(read[1], labels) and read[1].dtype == torch.int64


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_python_layout_is_read_without_numpys_unpickling(tmp_path, protocol):
    images, labels = cifar_arrays()
    (tmp_path / "train").write_bytes(pickle.dumps(python_layout(images, labels), protocol))
    read = cifar.read_python(tmp_path / "train")
    assert torch.equal(read[0], images) and torch.equal(read[1], labels)


def test_the_strings_and_module_names_of_python_2_are_read(tmp_path):
    """As the original file was written: 8-bit strings, and numpy.core."""
    pixels = bytes(range(256)) * 12
    text = lambda b: b"T" + struct.pack("<i", len(b)) + b
    labels = b"](K\x13e"
    dtype = (
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\0K\1\x87R(K\3"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    )
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + text(b"b") + b"\x87R"
    state = b"(K\1K\1M\0\x0c\x86" + dtype + b"\x89" + text(pixels) + b"tb"
    content = b"\x80\2}(" + text(b"fine_labels") + labels + text(b"data") + array + state + b"u."
    assert bytes(pickle.loads(content, encoding="bytes")[b"data"]) == pixels  # it is what we say it is
    (tmp_path / "test").write_bytes(content)
    images, labels = cifar.read_python(tmp_path / "test")
    assert bytes(images.flatten()) == pixels and labels.tolist() == [19]


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "evil",
    [
        lambda trace: Evil(os.system, f"touch {trace}"),
        lambda trace: Evil(eval, f"open({str(trace)!r}, 'w').close()"),
        lambda trace: Evil(Path.touch, trace),
        lambda trace: Evil(numpy.ndarray.tofile, numpy.zeros(1), str(trace)),
        lambda trace: numpy.array([Evil(os.mkdir, str(trace))], dtype=object),
    ],
)
def test_a_pickle_that_would_run_code_is_refused(tmp_path, evil):
    trace = tmp_path / "trace"
    content = python_layout(*cifar_arrays()) | {b"extra": evil(trace)}
    (tmp_path / "train").write_bytes(pickle.dumps(content, 2))
    with pytest.raises(UserError, match=r"train asks to load .*not trusted"):
        cifar.read_python(tmp_path / "train")
    assert not trace.exists()
    pickle.loads((tmp_path / "train").read_bytes())  # a trusting reader does run it
    assert trace.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({b"data": numpy.zeros((7, 3072), numpy.float32)}, "does not hold"),
        ({b"data": numpy.zeros((6, 3072), numpy.uint8)}, "does not hold"),
        ({b"data": numpy.zeros((7, 3071), numpy.uint8)}, "does not hold"),
        ({b"data": [1, 2]}, "does not hold"),
        ({b"fine_labels": ["a"] * 7}, "does not hold"),
        ({b"fine_labels": [-1] * 7}, "does not hold"),
        ({b"fine_labels": [100] * 7}, "label 100"),
    ],
)
def test_a_pickle_of_something_else_is_refused(tmp_path, change, words):
    (tmp_path / "train").write_bytes(pickle.dumps(python_layout(*cifar_arrays()) | change, 2))
    with pytest.raises(UserError, match=f"train .*{words}"):
        cifar.read_python(tmp_path / "train")


def test_truncated_cifar_files_are_named(tmp_path):
    whole = pickle.dumps(python_layout(*cifar_arrays()), 2)
    for name, content, read in (
        ("train", whole[:-100], cifar.read_python),
        ("train", b"", cifar.read_python),
        ("train.bin", bytes(3074 * 2 - 1), cifar.read_binary),
        ("train.bin", b"", cifar.read_binary),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name} .*truncated or damaged; the remedy"):
            read(tmp_path / name, "; the remedy")


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
    (tmp_path / "cifar-100-python" / "train").write_bytes(pickle.dumps(python_layout(*cifar_arrays()), 2))
    with pytest.raises(UserError, match=r"train has 7 images, not 50000"):
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
    for source in (fetch.MNIST, fetch.CIFAR_BINARY, fetch.CIFAR_PYTHON):
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
