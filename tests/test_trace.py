"""Routings, tokens and text from files: what is read back, and how a bad file is named."""

import re

import numpy as np
import pytest
from dropless.parity.inputs import make_case
from dropless.parity.problem import InvalidInput, Problem, Routing
from dropless.parity.text import read_words, text_note, text_tokens
from dropless.parity.trace import read_trace, read_x, write_trace

IDS = np.array([[0, 3], [2, -1], [-1, -1], [1, 0]], np.int32)
WEIGHTS = np.array([[0.25, 0.75], [1.5, 0.0], [0.0, 0.0], [0.5, -0.5]], np.float32)
SMALL = Problem(T=6, K=2, E=8, D=5, F=4)


def test_a_trace_comes_back_to_the_bit(tmp_path):
    path = write_trace(tmp_path / "t.npz", Routing(IDS, WEIGHTS))
    back = read_trace(path, E=4)
    assert np.array_equal(back.topk_idx, IDS) and np.array_equal(back.topk_weights, WEIGHTS)
    assert back.topk_idx.dtype == np.int32 and back.topk_weights.dtype == np.float32
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]


def test_a_case_replays_a_trace(tmp_path):
    case = make_case(SMALL)
    back = read_trace(write_trace(tmp_path / "t.npz", case.routing), E=8)
    again = make_case(SMALL, routing=back)
    assert np.array_equal(again.routing.topk_idx, case.routing.topk_idx)
    assert np.array_equal(again.routing.topk_weights, case.routing.topk_weights)


def test_weights_without_an_expert_are_ignored(tmp_path):
    np.savez(tmp_path / "t.npz", topk_idx=IDS, topk_weights=np.where(IDS < 0, np.nan, WEIGHTS))
    assert np.array_equal(read_trace(tmp_path / "t.npz").topk_weights, WEIGHTS)


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"topk_idx": IDS}, "holds topk_idx; accepted: topk_idx and topk_weights"),
        ({"topk_idx": IDS + 1, "topk_weights": WEIGHTS}, "token 0, slot 1 names expert 4; accepted: -1 to 3"),
        ({"topk_idx": IDS - 1, "topk_weights": WEIGHTS}, "token 1, slot 1 names expert -2; accepted: -1 to 3"),
        ({"topk_idx": IDS * 0, "topk_weights": WEIGHTS}, "token 0 names expert 0 twice; accepted: distinct"),
        ({"topk_idx": IDS.astype(float), "topk_weights": WEIGHTS}, "topk_idx is float64; accepted: whole numbers"),
        ({"topk_idx": IDS[0], "topk_weights": WEIGHTS}, r"topk_idx has shape \(2,\); accepted: \[T, K\]"),
        ({"topk_idx": IDS, "topk_weights": WEIGHTS[:3]}, r"topk_weights has shape \(3, 2\)"),
        ({"topk_idx": IDS, "topk_weights": WEIGHTS > 0}, "topk_weights is bool; accepted: real numbers"),
        (
            {"topk_idx": IDS, "topk_weights": np.where(WEIGHTS, np.inf, 0)},
            "weight of token 0, slot 0 is inf; accepted: finite",
        ),
        ({"topk_idx": IDS, "topk_weights": WEIGHTS.astype(object)}, "Object arrays cannot be loaded"),
    ],
)
def test_a_bad_trace_is_named_by_its_value(tmp_path, arrays, message):
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(InvalidInput, match=message):
        read_trace(tmp_path / "t.npz", E=4)


@pytest.mark.parametrize("read", [read_trace, read_x])
@pytest.mark.parametrize("content", [None, b"", b"plain text", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_array_is_named(tmp_path, read, content):
    path = tmp_path / "f.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=re.escape(str(path))):
        read(path)


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(InvalidInput, match="a folder that exists"):
        write_trace(tmp_path / "no" / "t.npz", Routing(IDS, WEIGHTS))

    def fails(file, **arrays):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fails)
    with pytest.raises(OSError, match="disk full"):
        write_trace(tmp_path / "t.npz", Routing(IDS, WEIGHTS))
    assert list(tmp_path.iterdir()) == []


def test_x_keeps_nan_and_rejects_other_shapes(tmp_path):
    x = np.array([[1.0, np.nan], [np.inf, 2.0]], np.float32)
    np.save(tmp_path / "x.npy", x)
    assert np.array_equal(read_x(tmp_path / "x.npy"), x, equal_nan=True)
    np.save(tmp_path / "x.npy", x[0])
    with pytest.raises(InvalidInput, match=r"holds float32 of shape \(2,\)"):
        read_x(tmp_path / "x.npy")
    np.savez(tmp_path / "x.npz", x=x)
    with pytest.raises(InvalidInput, match="several arrays"):
        read_x(tmp_path / "x.npz")


def test_rows_repeat_as_the_words_do(tmp_path):
    (tmp_path / "a.txt").write_text("the cat, the dog")
    (tmp_path / "b.txt").write_text("The dog the")
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert read_words(paths) == ["the", "cat", ",", "the", "dog", "The", "dog", "the"]
    x = text_tokens(SMALL.replace(T=8), paths)
    same = np.array([[np.array_equal(a, b) for b in x] for a in x])
    words = np.array(read_words(paths))
    assert np.array_equal(same, words[:, None] == words[None, :])
    assert np.array_equal(text_tokens(SMALL.replace(T=3), paths, offset=5), x[5:8])
    assert not np.array_equal(text_tokens(SMALL.replace(T=8), paths, seed=1), x)


def test_a_text_is_cut_or_repeated_and_says_so(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one two three two")
    assert np.array_equal(text_tokens(SMALL, [path])[:2], text_tokens(SMALL, [path])[4:])
    assert text_note([path], 6) == "4 words, repeated to 6; 3 distinct"
    assert text_note([path], 2) == "4 words, cut to 2; 2 distinct"
    assert text_tokens(SMALL.replace(T=0), [path]).shape == (0, 5)


def test_text_routes_with_the_skew_of_its_words(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" ".join(["the"] * 60 + [f"word{i}" for i in range(60)]))
    problem = Problem(T=120, K=1, E=8, D=16, F=4)
    case = make_case(problem, pattern=None, x=text_tokens(problem, [path]))
    assert np.bincount(np.asarray(case.routing.topk_idx).ravel(), minlength=8).max() >= 60


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "is not a file; accepted: a text file"),
        (b"", "holds no word"),
        (b"  \n\t", "holds no word"),
        (b"abc \xff\xfe", "byte 4 is no UTF-8"),
        (b"abc\0def", "byte 3 is NUL"),
    ],
)
def test_a_bad_text_is_named(tmp_path, content, message):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput, match=re.escape(str(path)) + ".*" + message):
        text_tokens(SMALL, [path])


def test_no_text_is_an_error():
    with pytest.raises(InvalidInput, match="no text file was given"):
        read_words([])
