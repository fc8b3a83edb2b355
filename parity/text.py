"""Any text as tokens: rows of x repeat as the words do, so a router sees the skew of language.

This is no trained tokenizer and no trained embedding: text is cut into words and punctuation marks, and each distinct
one gets a fixed random row. What is real is how often, and where, the same row comes again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from .draws import normals
from .problem import InvalidInput, Problem

_TOKEN = re.compile(r"\w+|[^\w\s]")


def text_tokens(
    problem: Problem, paths: Sequence[str | Path], *, seed: int = 0, offset: int = 0
) -> Float[np.ndarray, "T D"]:
    """x [T, D] in storage dtype: the T words of the files' joined text that start at word `offset`.

    A text of fewer words is repeated, a longer one is cut. A word's row is standard normal and depends on the word and
    the seed only. Raises InvalidInput for a file that is missing, empty, not text, or without a word.
    """
    words = read_words(paths)
    picked = [words[(offset + t) % len(words)] for t in range(problem.T)]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(picked))}
    table = [normals(seed, f"word {word}", (problem.D,), 1.0, problem.dtype) for word in vocabulary]
    if not table:
        return normals(seed, "word", (0, problem.D), 1.0, problem.dtype)
    return np.stack(table)[[vocabulary[word] for word in picked]]


def text_note(paths: Sequence[str | Path], T: int) -> str:
    """One line for a report: how many words the text has, how many distinct, and whether it was cut or repeated."""
    words = read_words(paths)
    used = words[:T] if T <= len(words) else words
    extent = f"cut to {T}" if T < len(words) else f"repeated to {T}" if T > len(words) else "all used"
    return f"{len(words)} words, {extent}; {len(set(used))} distinct"


def read_words(paths: Sequence[str | Path]) -> list[str]:
    """The words and punctuation marks of the files, in order; case is kept."""
    if not paths:
        raise InvalidInput("no text file was given; accepted: one or more")
    words: list[str] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise InvalidInput(f"{path} is not a file; accepted: a text file")
        try:
            raw = path.read_bytes()
            text = raw.decode("utf-8-sig")
        except OSError as error:
            raise InvalidInput(f"{path} cannot be read ({error.strerror}); accepted: a readable text file") from error
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path} is not text: byte {error.start} is no UTF-8; accepted: UTF-8 text") from error
        if b"\0" in raw:
            raise InvalidInput(f"{path} is not text: byte {raw.index(0)} is NUL; accepted: UTF-8 text")
        found = _TOKEN.findall(text)
        if not found:
            raise InvalidInput(f"{path} holds no word; accepted: a text file with at least one")
        words += found
    return words
