"""How many samples a batch holds.

tensor               its length: dense, sparse, or nested
mapping, dataclass   what its parts agree on; scalars, strings and the like say nothing
list in a batch      its own length, or that of its parts (columns); whichever all parts of the batch agree on
list as the batch    columns, as torch's `default_collate` makes them of samples that are tuples
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch.

    Raises:
        ValueError: the batch does not say, or its parts contradict each other.
    """
    if isinstance(batch, Tensor) and not batch.ndim:
        return 1
    is_list = _is_list(batch)
    found = _common(map(possible_counts, batch)) if is_list else possible_counts(batch)
    if is_list and len(batch) > 1 and found != {len(batch)} and _are_alike(batch):
        if found:
            raise ValueError(f"It may be a list of {len(batch)} samples, or columns of {_text(found)}.")
        return len(batch)
    if found is None:
        raise ValueError(f"There is no tensor with samples in a {type(batch).__name__}.")
    if len(found) != 1:
        raise ValueError(f"Its parts hold {_text(found)}." if found else "Its parts differ in length.")
    return next(iter(found))


def sample_counter(module: object, setting: str) -> Callable[[Any], int]:
    """Return what counts the samples of a batch: a method of the module's own, `count_samples`, or the one above.

    Its errors name the ``setting`` that asks for the number.
    """
    own: Callable[[Any], Any] | None = getattr(module, "count_samples", None)

    def count(batch: Any) -> int:
        if own is not None:
            samples = own(batch)
            if isinstance(samples, bool) or not isinstance(samples, int) or samples < 0:
                raise ValueError(
                    f"Expected a number of samples from {type(module).__name__}.count_samples: {samples!r}."
                )
            return samples
        try:
            return count_samples(batch)
        except ValueError as error:
            raise ValueError(
                f"{setting} needs the number of samples of each batch, which this batch does not tell. {error} Define "
                f"`count_samples(self, batch) -> int` in {type(module).__name__}."
            ) from None

    return count


def possible_counts(value: Any) -> set[int] | None:
    """Return the numbers of samples that a part of a batch may hold; None if it does not say."""
    if isinstance(value, PackedSequence):
        return {int(value.batch_sizes[0])}
    if isinstance(value, Tensor):
        return {value.size(0)} if value.ndim else None
    if isinstance(value, Mapping):
        return _common(map(possible_counts, value.values()))
    if is_dataclass(value) and not isinstance(value, type):
        return _common(possible_counts(getattr(value, entry.name)) for entry in fields(value))
    if _is_list(value):
        columns = _common(map(possible_counts, value))
        return None if columns is None else columns | {len(value)}
    return _common(map(possible_counts, value)) if isinstance(value, tuple) else None


def is_list_of_samples(value: Any, samples: int) -> bool:
    """Tell whether a list in a batch of so many samples holds one entry for each, and not columns of them."""
    return _is_list(value) and len(value) == samples and samples not in (_common(map(possible_counts, value)) or ())


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _common(counts: Iterable[set[int] | None]) -> set[int] | None:
    said = [count for count in counts if count is not None]
    return set.intersection(*said) if said else None


def _are_alike(items: Sequence[Any]) -> bool:
    """Tell whether items may as well be samples: images, or mappings with the same keys."""
    if all(isinstance(item, Tensor) for item in items):
        return len({(item.dtype, item.ndim) for item in items}) == 1 and items[0].ndim > 2
    return all(isinstance(item, Mapping) for item in items) and len({frozenset(item) for item in items}) == 1


def _text(counts: set[int]) -> str:
    return " or ".join(map(str, sorted(counts))) + " samples"
