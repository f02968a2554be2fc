"""Packed batches: several documents in one row, turned into one document per row.

Packing and padding-free collators save padding, but then a row is no longer an example. `unpack`
gives every document a row of its own, so that losses, norms, weights, ids and domains are per
document in every engine. Knows nothing of engines, rules or trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # the label of a token that has no loss
LABELS = ("labels", "shift_labels")
OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seq_lens")
NUMBERS = ("seq_idx", "document_ids")
LENGTHS = "seq_lengths"
SIZES = ("max_length_q", "max_length_k", "max_seqlen")
MARKS = (*OFFSETS, *NUMBERS, LENGTHS, *SIZES)  # say where documents lie, so they go when unpacked
PADDING: Mapping[str, float] = {"labels": IGNORED}

Layout = list[tuple[int, int, int]]


class PackingError(ValueError):
    """A batch cannot be taken apart into documents, or its documents are not separate."""


class _UnclearError(PackingError):
    """Which tokens are padding cannot be told."""


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed batch lie, row after row.

    Args:
        rows: The row of each document.
        starts: Its first token in that row.
        lengths: Its number of tokens.
        shape: The rows and tokens of the batch.
    """

    rows: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: tuple[int, int]

    def __len__(self) -> int:
        return len(self.rows)

    def labels(self, of_rows: Sequence[Hashable]) -> list[Hashable]:
        """Return one label per document from one per row: all its documents have the same.

        >>> documents_in({"position_ids": torch.tensor([[0, 1, 0], [0, 1, 2]])}).labels("ab")
        ['a', 'a', 'b']
        """
        if len(of_rows) != self.shape[0]:
            raise ValueError(
                f"of_rows must have one label for each of the {self.shape[0]} rows, but has "
                f"{len(of_rows)}."
            )
        return [of_rows[row] for row in self.rows]

    def cut(self, values: Tensor, padding: float = 0) -> Tensor:
        """Return (documents, longest, ...) from (rows, tokens, ...), padded on the right."""
        index, real = self._places(values.device)
        found = values.flatten(0, 1)[index]
        return found.masked_fill(~real.view(*real.shape, *(1,) * (found.dim() - 2)), padding)

    def mask(self, device: torch.device | None = None) -> Tensor:
        """Return (documents, longest): 1 for tokens, 0 for padding."""
        return self._places(device)[1].long()

    def covered(self) -> Tensor:
        """Return (rows, tokens): whether a token belongs to a document."""
        found = torch.zeros(self.shape, dtype=torch.bool)
        for row, start, length in zip(self.rows, self.starts, self.lengths, strict=True):
            found[row, start : start + length] = True
        return found

    def _places(self, device: torch.device | None) -> tuple[Tensor, Tensor]:
        """Return the place of each token among all rows, and whether it is not padding."""
        lengths = torch.tensor(self.lengths)
        first = torch.tensor(self.rows) * self.shape[1] + torch.tensor(self.starts)
        places = torch.arange(max(self.lengths))
        real = places < lengths.unsqueeze(1)
        index = torch.where(real, first.unsqueeze(1) + places, 0)
        return index.to(device), real.to(device)


def is_packed(batch: Any) -> bool:
    """Whether a batch says that some row holds several documents; raise if padding is unclear."""
    if not isinstance(batch, Mapping):
        return False
    try:
        found = documents_in(batch)
    except _UnclearError:
        raise
    except PackingError:
        return False
    return len(set(found.rows)) < len(found)


def documents_in(batch: Mapping[str, Any]) -> Documents:
    """Find the documents of a packed batch.

    They are marked by `cu_seq_lens_q` (offsets into a single row), `seq_idx` or `document_ids` (a
    number for each token), `seq_lengths` (a list of lengths for each row) or `position_ids`, which
    are no longer consecutive where another document starts. If there are several marks, they have
    to agree. Tokens with an `attention_mask` of 0 or a negative number belong to no document, and
    neither do tokens without a label at the end of a row that are single, which is how padding
    looks in `position_ids`, or that have the number 0 after others.

    >>> documents_in({"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}).lengths
    (3, 2)
    """
    shape = _shape_of(batch)
    real = _real_tokens(batch, shape)
    unlabelled = _unlabelled(batch, shape)
    found: dict[str, Layout] = {}
    for name in OFFSETS:
        if batch.get(name) is not None:
            found[name] = _from_offsets(name, batch[name], shape)
    for name in NUMBERS:
        if batch.get(name) is not None:
            table = _table(name, batch[name], shape)
            real = real & ~_numbered_padding(name, table, real, unlabelled)
            found[name] = _runs(table, table[:, 1:] != table[:, :-1])
    if batch.get(LENGTHS) is not None:
        found[LENGTHS] = _from_lengths(batch[LENGTHS], shape)
    if batch.get("position_ids") is not None:
        table = _table("position_ids", batch["position_ids"], shape)
        found["position_ids"] = _runs(table, table[:, 1:] != table[:, :-1] + 1)
    if not found:
        raise PackingError(
            f"Nothing in this batch says where documents start: it has {sorted(batch)}. Let the "
            "collator return position_ids that restart with every document, or cu_seq_lens_q, "
            "seq_idx or seq_lengths. Text that was joined and cut into blocks (packing strategy "
            '"wrapped") has no documents any more.'
        )
    layouts = {name: _trimmed(layout, real, unlabelled) for name, layout in found.items()}
    (first, layout), *others = layouts.items()
    for name, other in others:
        if other != layout:
            raise PackingError(
                f"{first} and {name} disagree about where documents lie: {first} has "
                f"{len(layout)} documents of lengths {[n for *_, n in layout]}, {name} has "
                f"{len(other)} of lengths {[n for *_, n in other]}."
            )
    if LENGTHS in found:  # which do not count padding
        layout = _trimmed(found[LENGTHS], real, None)
    if not layout:
        raise PackingError("The batch holds no document: every token is padding.")
    rows, starts, lengths = zip(*layout, strict=True)
    return Documents(rows, starts, lengths, shape)


def unpack(
    batch: Mapping[str, Any],
    documents: Documents | None = None,
    padding: Mapping[str, float] = PADDING,
) -> dict[str, Any]:
    """Return a padded batch with one document per row, in the order in which they lie.

    A loss for the first token of a document, predicted from the last token of another one, is gone:
    collators give that token the label -100 anyway.

    Args:
        batch: Tensors of shape (rows, tokens, ...) by name, with marks as in `documents_in`.
            Tensors and lists with one entry per document are kept. What could be lost or taken for
            something else is refused: labels of tokens outside documents, entries per row, nested
            dicts, arrays that are not tensors.
        documents: Where the documents lie; None: `documents_in(batch)`.
        padding: What to pad each tensor with; 0 by default, and -100 for labels: `labels` and
            integers with "label" in their name, except masks.

    Returns:
        The same names, without the marks, and with an `attention_mask`.

    >>> packed = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]),
    ...           "position_ids": torch.tensor([[0, 1, 2, 0, 1]])}
    >>> unpack(packed)["input_ids"]
    tensor([[5, 6, 7],
            [8, 9, 0]])
    """
    documents = documents_in(batch) if documents is None else documents
    _check_nothing_is_lost(batch, documents)
    found: dict[str, Any] = {}
    device = None
    for name, value in batch.items():
        if name in MARKS or name == "attention_mask":
            continue
        if isinstance(value, Tensor) and tuple(value.shape[:2]) == documents.shape:
            found[name] = documents.cut(value, padding.get(name, _default_padding(name, value)))
            device = value.device
            continue
        _check_entries(name, value, documents)
        found[name] = value
    found["attention_mask"] = documents.mask(device)
    return found


def check_separate(
    logits_fn: Callable[[dict[str, Any]], Tensor],
    batch: Mapping[str, Any],
    tolerance: float = 1e-3,
) -> None:
    """Raise unless a model gives packed documents the logits that they have on their own.

    If not, attention or a recurrent state leaks from one document into the next in packed training.
    Unpacked documents are separate in any case.

    Args:
        logits_fn: Returns (rows, tokens, ...) for a packed or unpacked batch, without dropout.
        batch: A packed batch.
        tolerance: The largest difference, relative to the largest logit.
    """
    documents = documents_in(batch)
    with torch.no_grad():
        packed = documents.cut(logits_fn(dict(batch)))
        alone = logits_fn(unpack(batch, documents))
    real = documents.mask(alone.device).bool()
    off = (packed - alone).abs().flatten(2).amax(2).masked_fill(~real, 0).amax(1)
    largest = alone[real].abs().max()
    worst = int(off.argmax())
    if not bool(off[worst] <= tolerance * largest):
        raise PackingError(
            f"Packed documents are not separate: logits of document {worst} in row "
            f"{documents.rows[worst]} differ by {float(off[worst]):.3g} from those it has alone "
            f"(the largest logit is {float(largest):.3g}). The attention ignores where documents "
            "start; train on unpacked batches, or use an attention that does not."
        )


def _shape_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and tokens of a batch."""
    if not isinstance(batch, Mapping):
        raise PackingError(
            f"A packed batch is a dict of tensors by name, but got {type(batch).__name__}."
        )
    for name in ("input_ids", "inputs_embeds", "position_ids", "labels", *NUMBERS):
        value = batch.get(name)
        if isinstance(value, Tensor) and value.dim() >= 2:
            return int(value.shape[0]), int(value.shape[1])
    raise PackingError(
        f"Found no tensor of shape (rows, tokens) in this batch: it has {sorted(batch)}. Name it "
        "input_ids, inputs_embeds, position_ids or labels."
    )


def _table(name: str, value: Any, shape: tuple[int, int]) -> Tensor:
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise PackingError(
            f"batch[{name!r}] must have shape {shape}, one number per token, but got {found}."
        )
    return value.cpu()


def _real_tokens(batch: Mapping[str, Any], shape: tuple[int, int]) -> Tensor:
    mask = batch.get("attention_mask")
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    found = _table("attention_mask", mask, shape)
    if bool((found > 1).any()):
        raise _UnclearError(
            "batch['attention_mask'] numbers the documents. Pass these numbers as document_ids "
            "instead, and 0 and 1 as attention_mask."
        )
    other = found[(found != 0) & (found != 1)]
    if len(other):
        raise _UnclearError(
            "batch['attention_mask'] must be 1 for tokens and 0 for padding, but holds "
            f"{other[0].item():g}. If it is added to attention scores, pass (mask == 0).long()."
        )
    return found.bool()


def _unlabelled(batch: Mapping[str, Any], shape: tuple[int, int]) -> Tensor | None:
    """Return which tokens have no label; None if there are no labels."""
    tables = [_table(name, batch[name], shape) for name in LABELS if batch.get(name) is not None]
    return torch.stack([each == IGNORED for each in tables]).all(0) if tables else None


def _numbered_padding(name: str, table: Tensor, real: Tensor, unlabelled: Tensor | None) -> Tensor:
    """Return the tokens that are padding by their number: negative, or 0 after the documents."""
    negative = table < 0
    tail = ((table == 0) | negative | ~real).flip(1).cumprod(1).flip(1).bool()
    zeros = tail & real & ~negative
    alone = tail.all(1)  # rows without another number
    firsts = table[~alone, :1]
    if not len(firsts) or bool((firsts == 0).any()):  # then 0 is the number of the first document
        zeros[alone] = False
    if unlabelled is None:
        zeros[alone] = False
        unclear = (zeros | (real & (table < -1))).nonzero().tolist()
        if unclear:
            row, token = unclear[0]
            raise _UnclearError(
                f"Row {row} of batch[{name!r}] has the number {int(table[row, token])} at token "
                f"{token}, which may be padding or a document. Add an attention_mask, 0 for "
                "padding, or labels, and number documents from 1."
            )
        return negative
    labelled = (zeros & ~unlabelled).any(1, keepdim=True)
    return negative | (zeros & ~labelled)


def _check_nothing_is_lost(batch: Mapping[str, Any], documents: Documents) -> None:
    """Raise if documents have hidden tokens, or other tokens have labels."""
    covered = documents.covered()
    if bool((covered & ~_real_tokens(batch, documents.shape)).any()):
        raise PackingError("batch['attention_mask'] hides tokens of the documents.")
    unlabelled = _unlabelled(batch, documents.shape)
    lost = None if unlabelled is None else (~covered & ~unlabelled).nonzero().tolist()
    if lost:
        row, token = lost[0]
        raise PackingError(
            f"{len(lost)} tokens that belong to no document have labels, first token {token} of "
            f"row {row}. Give padding the label {IGNORED}, or mark these tokens as documents."
        )


def _check_entries(name: str, value: Any, documents: Documents) -> None:
    """Raise unless a value is single or has one entry per document, beyond doubt."""
    number = isinstance(value, Tensor) and value.dim() == 0
    if number or isinstance(value, str | bytes) or not isinstance(value, Sized):
        return
    rows = documents.shape[0]
    if not isinstance(value, Tensor | list | tuple):
        raise PackingError(
            f"batch[{name!r}] is a {type(value).__name__}, which cannot be cut into documents. "
            "Make it a tensor of shape (rows, tokens, ...) or a list with one entry per document, "
            "or leave it out."
        )
    if len(value) != len(documents):
        raise PackingError(
            f"batch[{name!r}] has {len(value)} entries, but the {rows} rows hold {len(documents)} "
            "documents. Give it one entry per document or per token, or leave it out."
        )
    if rows == len(documents) and documents.rows != tuple(range(rows)):
        raise PackingError(
            f"batch[{name!r}] has {rows} entries, which may be one per row or one per document: "
            f"there are {rows} of both, but some rows hold several documents and others none. "
            "Leave out rows of padding, or add it to the unpacked batch."
        )


def _default_padding(name: str, value: Tensor) -> float:
    integers = value.dtype.is_signed and not value.dtype.is_floating_point
    labels = integers and "label" in name and "mask" not in name
    return IGNORED if labels or name in PADDING else 0


def _from_offsets(name: str, offsets: Tensor, shape: tuple[int, int]) -> Layout:
    ends = torch.as_tensor(offsets).flatten().tolist()
    total = shape[0] * shape[1]
    if ends[:1] != [0] or ends[-1] != total or any(b < a for a, b in pairwise(ends)):
        raise PackingError(
            f"batch[{name!r}] must rise from 0 to {total}, the number of tokens, but is {ends}."
        )
    found = []
    for start, stop in pairwise(ends):
        row = start // shape[1]
        if stop > start:
            if stop > (row + 1) * shape[1]:
                raise PackingError(
                    f"The document of tokens {start} to {stop} of batch[{name!r}] crosses the end "
                    f"of row {row}, which has {shape[1]} tokens."
                )
            found.append((row, start - row * shape[1], stop - start))
    return found


def _from_lengths(lengths: Any, shape: tuple[int, int]) -> Layout:
    rows = lengths.tolist() if isinstance(lengths, Tensor) else [list(map(int, n)) for n in lengths]
    if shape[0] == 1 and len(rows) > 1:  # rows that a collator joined
        rows = [[length for row in rows for length in row]]
    if len(rows) != shape[0] or any(sum(row) > shape[1] for row in rows):
        raise PackingError(
            f"batch[{LENGTHS!r}] must hold the lengths of the documents of each of {shape[0]} rows "
            f"of {shape[1]} tokens, but is {rows}."
        )
    found = []
    for row, each in enumerate(rows):
        start = 0
        for length in each:
            if length:
                found.append((row, start, length))
            start += length
    return found


def _runs(table: Tensor, changes: Tensor) -> Layout:
    """Return the runs of tokens between changes."""
    found = []
    for row in range(len(table)):
        cuts = [0, *(changes[row].nonzero().flatten() + 1).tolist(), table.shape[1]]
        found += [(row, a, b - a) for a, b in pairwise(cuts) if b > a]
    return found


def _trimmed(layout: Layout, real: Tensor, unlabelled: Tensor | None) -> Layout:
    """Leave out padding: what is masked, and single tokens without a label that end a row."""
    found: Layout = []
    ended = -1  # the row whose last document was found
    for row, start, length in reversed(layout):
        tokens = real[row, start : start + length].nonzero().flatten()
        if not len(tokens):
            continue
        first, last = int(tokens[0]), int(tokens[-1])
        if last - first + 1 != len(tokens):
            raise PackingError(
                f"attention_mask or a negative number hides tokens in the middle of a document of "
                f"row {row}."
            )
        if unlabelled is not None and row != ended and length == 1 and bool(unlabelled[row, start]):
            continue
        ended = row
        found.append((row, start + first, len(tokens)))
    return found[::-1]
