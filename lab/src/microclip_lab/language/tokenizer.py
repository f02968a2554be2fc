"""From texts to tokens and back: a checkpoint's tokenizer, or one trained here on the texts.

What is trained depends on the texts and their order alone, so every process, and every resumed
run, comes to the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from microclip_lab.training.config import SettingError

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"  # tokens 0, 1 and 2, as T5 has them


def trained(texts: Sequence[str], size: int) -> Any:
    """Return a tokenizer of at most `size` tokens that was trained on texts, in lower case."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token=UNKNOWN))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("contiguous")]
    )
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(
        texts,
        BpeTrainer(vocab_size=size, special_tokens=[PAD, END, UNKNOWN], show_progress=False),
    )
    made.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, made.token_to_id(END))]
    )
    wrapper: Any = PreTrainedTokenizerFast
    return wrapper(tokenizer_object=made, pad_token=PAD, eos_token=END, unk_token=UNKNOWN)


def of_checkpoint(checkpoint: str) -> Any:
    """Return the tokenizer of a checkpoint, a name on the hub or a folder."""
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError, ImportError) as error:
        raise SettingError(
            f"The tokenizer of {checkpoint} could not be loaded: {error} Name a T5 checkpoint of "
            "the hub, or a folder with tokenizer.json; one that has only spiece.model needs "
            "`pip install sentencepiece`."
        ) from error
    if loaded.pad_token_id != 0:
        raise SettingError(
            f"A T5 tokenizer has padding as token 0, but that of {checkpoint} has "
            f"{loaded.pad_token_id}."
        )
    return loaded
