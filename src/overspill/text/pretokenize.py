"""How a text is cut into words before byte-level BPE: one list of regular expressions per `tokenizer.ggml.pre`.

The expressions are those that the models' authors published with their tokenizers, in Oniguruma's syntax (the engine
of the `tokenizers` library). They are applied one after the other; each cuts the pieces that the one before left, and
what an expression does not match stays a piece of its own.

llama.cpp approximates some of them (it knows no letter case beyond ASCII, no marks inside words for the expressions
with letter case, one case-blind run of letters for kimi-k2, and no white space beyond ASCII inside character ranges),
which splits Hindi, Thai or camelCase otherwise than in training. Here the model's own expression always wins; the
tests list the texts where the ids differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from overspill.errors import UserError

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"


def _words(number: str) -> str:
    """The Llama 3 and Qwen 2 family: they differ in how many digits make a word."""
    return rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|{number}|{_SYMBOLS}[\r\n]*|{_SPACES}"


def _cased(*, number: str, contraction: str, symbols: str, excluded: str = "") -> str:
    """The o200k family: a word ends where lower case is followed by upper case; marks belong to words."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{excluded}]"
    words = f"{_LEAD}{upper}*{lower}+{contraction}|{_LEAD}{upper}+{lower}*{contraction}"
    return f"{words}|{number}|{symbols}|{_SPACES}"


def _ranges(text: str) -> str:
    """`"41-5A B5"` as the inside of a character class."""
    return "".join("-".join(rf"\x{{{end}}}" for end in part.split("-")) for part in text.split())


_QWEN2 = _words(r"\p{N}")
_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN35 = rf"{_CONTRACTION}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_O200K = _cased(number=r"\p{N}{1,3}", contraction=_CONTRACTION + "?", symbols=_SYMBOLS + r"[\r\n/]*")
_TEKKEN = _cased(number=r"\p{N}", contraction="", symbols=_SYMBOLS + r"[\r\n/]*")
_KIMI = r"\p{Han}+|" + _cased(
    number=r"\p{N}{1,3}",
    contraction=_CONTRACTION + "?",
    symbols=_SYMBOLS + r"[\r\n]*",
    excluded=r"&&[^\p{Han}]",
)
_SEED = rf"{_CONTRACTION}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_EXAONE_MOE = (
    rf"{_CONTRACTION}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SYMBOLS}[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CHINESE_AND_KANA = f"[{_ranges('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_ASIAN = f"[{_ranges('4E00-9FA5 800-4E00 AC00-D7FF')}]+"
_ASIAN_SCRIPTS = _ranges(
    "4E00-9FFF 3400-4DBF F900-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF E40-E7F E80-EFF 1780-17FF 1000-109F "
    "AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_PUNCTUATION = _ranges("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
# DeepSeek LLM lists the letters that have case, as of an older Unicode.
_CASED_LETTERS = _ranges(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 "
    "3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
    "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 "
    "1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 "
    "212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D "
    "A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F "
    "104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)


def _thousands(digit: str) -> str:
    """A run of digits in groups of three from the right: one look ahead, so that long numbers take linear time."""
    return rf"\A{digit}{{1,2}}(?=(?:{digit}{{3}})+\z)|{digit}{{3}}|{digit}+"


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """`patterns` in order; `ignores_merges`: a word that is a token is emitted whole; `adds_bos` by default."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


_FAMILIES: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer(patterns=(_LLAMA3,), ignores_merges=True, adds_bos=True),
    ),
    ("glm4 glm5", PreTokenizer(patterns=(_LLAMA3,), ignores_merges=True)),
    ("chatglm-bpe dbrx smaug-bpe", PreTokenizer(patterns=(_LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen megrez kormo stablelm2 hunyuan solar-open grok-2",
        PreTokenizer(patterns=(_QWEN2,)),
    ),
    ("qwen35", PreTokenizer(patterns=(_QWEN35,))),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer(patterns=(_O200K,))),
    ("tekken", PreTokenizer(patterns=(_TEKKEN,), ignores_merges=True, adds_bos=True)),
    ("kimi-k2", PreTokenizer(patterns=(_KIMI,))),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer(patterns=(r"\p{N}{1,3}", _CHINESE_AND_KANA, _DEEPSEEK3)),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            patterns=(
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                rf"\s?[{_PUNCTUATION}]+",
                r"\s+$",
                _ASIAN,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"))),
    (
        "gpt-2 phi-2 olmo mpt jais gigachat a.x-4.0 mellum trillion granite-docling exaone4",
        PreTokenizer(patterns=(_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r exaone codeshell minerva-7b mellum2",
        PreTokenizer(patterns=(r"\p{N}", _GPT2)),
    ),
    ("falcon", PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer(patterns=(_BAILING,))),
    ("seed-coder", PreTokenizer(patterns=(_SEED,))),
    ("exaone-moe", PreTokenizer(patterns=(_EXAONE_MOE,))),
    ("superbpe", PreTokenizer(patterns=(r"\p{N}+", _thousands(r"\d")))),
    ("afmoe", PreTokenizer(patterns=(r"\p{N}+", _thousands(r"\p{N}"), f"[{_ASIAN_SCRIPTS}]+", _DEEPSEEK3))),
    ("laguna", PreTokenizer(patterns=(r"[^\n]+|[\n]+", _QWEN2))),
    (
        "minicpm5",
        PreTokenizer(patterns=(r"\p{N}{1,3}", _words(r"\p{N}+")), ignores_merges=True),
    ),
    ("default", PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
)
PRE_TOKENIZERS = {name: rule for names, rule in _FAMILIES for name in names.split()}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The rule for a value of `tokenizer.ggml.pre`; an unknown name is a `UserError`, for guessing costs quality."""
    if name not in PRE_TOKENIZERS:
        raise UserError(
            f"tokenizer.ggml.pre is {name[:60]!r}, which is not known; a wrong rule would make the model worse "
            "unnoticed, so update overspill or convert the model with a known name"
        )
    return PRE_TOKENIZERS[name]
