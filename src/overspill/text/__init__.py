"""Text: tokenizer, chat templates, streams of generated text. Knows nothing of devices or tensors."""

from overspill.text.chat import ChatTemplate
from overspill.text.special import Segment, SpecialTexts
from overspill.text.stream import TextStream
from overspill.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Segment", "SpecialTexts", "TextStream", "Tokenizer"]
