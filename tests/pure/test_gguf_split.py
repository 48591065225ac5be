"""Split files: any part opens all of them; a set that is not whole or not one set is refused with what is wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from overspill.errors import UserError
from overspill.gguf import open_gguf
from tests.helpers import gguf_files as files
from tests.helpers.gguf_files import Document, base, part_name


def write_parts(folder: Path, parts: list[bytes], prefix: str = "m") -> list[Path]:
    paths = [folder / part_name(prefix, i, len(parts)) for i in range(len(parts))]
    for path, data in zip(paths, parts, strict=True):
        path.write_bytes(data)
    return paths


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def holds_everything(path: Path, document: Document | None = None) -> bool:
    file = open_gguf(path)
    tensors = (document or base()).tensors
    assert list(file.tensors) == [tensor.name for tensor in tensors]
    assert file.keys.arch == "qwen3moe"
    return all(file.bytes_of(tensor.name).tobytes() == tensor.data for tensor in tensors)


@pytest.mark.parametrize("bounds", [[9, 18], [0, 18], [0, 0], [26, 26], [13]])
def test_any_part_opens_the_whole(bounds: list[int], tmp_path: Path) -> None:
    paths = write_parts(tmp_path, files.split(base(), bounds))
    for path in paths:
        assert holds_everything(path)
        assert open_gguf(path).paths == tuple(paths)
    cuts = [0, *bounds, 27]
    parts = [info.part for info in open_gguf(paths[-1]).tensors.values()]
    assert parts == [i for i in range(len(paths)) for _ in range(cuts[i], cuts[i + 1])]


def test_one_of_one_and_odd_names(tmp_path: Path) -> None:
    assert holds_everything(write_parts(tmp_path, files.split(base(), []))[0])
    folder = tmp_path / "m\u00f6dels \u6a21 [1]*"
    folder.mkdir()
    assert holds_everything(write_parts(folder, files.split(base(), [9, 18]), "a -00001-of-00002 b")[2])


def test_parts_with_another_alignment_than_the_first(tmp_path: Path) -> None:
    aligned = replace(base().with_key("general.alignment", files.u32(64)), alignment=64)
    first = files.split(aligned, [9, 18])[0]
    paths = write_parts(tmp_path, [first, *files.split(base(), [9, 18])[1:]])
    assert holds_everything(paths[1])


def test_all_missing_parts_are_named_at_once(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, files.split(base(), [5, 10, 15]))
    paths[1].unlink()
    paths[3].unlink()
    for path in (paths[0], paths[2]):
        message = refused(path)
        assert f"missing beside it: {paths[1].name}, {paths[3].name}" in message
    assert "part 3 of 4" in refused(paths[2])


def test_a_missing_first_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, files.split(base(), [9, 18]))
    paths[0].unlink()
    assert f"missing beside it: {paths[0].name}" in refused(paths[1])


def test_a_long_list_of_missing_parts_is_cut(tmp_path: Path) -> None:
    path = tmp_path / part_name("m", 0, 65535)
    path.write_bytes(files.with_split_keys(base(), 0, 65535, 27).to_bytes())
    message = refused(path)
    assert message.count(".gguf") < 60
    assert "and 65484 more" in message


def test_a_part_of_another_set_is_refused(tmp_path: Path) -> None:
    good = files.split(base(), [9, 18])
    paths = write_parts(tmp_path, [good[0], files.split(base(), [8, 18])[1], good[2]])
    assert "duplicate tensor blk.0.attn_q_norm.weight" in refused(paths[0])
    paths = write_parts(tmp_path, [good[0], files.split(base(), [10, 18])[1], good[2]])
    assert "tensor count 27 in key split.tensors.count, but the 3 parts hold 26" in refused(paths[0])
    write_parts(tmp_path, [good[0], files.split(base(), [9, 18, 20])[1], good[2]])
    assert f"{paths[1]}: is part 2 of 4 by its keys, but part 2 of 3 by its name" in refused(paths[0])
    write_parts(tmp_path, [good[0], good[2], good[2]])
    assert f"{paths[1]}: is part 3 of 3 by its keys, but part 2 of 3 by its name" in refused(paths[0])
    write_parts(tmp_path, [good[0], base().to_bytes(), good[2]])
    assert "is part 1 of 1 by its keys" in refused(paths[0])


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    good = files.split(base(), [9, 18])
    paths = write_parts(tmp_path, [good[0], good[1], good[2][:-100]])
    message = refused(paths[0])
    assert message.startswith(f"{paths[2]}: truncated: tensor blk.1.ffn_up_exps.weight needs 4352 bytes")
    write_parts(tmp_path, [good[0], b"<html>", good[2]])
    assert refused(paths[2]).startswith(f"{paths[1]}: is a web page")


def test_names_and_keys_must_agree(tmp_path: Path) -> None:
    good = files.split(base(), [9, 18])
    renamed = tmp_path / part_name("m", 1, 3)
    renamed.write_bytes(good[0])
    assert "is part 1 of 3 of a split file by its keys, but part 2 of 3 by its name" in refused(renamed)
    other_count = tmp_path / part_name("m", 0, 2)
    other_count.write_bytes(good[0])
    assert "but part 1 of 2 by its name" in refused(other_count)
    whole = tmp_path / part_name("whole", 0, 3)
    whole.write_bytes(base().to_bytes())
    assert "a whole file by its keys" in refused(whole)
    nonsense = tmp_path / part_name("n", 7, 3)
    nonsense.write_bytes(files.with_split_keys(base(), 7, 3, 27).to_bytes())
    assert "split.no is 7, split.count is 3" in refused(nonsense)


@pytest.mark.parametrize("number", [0, 1])
def test_a_part_without_its_name_says_what_it_is(number: int, tmp_path: Path) -> None:
    path = tmp_path / "5f2c9e"
    path.write_bytes(files.split(base(), [9, 18])[number])
    message = refused(path)
    assert f"is part {number + 1} of 3 of a split file" in message
    assert "original names" in message


def test_links_to_hash_named_files_elsewhere(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for i, data in enumerate(files.split(base(), [9, 18])):
        (blobs / f"hash{i}").write_bytes(data)
        (snapshot / part_name("m", i, 3)).symlink_to(blobs / f"hash{i}")
    for i in range(3):
        assert holds_everything(snapshot / part_name("m", i, 3))


def test_a_link_to_one_part_finds_the_others(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    paths = write_parts(store, files.split(base(), [9, 18]))
    for name in ("any-name.gguf", paths[0].name):
        (tmp_path / name).symlink_to(paths[0])
        assert holds_everything(tmp_path / name)
    paths[2].unlink()
    assert paths[2].name in refused(tmp_path / "any-name.gguf")


@pytest.mark.parametrize("bounds", [[9, 18], [0, 18]])
def test_joined_parts_are_explained(bounds: list[int], tmp_path: Path) -> None:
    path = tmp_path / "joined.gguf"
    path.write_bytes(b"".join(files.split(base(), bounds)))
    assert "parts of a split file joined end to end" in refused(path)
    first = tmp_path / part_name("m", 0, 3)
    os.rename(path, first)
    assert "joined end to end" in refused(first)


@pytest.mark.parametrize("pattern", ["m.gguf.part{}of2", "m-part-{}-of-2.gguf", "m.gguf-split-{}of2"])
def test_pieces_cut_by_bytes_are_explained(pattern: str, tmp_path: Path) -> None:
    data = base().to_bytes()
    for i, piece in enumerate((data[:50000], data[50000:])):
        path = tmp_path / pattern.format(i + 1)
        path.write_bytes(piece)
        message = refused(path)
        assert "one piece of a file" in message
        assert "join all pieces in order" in message
    path.write_bytes(data)
    assert holds_everything(path)


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_split_keys_of_a_wrong_type(key: str, tmp_path: Path) -> None:
    whole = files.with_split_keys(base(), 0, 2, 27).with_key(key, files.string("2"))
    rest = files.with_split_keys(Document(), 1, 2, 27)
    paths = write_parts(tmp_path, [whole.to_bytes(), rest.to_bytes()])
    assert f"key {key} is the string '2', expected an unsigned 32-bit integer" in refused(paths[0])
