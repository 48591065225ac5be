"""Tokenizers of documents that tests put together."""

from __future__ import annotations

import pytest

from overspill.text import Tokenizer
from tests.helpers.text_vocab import keys_of


@pytest.fixture
def build(tmp_path):
    return lambda document: Tokenizer.from_keys(keys_of(document, tmp_path))
