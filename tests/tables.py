"""Cases as data: tests that go through a table, and products of options of which every pair of values occurs."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from contrastive_curvature.errors import ContrastiveCurvatureError, InputError

__all__ = ["covering", "each", "refused", "refuses"]

Test = Callable[..., None]


def each(names: str, rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test once for every row of a table, as ``parametrize`` does, but as one test; a failure names its row."""
    arguments, table = [name.strip() for name in names.split(",")], list(rows)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for row in table:
                values = row if len(arguments) > 1 else (row,)
                try:
                    test(**dict(zip(arguments, values, strict=True)), **fixtures)
                except BaseException as error:
                    error.add_note(f"in the row {row!r}")
                    raise

        signature = inspect.signature(test)
        rest = [value for name, value in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=rest)
        return run

    return decorate


def refused(call: Callable[[], Any], *words: str, kind: type[Exception] = InputError) -> None:
    """Call what is to be refused, in a message with all these words."""
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, (ContrastiveCurvatureError, AttributeError))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def refuses(kind: type[Exception], *rows: tuple[Any, ...]) -> Test:
    """Make a test of calls ``(call, words)``, each of which raises this error, or a third entry, with these words."""

    def test() -> None:
        for call, words, *other in rows:
            try:
                with pytest.raises(*(other or [kind]), match=words):
                    call()
            except BaseException as error:
                error.add_note(f"in the row of {words!r}")
                raise

    return test


def covering(strength: int, /, **options: Iterable[Any]) -> Any:
    """Parametrise a test by a part of a product of options.

    Args:
        strength: 1: every value of every option occurs; 2: every pair of values of two options does, which finds what
            depends on one or two of them.
        options: Values by name; values of ``a__b`` are pairs for the arguments ``a`` and ``b``.
    """
    columns = [list(values) for values in options.values()]
    rows = _covering_rows(columns, strength)
    names = list(options)
    flat = [name for one in names for name in one.split("__")]
    table = []
    for row in rows:
        values = [columns[k][place] for k, place in enumerate(row)]
        table.append(
            tuple(v for name, value in zip(names, values, strict=True) for v in (value if "__" in name else (value,)))
        )
    return pytest.mark.parametrize(flat, table)


def _covering_rows(columns: Sequence[Sequence[Any]], strength: int) -> list[tuple[int, ...]]:
    """Choose rows of a product greedily: the next one has the most groups of values that no earlier one has."""
    groups = list(itertools.combinations(range(len(columns)), strength))

    def groups_of(row: tuple[int, ...]) -> set[tuple[int, ...]]:
        return {(*group, *(row[k] for k in group)) for group in groups}

    left = [(row, groups_of(row)) for row in itertools.product(*(range(len(column)) for column in columns))]
    wanted = set().union(*(found for _, found in left))
    rows = []
    while wanted:
        row, found = max(left, key=lambda item: len(item[1] & wanted))
        rows.append(row)
        wanted -= found
    return sorted(rows)
