"""Members for enumerations of other packages, which list their backends so."""

from __future__ import annotations

from typing import Any


def add_member(enumeration: Any, name: str, value: str) -> Any:
    """The member of an enumeration with this name and value, added if it is not there.

    An enumeration cannot be extended by subclassing, and the others look names up in theirs.

    Raises:
        ValueError: it has a member of that name with another value.
        RuntimeError: this Python's `Enum` cannot be given another member.
    """
    if name in enumeration.__members__:
        if enumeration[name].value != value:
            raise ValueError(f"name must not be that of another member of {enumeration.__name__}, got {name!r}")
        return enumeration[name]
    member = object.__new__(enumeration)
    member._name_, member._value_ = name, value
    member.__objclass__ = enumeration
    member._sort_order_ = len(enumeration)
    setattr(enumeration, name, member)
    enumeration._member_map_[name] = member
    enumeration._member_names_.append(name)
    enumeration._value2member_map_[value] = member
    if not (enumeration[name] is enumeration(value) is member and list(enumeration)[-1] is member):
        raise RuntimeError(f"this Python's Enum takes no further member, which {enumeration.__name__} needs for ours")
    return member
