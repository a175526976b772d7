"""A small CLIP text encoder, and a tokenizer made of the captions, for where no trained one can be downloaded."""

import json
from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer


START, END = "<|startoftext|>", "<|endoftext|>"
END_OF_WORD = "</w>"

# The last letter of a word is another token than the same letter within it. While the merges are learned such a letter
# is moved by this many code points, into those that are in no text, since the trainer numbers the tokens of its own
# `end_of_word_suffix` anew in each process.
_END_OF_WORD_OFFSET = 0xF0000
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def build_small_clip(
    captions: Iterable[str],
    hidden_size: int = 64,
    num_layers: int = 2,
    num_attention_heads: int = 4,
    context_length: int = 32,
    vocab_size: int = 4096,
) -> tuple[CLIPTextModel, CLIPTokenizer]:
    """
    A CLIP text encoder, freshly initialised and to be trained along, and the tokenizer of [`build_tokenizer`].

    Both are ordinary classes of transformers, saved and loaded as such. `hidden_size` is the model's
    `cross_attention_dim`; torch's global generator initialises.
    """
    tokenizer = build_tokenizer(captions, context_length, vocab_size)
    return build_text_model(tokenizer, hidden_size, num_layers, num_attention_heads), tokenizer


def build_text_model(
    tokenizer: CLIPTokenizer, hidden_size: int = 64, num_layers: int = 2, num_attention_heads: int = 4
) -> CLIPTextModel:
    """For all tokens of the tokenizer, and for texts as long as it makes them."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        projection_dim=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_attention_heads,
        max_position_embeddings=tokenizer.model_max_length,
        # The encoder's own defaults are those of the published CLIP.
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def build_tokenizer(captions: Iterable[str], context_length: int = 32, vocab_size: int = 4096) -> CLIPTokenizer:
    """
    A CLIP tokenizer whose byte pairs are learned from the captions: their frequent words are one token each, and
    any other text is still spelt out. The same captions give the same tokenizer, in whatever order they come.

    Args:
        captions: the texts of a data set.
        context_length: the tokens of a text, with its start and end; longer ones are cut.
        vocab_size: how many tokens there are at most.
    """
    smallest = 2 * len(_LETTERS) + 2
    if vocab_size < smallest:
        raise ValueError(f"vocab_size must be at least {smallest}, which spells any text; got {vocab_size!r}")
    if context_length < 3:
        raise ValueError(f"context_length must leave room for a token between start and end, got {context_length!r}")
    merges = _learn_merges(_count_words(captions), vocab_size - 2)
    # Numbered as in the published CLIP: letters, letters that end a word, merges, start, end.
    letters = [*_LETTERS, *(letter + END_OF_WORD for letter in _LETTERS)]
    tokens = dict.fromkeys([*letters, *map("".join, merges), START, END])
    vocab = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=context_length)


def _count_words(captions: Iterable[str]) -> Counter[str]:
    """The words as CLIP's tokenizer finds them: lower-cased, and spelt in printable letters, one for each byte."""
    clip = CLIPTokenizer().backend_tokenizer
    words = Counter()
    for row, caption in enumerate(captions):
        if not isinstance(caption, str):
            raise TypeError(f"captions must be texts; that of row {row} is {caption!r}")
        normalised = clip.normalizer.normalize_str(caption)
        words.update(word for word, _ in clip.pre_tokenizer.pre_tokenize_str(normalised))
    if not words:
        raise ValueError("there is no word in the captions to make a tokenizer of")
    return words


def _learn_merges(words: Counter[str], num_tokens: int) -> list[tuple[str, str]]:
    """Byte-pair encoding: which neighbours become one token, the most frequent first."""
    marked = {word[:-1] + _mark(word[-1]): count for word, count in words.items()}
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, initial_alphabet=[*_LETTERS, *map(_mark, _LETTERS)], show_progress=False
    )
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    learner.train_from_iterator((" ".join([word] * count) for word, count in sorted(marked.items())), trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    return [(_unmark(left), _unmark(right)) for left, right in merges]


def _mark(letter: str) -> str:
    return chr(ord(letter) + _END_OF_WORD_OFFSET)


def _unmark(token: str) -> str:
    last = ord(token[-1])
    return token if last < _END_OF_WORD_OFFSET else token[:-1] + chr(last - _END_OF_WORD_OFFSET) + END_OF_WORD
