"""A small CLIP text encoder, and a tokenizer trained on the captions, if no pretrained one can be downloaded."""

import json
from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from scalelong_diffusers.errors import UserError


START, END = "<|startoftext|>", "<|endoftext|>"
END_OF_WORD = "</w>"

# In CLIP, the last letter of a word is another token than the same letter inside a word. The trainer's own
# `end_of_word_suffix` numbers the tokens differently in each process. So, while merges are learned, last letters are
# moved by this offset to code points that no text has.
_END_OF_WORD_OFFSET = 0xF0000
_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def build_text_model(
    tokenizer: CLIPTokenizer, hidden_size: int = 64, num_layers: int = 2, num_attention_heads: int = 4
) -> CLIPTextModel:
    """
    Build an untrained text encoder for the vocabulary and the maximum length of a tokenizer.

    `hidden_size` is the `cross_attention_dim` of the model that uses it. The weights depend on torch's global seed.
    """
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        projection_dim=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_attention_heads,
        max_position_embeddings=tokenizer.model_max_length,
        # The defaults fit only the published CLIP.
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def build_tokenizer(captions: Iterable[str], context_length: int = 32, vocab_size: int = 4096) -> CLIPTokenizer:
    """
    Build a CLIP tokenizer whose byte pairs are learned from the captions.

    Frequent words of the captions become one token each, and any other text is spelled out. The order of the captions
    does not matter. `context_length` counts start and end. `vocab_size` is a maximum, but all letters are included.
    """
    # CLIP's tokenizer splits words in lower case, with one printable letter for each byte.
    clip = CLIPTokenizer().backend_tokenizer
    words = Counter()
    for caption in captions:
        normalized = clip.normalizer.normalize_str(caption)
        words.update(word for word, _ in clip.pre_tokenizer.pre_tokenize_str(normalized))
    if not words:
        raise UserError("the captions contain no word to build a tokenizer from")
    merges = _learn_merges(words, vocab_size - 2)
    # The same order as in the published CLIP: letters, letters that end a word, merges, start, end.
    letters = [*_LETTERS, *(letter + END_OF_WORD for letter in _LETTERS)]
    tokens = dict.fromkeys([*letters, *map("".join, merges), START, END])
    vocab = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=context_length)


def _learn_merges(words: Counter[str], num_tokens: int) -> list[tuple[str, str]]:
    """Learn the byte pairs that become one token, most frequent first."""
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
